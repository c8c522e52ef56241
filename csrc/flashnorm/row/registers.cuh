// Rows in registers: as they were stored, in a number of them that is fixed when the kernel is compiled.
#pragma once

#include "place.cuh"

namespace flashnorm {

#if FN_KERNELS

// Makes the compiler forget what it derived from a pack, so that a later pass widens it again
// instead of carrying twice the registers over the barrier.
template <class T, int N>
FN_DEVICE void forget(Pack<T, N>& pack) {
  FN_UNROLL
  for (int i = 0; i < Pack<T, N>::kWords; ++i) asm volatile("" : "+r"(pack.words[i]));
}

// kLanes lanes a thread, kGroups groups a lane: T threads a row hold L = kLanes * T lanes. A thread has one row, or the
// same part of kRows rows that lie one below the other (`Tile::kAbreast`): vectors are read once for all of them, and
// their sums cross warps together.
template <class Program, class Tile, class Reduce>
class RegisterRow {
 public:
  static constexpr int kRows = Tile::kAbreast;

 private:
  using Load = LocatedOf<Program>;
  using Maps = decltype(Program::maps);
  using Kept = typename Load::Kept;
  using Raw = typename Load::template Raw<kGroup>;
  using Vecs = typename VecsOf<Load>::template Vecs<kGroup>;
  using MapRaw = typename Maps::template Raw<kGroup>;
  using MapRows = typename Maps::template Rows<kGroup>;
  using Access = typename Tile::Access;
  using Next = NextOf<decltype(Program::store)>;

  static constexpr int kLanes = Tile::kLanes, kGroups = Tile::kGroups, kHeld = Tile::kPresent;
  // Reads in flight before the first is used: all of them, as far as a thread's registers go. Where a row is
  // kept as it was read, the reads take no registers of their own.
  static constexpr int kRegisters = 65536 / Tile::kMaxCta > 128 ? 128 : 65536 / Tile::kMaxCta;
  static constexpr int kSpare =
      4 * (kRegisters - 28) - kRows * kHeld * (int(sizeof(Pack<Kept, kGroup>)) + Maps::row_bytes());
  static constexpr int kReads =
      sizeof(Raw) == sizeof(Pack<Kept, kGroup>) ? kHeld : batch_of(kHeld, kRows * int(sizeof(Raw)), kSpare);
  // Maps are read in batches, one ahead of its use: a store keeps every later read behind it. A weight and a bias
  // are not all asked for early where they would take more registers than the row.
  static constexpr bool kEarlyMaps =
      Tile::kEarlyMaps && (Maps::raw_bytes() <= 32 || kHeld * Maps::raw_bytes() <= 128);
  static constexpr int kMapReads = kEarlyMaps ? kHeld : batch_of(kHeld, Maps::raw_bytes(), 32);
  static constexpr int kMapBatches = (kHeld + kMapReads - 1) / kMapReads;
  // Of several rows one hides the other's reads, but for those whose many registers leave room for few of them.
  static constexpr bool kAhead = kRows == 1 || std::is_same_v<Kept, float>;
  static constexpr bool kHoldsReads = kHeld > 1 && (VecsOf<Load>::kThere || Maps::row_bytes() > 0);
  static constexpr int kNextReads = batch_of(kHeld, sizeof(typename Next::Raw), 32);
  static constexpr int kNextBatches = (kHeld + kNextReads - 1) / kNextReads;
  // Half of a thread's groups are certain, if there is a row: a row has more than half as many groups as lanes, and more
  // than half of what a tile has room for.
  static constexpr int kCertain = kHeld / 2;
  static constexpr bool kHasRow =
      !Tile::kManyRows && decltype(Program::store)::kBlock == kNoBlock && decltype(Program::stats)::kSums > 1;
  static_assert(kRows == 1 || !AgainOf<decltype(Program::store)>::kThere, "a row is held once more");

 public:
  // Whether the differences from the mean, once they are asked for, are what the row is held as.
  static constexpr bool kCentred = std::is_same_v<Kept, float>;
  // Whether a result fits exactly where the row is held.
  static constexpr bool kHoldsResult =
      std::is_same_v<Kept, float> || std::is_same_v<Kept, typename RoundedBy<Maps>::Type>;

  FN_DEVICE RegisterRow(const Program& program, const RowGrid& grid, const Place& place, Reduce& reduce)
      : program_(program), place_(place), reduce_(reduce), hidden_size_(grid.hidden_size) {
    FN_UNROLL
    for (int r = 1; r < kRows; ++r) left_below_[r] = place.left_below(r, grid);
  }

  FN_DEVICE void touch() const {
    FN_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      if (col(i) < left(0)) touch_group(program_, col(i));
    }
  }

