// A row in registers: as it was stored, in a number of them that is fixed when the kernel is compiled.
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

// kLanes lanes a thread, kGroups groups a lane: T threads a row hold L = kLanes * T lanes.
template <class Program, class Tile, class Reduce>
class RegisterRow {
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
  static constexpr int kSpare = 4 * (kRegisters - 28) - kHeld * (int(sizeof(Pack<Kept, kGroup>)) + Maps::row_bytes());
  static constexpr int kReads =
      sizeof(Raw) == sizeof(Pack<Kept, kGroup>) ? kHeld : batch_of(kHeld, sizeof(Raw), kSpare);
  // Maps are read in batches, one ahead of its use: a store keeps every later read behind it. A weight and a bias
  // are not all asked for early where they would take more registers than the row.
  static constexpr bool kEarlyMaps =
      Tile::kEarlyMaps && (Maps::raw_bytes() <= 32 || kHeld * Maps::raw_bytes() <= 128);
  static constexpr int kMapReads = kEarlyMaps ? kHeld : batch_of(kHeld, Maps::raw_bytes(), 32);
  static constexpr int kMapBatches = (kHeld + kMapReads - 1) / kMapReads;
  static constexpr bool kHoldsReads = kHeld > 1 && (VecsOf<Load>::kThere || Maps::row_bytes() > 0);
  static constexpr int kNextReads = batch_of(kHeld, sizeof(typename Next::Raw), 32);
  static constexpr int kNextBatches = (kHeld + kNextReads - 1) / kNextReads;
  // Half of a thread's groups are certain, if there is a row: a row has more than half as many groups as lanes, and more
  // than half of what a tile has room for.
  static constexpr int kCertain = kHeld / 2;
  static constexpr bool kHasRow = !Tile::kManyRows && decltype(Program::store)::kBlock == kNoBlock;

 public:
  // Whether the differences from the mean, once they are asked for, are what the row is held as.
  static constexpr bool kCentred = std::is_same_v<Kept, float>;
  // Whether a result fits exactly where the row is held.
  static constexpr bool kHoldsResult =
      std::is_same_v<Kept, float> || std::is_same_v<Kept, typename RoundedBy<Maps>::Type>;

  FN_DEVICE RegisterRow(const Program& program, const RowGrid& grid, const Place& place, Reduce& reduce)
      : program_(program), place_(place), reduce_(reduce), hidden_size_(grid.hidden_size) {}

