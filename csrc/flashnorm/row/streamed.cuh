// A row of any width: in shared memory, or read again in every pass.
#pragma once

#include "place.cuh"

namespace flashnorm {

#if FN_KERNELS

// Any number of groups a lane, one lane a thread or more. In shared memory a thread reads only what it put there, so
// there is no barrier.
template <class Program, class Tile, class Reduce>
class StreamedRow {
  using Load = LocatedOf<Program>;
  using Maps = decltype(Program::maps);
  using Kept = typename Load::Kept;
  using Raw = typename Load::template Raw<kGroup>;
  using Vecs = typename VecsOf<Load>::template Vecs<kGroup>;
  using Access = typename Tile::Access;
  using Next = NextOf<decltype(Program::store)>;
  struct MapRead {
    typename Maps::template Raw<kGroup> raw;
    typename Maps::template Rows<kGroup> rows;
  };
  // A thread's group r lies r * kStride elements from its first, and belongs to its lane r % kLanes.
  static constexpr int kStride = Tile::kThreads * Tile::kCluster * kGroup;
  static constexpr int kLanes = kMaxLanes * kGroup / kStride;
  static constexpr int kLoadBytes = int(sizeof(Raw)) + (VecsOf<Load>::kThere ? int(sizeof(Vecs)) : 0);
  static constexpr int kMapBytes = Maps::raw_bytes() + Maps::row_bytes();
  static constexpr int kRawBytes = kLoadBytes > kMapBytes ? kLoadBytes : kMapBytes;
  // Groups read at once, and whether maps are read a batch ahead: a shifted access takes all registers there are, as do
  // maps that read much, and a store that joins threads takes more than others.
  static constexpr bool kAhead = !std::is_same_v<Access, Shifted> && kMapBytes <= 64;
  static constexpr int kMost = decltype(Program::store)::kBlock > 0 ? 2 : 4;
  static constexpr int kBatch = kAhead ? batch_of(kMost, kRawBytes, 64) : 1;

 public:
  static constexpr bool kCentred = false, kHoldsResult = false;
  static constexpr int kRows = 1;

  FN_DEVICE StreamedRow(const Program& program, const RowGrid& grid, const Place& place, Reduce& reduce)
      : program_(program),
        place_(place),
        reduce_(reduce),
        hidden_size_(grid.hidden_size),
        staged_(grid.staged),
        groups_((grid.hidden_size + kStride - 1) / kStride) {}

  FN_DEVICE void touch() const {
    for (int r = 0; r * kStride < place_.left; ++r) touch_group(program_, r * kStride);
  }

  FN_DEVICE void read() {
    load_ = program_.load.locate(Row{0, 0}, place_.left > 0);
    if (staged_) stage();
    if (kAhead) read_maps(ahead_, 0);
    await_copies();
  }

