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
  using MapRaw = typename Maps::template Raw<kGroup>;
  using Access = typename Tile::Access;

  static constexpr int kLanes = Tile::kLanes, kGroups = Tile::kGroups, kHeld = kLanes * kGroups;
  // Reads in flight before the first is used: all of them, as far as a thread's registers go. Where a row is
  // kept as it was read, the reads take no registers of their own.
  static constexpr int kRegisters = 65536 / Tile::kMaxCta > 128 ? 128 : 65536 / Tile::kMaxCta;
  static constexpr int kSpare = 4 * (kRegisters - 28) - kHeld * int(sizeof(Pack<Kept, kGroup>));
  static constexpr int kReads =
      sizeof(Raw) == sizeof(Pack<Kept, kGroup>) ? kHeld : batch_of(kHeld, sizeof(Raw), kSpare);
  // Maps are read in batches, one ahead of its use: a store keeps every later read behind it. A weight and a bias
  // are not all asked for early where they would take more registers than the row.
  static constexpr bool kEarlyMaps =
      Tile::kEarlyMaps && (Maps::raw_bytes() <= 32 || kHeld * Maps::raw_bytes() <= 128);
  static constexpr int kMapReads = kEarlyMaps ? kHeld : batch_of(kHeld, Maps::raw_bytes(), 32);
  static constexpr int kMapBatches = kHeld / kMapReads;
  // Half of a thread's groups are certain, if there is a row: a row has more than half as many groups as lanes, and more
  // than half of what a tile has room for.
  static constexpr int kCertain = kHeld / 2;
  static constexpr bool kHasRow = !Tile::kManyRows && decltype(Program::store)::kBlock == kNoBlock;

 public:
  // Whether a result fits exactly where the row is held.
  static constexpr bool kHoldsResult =
      std::is_same_v<Kept, float> || std::is_same_v<Kept, typename RoundedBy<Maps>::Type>;

  FN_DEVICE RegisterRow(const Program& program, const RowGrid& grid, const Place& place, Reduce& reduce)
      : program_(program), place_(place), reduce_(reduce), hidden_size_(grid.hidden_size) {}

  FN_DEVICE void touch() const {
    FN_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      MapRaw map_raw;
      if (col(i) >= place_.left) continue;
      program_.load.touch(At<Touch>{{0, 0}, col(i), {}});
      program_.maps.fetch(map_raw, At<Touch>{{0, 0}, col(i), {}});
    }
  }

  FN_DEVICE void read() {
    const Load load = program_.load.locate(Row{0, 0}, place_.left > 0);
    FN_UNROLL
    for (int first = 0; first < kHeld; first += kReads) {
      Raw raw[kReads] = {};
      FN_UNROLL
      for (int i = 0; i < kReads; ++i) {
        if (reaches<Access>(place_, col(first + i))) load.fetch(raw[i], at<Access>(first + i));
      }
      if (kEarlyMaps && first == 0) read_maps(0);
      FN_UNROLL
      for (int i = 0; i < kReads; ++i) {
        load.keep(kept_[first + i], raw[i], count<Access>(first + i));
        if (reaches<Access>(place_, col(first + i))) load.save(kept_[first + i], at<Access>(first + i));
      }
    }
    if (!kEarlyMaps) read_maps(0);
  }

  FN_DEVICE int hidden_size() const { return hidden_size_; }
  FN_DEVICE float sum() { return sum_of<Values>(); }
  FN_DEVICE float sum_squares() { return sum_of<Squares>(); }
  FN_DEVICE Deviations deviations(float mean) {
    float sums[2];
    fold<Values, Squares>(
        sums, [&](float (&v)[kGroup], int i) { centre(v, mean, count<Access>(i)); });
    return {sums[0], sums[1]};
  }

  // A pass before the last: look(v, maps, at) for every group. What it makes of v is what the last pass is given,
  // with `kHoldsResult`.
  template <class Look>
  FN_DEVICE void survey(const Look& look) {
    pass<false, true>([&](auto& v, const auto& maps, const auto& at, auto& kept) {
      look(v, maps, at);
      if constexpr (kHoldsResult) narrow(kept, v);
    });
    if (!kHoldsResult && kMapBatches > 1) read_maps(0);
  }
  // The last pass: finish(v, maps, at) for every group; with `kTogether`, by all threads of a warp. `kMaps` says
  // whether it makes use of the maps.
  template <bool kTogether, bool kMaps = true, class Finish>
  FN_DEVICE void finish(const Finish& finish) {
    pass<kTogether, kMaps>([&](auto& v, const auto& maps, const auto& at, auto&) { finish(v, maps, at); });
  }

 private:
  template <class Term>
  FN_DEVICE float sum_of() {
    float sums[1];
    fold<Term>(sums, [](float (&)[kGroup], int) {});
    return sums[0];
  }

  // The canonical sums of the terms, of what `change(v, i)` makes of group i.
  template <class... Terms, class Change>
  FN_DEVICE void fold(float (&sums)[sizeof...(Terms)], const Change& change) {
    constexpr int kSums = sizeof...(Terms);
    float lane[kSums][kLanes];
    FN_UNROLL
    for (int j = 0; j < kLanes; ++j) {
      Lane<Terms...> sum;
      FN_UNROLL
      for (int r = 0; r < kGroups; ++r) {
        // A tile with more groups a lane than any row of this width has adds nothing for them.
        if (!sum.kSkipsMissing && r > 1 && col(r * kLanes) >= hidden_size_) continue;
        float v[kGroup];
        if (kSums > 1 && kHeld > 2) forget(kept_[r * kLanes + j]);
        widen(v, kept_[r * kLanes + j]);
        change(v, r * kLanes + j);
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
      for (int i = batch * kMapReads; i < (batch + 1) * kMapReads; ++i) {
        if (kHeld > 2) forget(kept_[i]);
        // Where all threads of a warp come along, no group that the whole row lacks.
        if (kTogether && i >= kCertain && col(i) >= hidden_size_) continue;
        if (!has<Out>(i)) continue;
        float v[kGroup];
        widen(v, kept_[i]);
        each(v, maps_[batch % 2][i % kMapReads], at<Out>(i), kept_[i]);
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
  template <class Out>
  FN_DEVICE At<Out> at(int i) const {
    return at_group<Out>(place_, col(i));
  }

  FN_DEVICE void read_maps(int batch) {
    FN_UNROLL
    for (int i = 0; i < kMapReads; ++i) {
      const int group = batch * kMapReads + i;
      if (reaches<Access>(place_, col(group))) program_.maps.fetch(maps_[batch % 2][i], at<Access>(group));
    }
  }

  const Program& program_;
  const Place& place_;
  Reduce& reduce_;
  int hidden_size_;
  Pack<Kept, kGroup> kept_[kHeld];
  MapRaw maps_[kMapBatches > 1 ? 2 : 1][kMapReads];
};

#endif  // FN_KERNELS

}  // namespace flashnorm