  FN_DEVICE void touch() const {
    FN_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      if (col(i) < place_.left) touch_group(program_, col(i));
    }
  }

  // The row, from where `fetch(load, raw, group)` has it.
  template <class Fetch>
  FN_DEVICE void read(const Fetch& fetch) {
    const Load load = program_.load.locate(Row{0, 0}, place_.left > 0);
    Vecs vecs[kHeld > 1 ? 2 : 1];  // in caches: one group ahead is enough
    FN_UNROLL
    for (int first = 0; first < kHeld; first += kReads) {
      Raw raw[kReads] = {};
      FN_UNROLL
      for (int i = 0; i < kReads && first + i < kHeld; ++i) {
        if (reaches<Access>(place_, col(first + i))) fetch(load, raw[i], first + i);
      }
      if (first == 0) {
        read_map_rows();
        // Else the device compiler would issue part of the reads only where the first ones are used.
        if (kHoldsReads) sync_warp();
        read_vecs(load, vecs[0], 0);
        if (kEarlyMaps) read_maps(0);
      }
      FN_UNROLL
      for (int i = 0; i < kReads && first + i < kHeld; ++i) {
        const int group = first + i;
        if (group + 1 < kHeld) read_vecs(load, vecs[(group + 1) % 2], group + 1);
        keep(load, kept_[group], raw[i], vecs[group % 2], count<Access>(group));
        if (reaches<Access>(place_, col(group))) load.save(kept_[group], at<Access>(group));
      }
    }
    if (!kEarlyMaps) read_maps(0);
  }

  FN_DEVICE void read() {
    read([&](const Load& load, Raw& raw, int group) { load.fetch(raw, at<Access>(group)); });
  }

  // The same by way of shared memory, where a thread reads only what it put there: `ask` starts copies, and `read_asked`
  // has the row once they are there.
  FN_DEVICE void ask() const {
    const Load load = program_.load.locate(Row{0, 0}, place_.left > 0);
    FN_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      if (reaches<Access>(place_, col(i))) load.fetch(asked(i), at<Async>(i));
    }
  }
  FN_DEVICE void read_asked() {
    await_copies();
    read([&](const Load&, Raw& raw, int group) { raw = asked(group); });
  }

  FN_DEVICE int hidden_size() const { return hidden_size_; }
  FN_DEVICE float sum() { return sum_of<Values>(); }
  FN_DEVICE float sum_squares() { return sum_of<Squares>(); }
  FN_DEVICE Deviations deviations(float mean) {
    float sums[2];
    fold<Values, Squares>(sums, [&](float (&v)[kGroup], int i) {
      if (kHeld > 2) forget(kept_[i]);
      widen(v, kept_[i]);
      centre(v, mean, count<Access>(i));
      if constexpr (kCentred) narrow(kept_[i], v);
    });
    return {sums[0], sums[1]};
  }

  // A pass before the last: look(v, maps, at) for every group. What it makes of v is what the last pass is given,
  // with `kHoldsResult`.
  template <class Look>
  FN_DEVICE void survey(const Look& look) {
    pass<false, true>([&](auto& v, const auto& maps, const auto& at, int group) {
      look(v, maps, at);
      if constexpr (kHoldsResult) narrow(kept_[group], v);
    });
    if (!kHoldsResult && kMapBatches > 1) read_maps(0);
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
  FN_DEVICE float sum_squares_again() {
    float sums[1];
    fold<Squares>(sums, [&](float (&v)[kGroup], int i) { widen(v, again_[i]); });
    return sums[0];
  }
  template <class Finish>
  FN_DEVICE void finish_again(const Finish& finish) {
    FN_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      if (i % kNextReads == 0 && i + kNextReads < kHeld) read_next(i / kNextReads + 1);
      if (!reaches<Access>(place_, col(i))) continue;
      float v[kGroup];
      widen(v, again_[i]);
      finish(v, next_[i / kNextReads % 2][i % kNextReads], at<Access>(i));
    }
  }

 private:
  template <class Term>
  FN_DEVICE float sum_of() {
    float sums[1];
    fold<Term>(sums, [&](float (&v)[kGroup], int i) { widen(v, kept_[i]); });
    return sums[0];
  }

  // The canonical sums of the terms of what `get(v, i)` makes of group i.
  template <class... Terms, class Get>
  FN_DEVICE void fold(float (&sums)[sizeof...(Terms)], const Get& get) {
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
        get(v, r * kLanes + j);
        r == 0 ? sum.first(v) : sum.next(v);
      }
      FN_UNROLL
      for (int k = 0; k < kSums; ++k) lane[k][j] = sum.fold(k);
    }
    reduce_.template fold<Add>(sums, lane);
  }

  template <bool kTogether, bool kMaps, class Each>
  FN_DEVICE void pass(const Each& each) {
    using Out = PassAccess<Access, kTogether>;
    FN_UNROLL
    for (int batch = 0; batch < kMapBatches; ++batch) {
      if (kMaps && batch + 1 < kMapBatches) read_maps(batch + 1);
      FN_UNROLL
      for (int i = batch * kMapReads; i < (batch + 1) * kMapReads && i < kHeld; ++i) {
        if (kHeld > 2) forget(kept_[i]);
        // Where all threads of a warp come along, no group that the whole row lacks.
        if (kTogether && i >= kCertain && col(i) >= hidden_size_) continue;
        if (!has<Out>(i)) continue;
        float v[kGroup];
        widen(v, kept_[i]);
        each(v, MapReads<Maps>{maps_[batch % 2][i % kMapReads], map_rows_[i]}, at<Out>(i), i);
      }
    }
  }

  // Groups are numbered as they lie: lane j of the thread has groups j, j + kLanes, ...
  FN_DEVICE static int col(int i) {
    if constexpr (Tile::kNarrow) return i * int(blockDim.x) * kGroup;
    // Elsewhere, where blockDim.x is not known, a thread has one group.
    return i * Tile::kThreads * Tile::kCluster * kGroup;
  }
  template <class Out>
  FN_DEVICE bool has(int i) const {
    if (i >= kCertain || !std::is_same_v<Out, Whole>) return reaches<Out>(place_, col(i));
    return kHasRow || place_.left > 0;
  }
  template <class Out>
  FN_DEVICE int count(int i) const {
    if (i >= kCertain) return elements_of<Out>(place_, col(i));
    return kHasRow || place_.left > 0 ? kGroup : 0;
  }
  FN_DEVICE Raw& asked(int i) const {
    return reinterpret_cast<Raw*>(dynamic_shared())[(i * int(Tile::kManyRows ? blockDim.y : 1) + place_.row_in_cta) * Tile::kThreads + int(threadIdx.x)];
  }
  template <class Out>
  FN_DEVICE At<Out> at(int i) const {
    return at_group<Out>(place_, col(i));
  }

  FN_DEVICE void read_maps(int batch) {
    FN_UNROLL
    for (int i = 0; i < kMapReads; ++i) {
      const int group = batch * kMapReads + i;
      if (group < kHeld && reaches<Access>(place_, col(group))) program_.maps.fetch(maps_[batch % 2][i], at<Access>(group));
    }
  }

  FN_DEVICE void read_vecs(const Load& load, Vecs& vecs, int group) const {
    if (reaches<Access>(place_, col(group))) fetch_vecs<Load, kGroup>(load, vecs, at<Access>(group));
  }
  FN_DEVICE void read_map_rows() {
    FN_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      if (reaches<Access>(place_, col(i))) program_.maps.fetch_rows(map_rows_[i], at<Access>(i));
    }
  }
  FN_DEVICE void read_next(int batch) {
    FN_UNROLL
    for (int i = 0; i < kNextReads; ++i) {
      const int group = batch * kNextReads + i;
      if (group < kHeld && reaches<Access>(place_, col(group))) Next::fetch(program_.store, next_[batch % 2][i], at<Access>(group));
    }
  }

  const Program& program_;
  const Place& place_;
  Reduce& reduce_;
  int hidden_size_;
  Pack<Kept, kGroup> kept_[kHeld];
  MapRows map_rows_[kHeld];
  MapRaw maps_[kMapBatches > 1 ? 2 : 1][kMapReads];
  typename Next::Again again_[kHeld] = {};
  typename Next::Raw next_[kNextBatches > 1 ? 2 : 1][kNextReads];
};

#endif  // FN_KERNELS

}  // namespace flashnorm