  FN_DEVICE int hidden_size() const { return hidden_size_; }
  FN_DEVICE void sum(float (&sums)[1]) { sum_of<Values>(sums); }
  FN_DEVICE void sum_squares(float (&sums)[1]) { sum_of<Squares>(sums); }
  FN_DEVICE void deviations(Deviations (&found)[1], const float (&means)[1]) {
    float sums[2];
    fold<LoadRead, Values, Squares>(sums, [&](float (&v)[kGroup], const LoadRead& read, int r) {
      load_group(v, read, r);
      centre(v, means[0], elements(r));
    });
    found[0] = {sums[0], sums[1]};
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

  // As in RegisterRow; what is stored is read again, by the thread that stored it.
  template <class Look>
  FN_DEVICE void renew(const Look& look) {
    pass<false, true>([&](auto& v, const auto& maps, const auto& at) {
      typename Next::Again again;
      look(v, maps, at, again);
    });
    if (std::is_same_v<Access, Shifted>) sync_cta();  // there, neighbours store for each other
  }
  FN_DEVICE void sum_squares_again(float (&sums)[1]) {
    using Again = typename Next::Again;
    fold<Again, Squares>(sums, [](float (&v)[kGroup], const Again& again, int) { widen(v, again); });
  }
  template <class Finish>
  FN_DEVICE void finish_again(const Finish& finish) {
    for (int r = 0; r < groups_; ++r) {
      if (!reaches<Access>(place_.left, r * kStride)) continue;
      typename Next::Raw raw;
      typename Next::Again again;
      float v[kGroup];
      Next::fetch(program_.store, raw, at<Access>(r));
      get(again, r);
      widen(v, again);
      finish(v, raw, at<Access>(r));
    }
  }

 private:
  template <class Out>
  FN_DEVICE At<Out> at(int r) const {
    return at_group<Out>(place_, place_.left, r * kStride);
  }
  FN_DEVICE int elements(int r) const { return elements_of<Access>(place_.left, r * kStride); }

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
  // What is read of a group in every pass.
  struct LoadRead {
    Raw raw;
    Vecs vecs;
  };
  FN_DEVICE void get(LoadRead& read, int r) const {
    if (r * kStride >= place_.left) return;
    if (staged_) {
      read.raw = slot(r);
    } else {
      load_.fetch(read.raw, at<Access>(r));
    }
    fetch_vecs<Load, kGroup>(load_, read.vecs, at<Access>(r));
  }
  FN_DEVICE void get(typename Next::Again& again, int r) const {
    if (r * kStride < place_.left) program_.store.fetch_again(again, at<Access>(r));
  }
  FN_DEVICE void load_group(float (&v)[kGroup], const LoadRead& read, int r) const {
    Pack<Kept, kGroup> kept;
    keep(load_, kept, read.raw, read.vecs, elements(r));
    widen(v, kept);
  }
  FN_DEVICE void read_maps(MapRead (&maps)[kBatch], int first) const {
    FN_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      if ((first + i) * kStride >= place_.left) continue;
      program_.maps.fetch_rows(maps[i].rows, at<Access>(first + i));
      program_.maps.fetch(maps[i].raw, at<Access>(first + i));
    }
  }

  template <class Term>
  FN_DEVICE void sum_of(float (&sums)[1]) {
    fold<LoadRead, Term>(sums, [&](float (&v)[kGroup], const LoadRead& read, int r) { load_group(v, read, r); });
  }

  // The canonical sums of the terms of what `make(v, read, r)` makes of what is read of a group.
  template <class Read, class... Terms, class Make>
  FN_DEVICE void fold(float (&sums)[sizeof...(Terms)], const Make& make) {
    constexpr int kSums = sizeof...(Terms);
    const int rounds = (groups_ + kLanes - 1) / kLanes;  // groups of a lane
    float lane[kSums][kLanes];
    FN_UNROLL
    for (int j = 0; j < kLanes; ++j) {
      Lane<Terms...> sum;
      const float zero[kGroup] = {};
      sum.first(zero);
      for (int first = 0; first < rounds; first += kBatch) {
        Read read[kBatch];
        FN_UNROLL
        for (int i = 0; i < kBatch; ++i) get(read[i], (first + i) * kLanes + j);
        FN_UNROLL
        for (int i = 0; i < kBatch; ++i) {
          const int group = (first + i) * kLanes + j;
          if (group * kStride >= place_.left) {
            if (!sum.kSkipsMissing && first + i > 0 && first + i < rounds) sum.next(zero);
            continue;
          }
          float v[kGroup];
          make(v, read[i], group);
          first + i == 0 ? sum.first(v) : sum.next(v);
        }
      }
      FN_UNROLL
      for (int k = 0; k < kSums; ++k) lane[k][j] = sum.fold(k);
    }
    reduce_.template fold<Add>(sums, lane);
  }

  template <bool kTogether, bool kSave, class Each>
  FN_DEVICE void pass(const Each& each) {
    using Out = PassAccess<Access, kTogether>;
    for (int first = 0; first < groups_; first += kBatch) {
      MapRead maps[kBatch];
      FN_UNROLL
      for (int i = 0; i < kBatch; ++i) maps[i] = ahead_[i];
      if (kAhead) read_maps(ahead_, first + kBatch);
      FN_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (!reaches<Out>(place_.left, (first + i) * kStride)) continue;
        LoadRead read;
        float v[kGroup];
        Pack<Kept, kGroup> kept;
        get(read, first + i);
        keep(load_, kept, read.raw, read.vecs, elements(first + i));
        if (kSave) load_.save(kept, at<Out>(first + i));
        widen(v, kept);
        if (!kAhead) read_maps(maps, first);
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
  int groups_;
  MapRead ahead_[kBatch];
};

#endif  // FN_KERNELS

}  // namespace flashnorm