  FN_DEVICE void read() {
    Load load[kRows];
    FN_UNROLL
    for (int r = 0; r < kRows; ++r) load[r] = program_.load.locate(Row{0, r, r}, left(r) > 0);
    Vecs vecs[kHeld > 1 ? 2 : 1];  // in caches: one group ahead is enough
    FN_UNROLL
    for (int first = 0; first < kHeld; first += kReads) {
      Raw raw[kRows][kReads] = {};
      FN_UNROLL
      for (int r = 0; r < kRows; ++r) {
        FN_UNROLL
        for (int i = 0; i < kReads && first + i < kHeld; ++i) {
          if (reaches<Access>(left(r), col(first + i))) load[r].fetch(raw[r][i], at<Access>(first + i, r));
        }
      }
      if (first == 0) {
        read_map_rows();
        // Else the device compiler would issue part of the reads only where the first ones are used.
        if (kHoldsReads) sync_warp();
        read_vecs(load[0], vecs[0], 0);
        if (kEarlyMaps) read_maps(0);
      }
      FN_UNROLL
      for (int i = 0; i < kReads && first + i < kHeld; ++i) {
        const int group = first + i;
        if (group + 1 < kHeld) read_vecs(load[0], vecs[(group + 1) % 2], group + 1);
        FN_UNROLL
        for (int r = 0; r < kRows; ++r) {
          keep(load[r], kept_[r][group], raw[r][i], vecs[group % 2], count<Access>(group, r));
          if (reaches<Access>(left(r), col(group))) load[r].save(kept_[r][group], at<Access>(group, r));
        }
      }
    }
    if (!kEarlyMaps && kAhead) read_maps(0);
  }

  FN_DEVICE int hidden_size() const { return hidden_size_; }
  FN_DEVICE void sum(float (&sums)[kRows]) { sum_of<Values>(sums); }
  FN_DEVICE void sum_squares(float (&sums)[kRows]) { sum_of<Squares>(sums); }
  FN_DEVICE void deviations(Deviations (&found)[kRows], const float (&means)[kRows]) {
    float sums[kRows * 2];
    fold<Values, Squares>(sums, [&](float (&v)[kGroup], int i, int r) {
      if (kHeld > 2) forget(kept_[r][i]);
      widen(v, kept_[r][i]);
      centre(v, means[r], count<Access>(i, r));
      if constexpr (kCentred) narrow(kept_[r][i], v);
    });
    FN_UNROLL
    for (int r = 0; r < kRows; ++r) found[r] = {sums[2 * r], sums[2 * r + 1]};
  }

  // A pass before the last: look(v, maps, at) for every group. What it makes of v is what the last pass is given,
  // with `kHoldsResult`.
  template <class Look>
  FN_DEVICE void survey(const Look& look) {
    pass<false, true>([&](auto& v, const auto& maps, const auto& at, int group) {
      look(v, maps, at);
      if constexpr (kHoldsResult) narrow(kept_[at.row.inner][group], v);
    });
    if (!kHoldsResult && kMapBatches > 1 && kAhead) read_maps(0);
  }
  // The last pass: finish(v, maps, at) for every group; with `kTogether`, by all threads of a warp. `kMaps` says
  // whether it makes use of the maps.
  template <bool kTogether, bool kMaps = true, class Finish>
  FN_DEVICE void finish(const Finish& finish) {
    pass<kTogether, kMaps>([&](auto& v, const auto& maps, const auto& at, int) { finish(v, maps, at); });
  }

