// A row of any width: in shared memory, or read again in every pass.
#pragma once

#include "place.cuh"

namespace flashnorm {

#if FN_KERNELS

// One lane a thread, any number of groups a lane. In shared memory a thread reads only what it put there,
// so there is no barrier.
template <class Program, class Tile, class Reduce>
class StreamedRow {
  using Load = LocatedOf<Program>;
  using Maps = decltype(Program::maps);
  using Kept = typename Load::Kept;
  using Raw = typename Load::template Raw<kGroup>;
  using MapRaw = typename Maps::template Raw<kGroup>;
  using Access = typename Tile::Access;
  static constexpr int kStride = Tile::kThreads * Tile::kCluster * kGroup;
  static constexpr int kRawBytes = int(sizeof(Raw)) > Maps::raw_bytes() ? int(sizeof(Raw)) : Maps::raw_bytes();
  // Groups read at once, and whether maps are read a batch ahead: a shifted access takes all registers there are,
  // and a store that joins threads takes more than others.
  static constexpr bool kAhead = !std::is_same_v<Access, Shifted>;
  static constexpr int kMost = decltype(Program::store)::kBlock > 0 ? 2 : 4;
  static constexpr int kBatch = kAhead ? batch_of(kMost, kRawBytes, 64) : 1;

 public:
  static constexpr bool kHoldsResult = false;

  FN_DEVICE StreamedRow(const Program& program, const RowGrid& grid, const Place& place, Reduce& reduce)
      : program_(program),
        place_(place),
        reduce_(reduce),
        hidden_size_(grid.hidden_size),
        staged_(grid.staged),
        rounds_((grid.hidden_size + kStride - 1) / kStride) {}

  FN_DEVICE void touch() const {
    for (int r = 0; r * kStride < place_.left; ++r) {
      MapRaw map_raw;
      program_.load.touch(At<Touch>{{0, 0}, r * kStride, {}});
      program_.maps.fetch(map_raw, At<Touch>{{0, 0}, r * kStride, {}});
    }
  }

  FN_DEVICE void read() {
    load_ = program_.load.locate(Row{0, 0}, place_.left > 0);
    if (staged_) stage();
    if (kAhead) read_maps(ahead_, 0);
    await_copies();
  }

  FN_DEVICE int hidden_size() const { return hidden_size_; }
  FN_DEVICE float sum() { return sum_of<Values>(); }
  FN_DEVICE float sum_squares() { return sum_of<Squares>(); }
  FN_DEVICE Deviations deviations(float mean) {
    float sums[2];
    fold<Values, Squares>(sums, [&](float (&v)[kGroup], int count) { centre(v, mean, count); });
    return {sums[0], sums[1]};
  }

  // A pass before the last: look(v, maps, at) for every group.
  template <class Look>
  FN_DEVICE void survey(const Look& look) {
    pass<false, false>(look);
    if (kAhead) read_maps(ahead_, 0);
  }
  // The last pass: finish(v, maps, at) for every group; with `kTogether`, by all threads of a warp.
  template <bool kTogether, bool = true, class Finish>
  FN_DEVICE void finish(const Finish& finish) {
    pass<kTogether, true>(finish);
  }

 private:
  template <class Out>
  FN_DEVICE At<Out> at(int r) const {
    return at_group<Out>(place_, r * kStride);
  }
  FN_DEVICE int elements(int r) const { return elements_of<Access>(place_, r * kStride); }

  FN_DEVICE void stage() const {
    for (int r = 0; r * kStride < place_.left; ++r) {
      if constexpr (std::is_same_v<Access, Shifted>) {
        Raw raw;
        load_.fetch(raw, at<Access>(r));
        slot(r) = raw;
      } else {
        load_.fetch(slot(r), At<Async>{{0, 0}, r * kStride, {}});
      }
    }
  }

  FN_DEVICE Raw& slot(int r) const {
    return reinterpret_cast<Raw*>(dynamic_shared())[r * Tile::kThreads + int(threadIdx.x)];
  }
  FN_DEVICE void get(Raw& raw, int r) const {
    if (r * kStride >= place_.left) return;
    if (staged_) {
      raw = slot(r);
    } else {
      load_.fetch(raw, at<Access>(r));
    }
  }
  FN_DEVICE void read_maps(MapRaw (&maps)[kBatch], int first) const {
    FN_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      if ((first + i) * kStride < place_.left) program_.maps.fetch(maps[i], at<Access>(first + i));
    }
  }

  template <class Term>
  FN_DEVICE float sum_of() {
    float sums[1];
    fold<Term>(sums, [](float (&)[kGroup], int) {});
    return sums[0];
  }

  // The canonical sums of the terms, of what `change(v, count)` makes of a group with so many elements.
  template <class... Terms, class Change>
  FN_DEVICE void fold(float (&sums)[sizeof...(Terms)], const Change& change) {
    constexpr int kSums = sizeof...(Terms);
    Lane<Terms...> sum;
    const float zero[kGroup] = {};
    sum.first(zero);
    for (int first = 0; first < rounds_; first += kBatch) {
      Raw raw[kBatch];
      FN_UNROLL
      for (int i = 0; i < kBatch; ++i) get(raw[i], first + i);
      FN_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if ((first + i) * kStride >= place_.left) {
          if (!sum.kSkipsMissing && first + i > 0 && first + i < rounds_) sum.next(zero);
          continue;
        }
        float v[kGroup];
        Pack<Kept, kGroup> kept;
        load_.keep(kept, raw[i], elements(first + i));
        widen(v, kept);
        change(v, elements(first + i));
        first + i == 0 ? sum.first(v) : sum.next(v);
      }
    }
    float lane[kSums][1];
    FN_UNROLL
    for (int k = 0; k < kSums; ++k) lane[k][0] = sum.fold(k);
    reduce_.template fold<Add>(sums, lane);
  }

  template <bool kTogether, bool kSave, class Each>
  FN_DEVICE void pass(const Each& each) {
    using Out = PassAccess<Access, kTogether>;
    for (int first = 0; first < rounds_; first += kBatch) {
      MapRaw maps[kBatch];
      if (!kAhead) read_maps(ahead_, first);
      FN_UNROLL
      for (int i = 0; i < kBatch; ++i) maps[i] = ahead_[i];
      if (kAhead) read_maps(ahead_, first + kBatch);
      FN_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (!reaches<Out>(place_, (first + i) * kStride)) continue;
        Raw raw;
        float v[kGroup];
        Pack<Kept, kGroup> kept;
        get(raw, first + i);
        load_.keep(kept, raw, elements(first + i));
        if (kSave) load_.save(kept, at<Out>(first + i));
        widen(v, kept);
        each(v, maps[i], at<Out>(first + i));
      }
    }
  }

  const Program& program_;
  Load load_;
  const Place& place_;
  Reduce& reduce_;
  int hidden_size_;
  bool staged_;
  int rounds_;
  MapRaw ahead_[kBatch];
};

#endif  // FN_KERNELS

}  // namespace flashnorm