  // With a store that has the row again: look(v, maps, at, again) for every group, which makes `again` of it; then the
  // sum of what was made, and finish(v, raw, at) for every group of that.
  template <class Look>
  FN_DEVICE void renew(const Look& look) {
    read_next(0);
    pass<false, true>([&](auto& v, const auto& maps, const auto& at, int group) { look(v, maps, at, again_[group]); });
  }
  FN_DEVICE void sum_squares_again(float (&sums)[kRows]) {
    fold<Squares>(sums, [&](float (&v)[kGroup], int i, int) { widen(v, again_[i]); });
  }
  template <class Finish>
  FN_DEVICE void finish_again(const Finish& finish) {
    FN_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      if (i % kNextReads == 0 && i + kNextReads < kHeld) read_next(i / kNextReads + 1);
      if (!reaches<Access>(left(0), col(i))) continue;
      float v[kGroup];
      widen(v, again_[i]);
      finish(v, next_[i / kNextReads % 2][i % kNextReads], at<Access>(i));
    }
  }

 private:
  template <class Term>
  FN_DEVICE void sum_of(float (&sums)[kRows]) {
    fold<Term>(sums, [&](float (&v)[kGroup], int i, int r) { widen(v, kept_[r][i]); });
  }

  // The canonical sums of the terms of what `get(v, i, r)` makes of group i of row r: one after the other for each row.
  template <class... Terms, class Get>
  FN_DEVICE void fold(float (&sums)[kRows * sizeof...(Terms)], const Get& get) {
    constexpr int kSums = sizeof...(Terms);
    FN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float own[kSums];
      fold_row<Terms...>(own, r, get);
      FN_UNROLL
      for (int k = 0; k < kSums; ++k) sums[r * kSums + k] = own[k];
    }
    reduce_.template join_warps<Add>(sums);
  }
  template <class... Terms, class Get>
  FN_DEVICE void fold_row(float (&sums)[sizeof...(Terms)], int row, const Get& get) {
    constexpr int kSums = sizeof...(Terms);
    float lane[kSums][kLanes];
    FN_UNROLL
    for (int j = 0; j < kLanes; ++j) {
      if (j >= kHeld) {  // the lane has no group
        FN_UNROLL
        for (int k = 0; k < kSums; ++k) lane[k][j] = 0.0f;
        continue;
      }
      Lane<Terms...> sum;
      FN_UNROLL
      for (int r = 0; r < kGroups; ++r) {
        // A tile with more groups a lane than any row of this width has adds nothing for them.
        if (!sum.kSkipsMissing && r > 1 && col(r * kLanes) >= hidden_size_) continue;
        float v[kGroup];
        get(v, r * kLanes + j, row);
        r == 0 ? sum.first(v) : sum.next(v);
      }
      FN_UNROLL
      for (int k = 0; k < kSums; ++k) lane[k][j] = sum.fold(k);
    }
    reduce_.template fold_here<Add>(sums, lane);
  }

  template <bool kTogether, bool kMaps, class Each>
  FN_DEVICE void pass(const Each& each) {
    using Out = PassAccess<Access, kTogether>;
    FN_UNROLL
    for (int batch = 0; batch < kMapBatches; ++batch) {
      if (kMaps && !kAhead) read_maps(batch);
      if (kMaps && kAhead && batch + 1 < kMapBatches) read_maps(batch + 1);
      FN_UNROLL
      for (int i = batch * kMapReads; i < (batch + 1) * kMapReads && i < kHeld; ++i) {
        // Where all threads of a warp come along, no group that the whole row lacks.
        if (kTogether && i >= kCertain && col(i) >= hidden_size_) continue;
        FN_UNROLL
        for (int r = 0; r < kRows; ++r) {
          if (kHeld > 2) forget(kept_[r][i]);
          if (!has<Out>(i, r)) continue;
          float v[kGroup];
          widen(v, kept_[r][i]);
          each(v, MapReads<Maps>{maps_[batch % 2][i % kMapReads], map_rows_[r][i]}, at<Out>(i, r), i);
        }
      }
    }
  }

  // Elements of row r from this thread's first on, as `Place::left`.
  FN_DEVICE int left(int r) const { return r == 0 ? place_.left : left_below_[r]; }
  // Groups are numbered as they lie: lane j of the thread has groups j, j + kLanes, ...
  FN_DEVICE static int col(int i) {
    if constexpr (Tile::kNarrow) return i * int(blockDim.x) * kGroup;
    // Elsewhere, where blockDim.x is not known, a thread has one group.
    return i * Tile::kThreads * Tile::kCluster * kGroup;
  }
  template <class Out>
  FN_DEVICE bool has(int i, int r) const {
    if (i >= kCertain || !std::is_same_v<Out, Whole>) return reaches<Out>(left(r), col(i));
    return (kHasRow && r == 0) || left(r) > 0;
  }
  template <class Out>
  FN_DEVICE int count(int i, int r) const {
    if (i >= kCertain) return elements_of<Out>(left(r), col(i));
    return (kHasRow && r == 0) || left(r) > 0 ? kGroup : 0;
  }
  template <class Out>
  FN_DEVICE At<Out> at(int i, int r = 0) const {
    At<Out> group = at_group<Out>(place_, left(r), col(i));
    group.row = Row{0, r, r};
    return group;
  }

  FN_DEVICE void read_maps(int batch) {
    FN_UNROLL
    for (int i = 0; i < kMapReads; ++i) {
      const int group = batch * kMapReads + i;
      if (group < kHeld && reaches<Access>(left(0), col(group))) program_.maps.fetch(maps_[batch % 2][i], at<Access>(group));
    }
  }

  FN_DEVICE void read_vecs(const Load& load, Vecs& vecs, int group) const {
    if (reaches<Access>(left(0), col(group))) fetch_vecs<Load, kGroup>(load, vecs, at<Access>(group));
  }
  FN_DEVICE void read_map_rows() {
    FN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      FN_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        if (reaches<Access>(left(r), col(i))) program_.maps.fetch_rows(map_rows_[r][i], at<Access>(i, r));
      }
    }
  }
  FN_DEVICE void read_next(int batch) {
    FN_UNROLL
    for (int i = 0; i < kNextReads; ++i) {
      const int group = batch * kNextReads + i;
      if (group < kHeld && reaches<Access>(left(0), col(group))) Next::fetch(program_.store, next_[batch % 2][i], at<Access>(group));
    }
  }

  const Program& program_;
  const Place& place_;
  int left_below_[kRows];
  Reduce& reduce_;
  int hidden_size_;
  Pack<Kept, kGroup> kept_[kRows][kHeld];
  MapRows map_rows_[kRows][kHeld];
  MapRaw maps_[kMapBatches > 1 ? 2 : 1][kMapReads];
  typename Next::Again again_[kHeld] = {};
  typename Next::Raw next_[kNextBatches > 1 ? 2 : 1][kNextReads];
};

#endif  // FN_KERNELS

}  // namespace flashnorm
