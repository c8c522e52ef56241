// The canonical sum of a row (arithmetic.md, section 1): the same additions in the same order for every plan.
//
// A row's groups of 8 are dealt to L = min(1024, groups rounded up to a power of two) lanes, group g to
// lane g mod L. `Lane` is what one lane does; the folds below join lanes. Thread t of T a row holds
// lanes t, t + T, ...: the levels of the tree above T are in-thread, those below 32 are shuffles, and
// one value for every 32 lanes crosses warps (and the CTAs of a cluster) through shared memory, where
// every warp folds them for itself. One barrier a sum, whatever the plan.
#pragma once

#include "device.cuh"
#include "fp.cuh"

namespace flashnorm {

constexpr int kMaxLanes = 1024;

FN_HOST_DEVICE constexpr int lanes_of(int hidden_size) {
  const int groups = (hidden_size + kGroup - 1) / kGroup;
  int lanes = 1;
  while (lanes < groups && lanes < kMaxLanes) lanes *= 2;
  return lanes;
}

// What is summed: `first` starts a position's sum with its first term, `next` adds a further one. Whether a missing
// element's +0 may be left out: not where a sum may be -0, which it turns into +0.
struct Squares {
  static constexpr bool kSkipsMissing = true;
  FN_HOST_DEVICE static float first(float v) { return fp::mul(v, v); }
  FN_HOST_DEVICE static float next(float sum, float v) { return fp::fma(v, v, sum); }
};
struct Values {
  static constexpr bool kSkipsMissing = false;
  FN_HOST_DEVICE static float first(float v) { return v; }
  FN_HOST_DEVICE static float next(float sum, float v) { return fp::add(sum, v); }
};

// One lane's sums, one for each of the terms: 8 positions, accumulated over its groups in order, then folded.
template <class... Terms>
struct Lane {
  static constexpr int kSums = sizeof...(Terms);
  static constexpr bool kSkipsMissing = (Terms::kSkipsMissing && ...);
  float at[kSums][kGroup];

  FN_HOST_DEVICE void first(const float (&v)[kGroup]) {
    int sum = 0;
    (start<Terms>(at[sum++], v), ...);
  }
  FN_HOST_DEVICE void next(const float (&v)[kGroup]) {
    int sum = 0;
    (proceed<Terms>(at[sum++], v), ...);
  }
  FN_HOST_DEVICE float fold(int sum) const {
    const float (&p)[kGroup] = at[sum];
    const float even = fp::add(fp::add(p[0], p[4]), fp::add(p[2], p[6]));
    const float odd = fp::add(fp::add(p[1], p[5]), fp::add(p[3], p[7]));
    return fp::add(even, odd);
  }

 private:
  template <class Term>
  FN_HOST_DEVICE static void start(float (&p)[kGroup], const float (&v)[kGroup]) {
    FN_UNROLL
    for (int i = 0; i < kGroup; ++i) p[i] = Term::first(v[i]);
  }
  template <class Term>
  FN_HOST_DEVICE static void proceed(float (&p)[kGroup], const float (&v)[kGroup]) {
    FN_UNROLL
    for (int i = 0; i < kGroup; ++i) p[i] = Term::next(p[i], v[i]);
  }
};

#if FN_KERNELS

FN_DEVICE int log2_of(int power_of_two) {
  int log = 0;
  FN_UNROLL
  for (int i = 1; i < 6; ++i) log += power_of_two >> i ? 1 : 0;
  return log;
}

// How two values become one: a sum of them, or the larger of two bit patterns that a float carries.
struct Add {
  FN_DEVICE static float join(float a, float b) { return fp::add(a, b); }
};
struct Larger {
  FN_DEVICE static float join(float a, float b) {
    return float_of(bits_of(a) > bits_of(b) ? bits_of(a) : bits_of(b));
  }
};

template <class Join>
FN_DEVICE float join_across(float v, int lane_mask) {
  return Join::join(v, shuffle_xor(v, lane_mask));
}

// Folds the lanes of a warp whose 32 threads are on one row, each thread holding kLanes of them, and
// then their blocks of 32 over the lanes that a thread holds. The results, one a sum, are in every thread.
//
// kLanes separate butterflies would be 5 * kLanes shuffles. Here a step hands half of the values over
// and keeps the other half, so that all steps together take kLanes - 1 + 5; an addition commutes, so
// the sums are the same ones.
template <class Join, int kSums, int kLanes>
FN_DEVICE void fold_warp(float (&folded)[kSums], float (&lane)[kSums][kLanes]) {
  static_assert((kLanes & (kLanes - 1)) == 0 && kLanes <= 32, "a power of two");
  const int thread = threadIdx.x % 32;
  int step = 16;
  FN_UNROLL
  for (int held = kLanes / 2; held >= 1; held /= 2, step /= 2) {
    const bool upper = thread & step;
    FN_UNROLL
    for (int j = 0; j < held; ++j) {
      FN_UNROLL
      for (int k = 0; k < kSums; ++k) {
        const float give = upper ? lane[k][j] : lane[k][j + held];
        const float keep = upper ? lane[k][j + held] : lane[k][j];
        lane[k][j] = Join::join(keep, shuffle_xor(give, step));
      }
    }
  }
  FN_UNROLL
  for (int k = 0; k < kSums; ++k) folded[k] = lane[k][0];
  FN_UNROLL
  for (; step >= 1; step /= 2) {
    FN_UNROLL
    for (int k = 0; k < kSums; ++k) folded[k] = join_across<Join>(folded[k], step);
  }
  FN_UNROLL
  for (int held = kLanes / 2, across = 16; held >= 1; held /= 2, across /= 2) {
    FN_UNROLL
    for (int k = 0; k < kSums; ++k) folded[k] = join_across<Join>(folded[k], across);
  }
}

// Folds `lanes` (1 to 32, a power of two) neighbouring threads, one lane each.
template <class Join>
FN_DEVICE float fold_part_of_warp(float v, int lanes) {
  FN_UNROLL
  for (int step = 16; step >= 1; step /= 2) {
    if (step < lanes) v = join_across<Join>(v, step);
  }
  return v;
}

// The values of a row's blocks of 32 lanes, where all warps can read them. Block b lies at `slot(b)`, so
// that a thread reads four blocks that meet in the upper two levels of the tree at once.
struct BlockSlots {
  // `blocks` is 2 to 32, a power of two.
  FN_DEVICE static int slot(int block, int blocks) {
    if (blocks < 4) return block;
    const int quarter = blocks / 4, shift = log2_of(quarter);
    return (block & (quarter - 1)) * 4 + (block >> shift);
  }
  // `values` is 16-byte aligned where there are four or more.
  template <class Join>
  FN_DEVICE static float fold(const float* values, int blocks) {
    if (blocks == 2) return Join::join(values[0], values[1]);
    const int quarter = blocks / 4;
    const float4 b = reinterpret_cast<const float4*>(values)[threadIdx.x & (quarter - 1)];
    return fold_part_of_warp<Join>(Join::join(Join::join(b.x, b.z), Join::join(b.y, b.w)), quarter);
  }
};

// Joins the threads of a row: kThreads of this CTA (0: blockDim.x, a power of two), and those of the other
// CTAs of its cluster. `row` is the row among those of the CTA. One object a kernel; `fold` may be called
// several times, by all threads of the CTA, for up to kMost values at once; with `kApart`, the rows of a CTA call it
// each for itself.
template <int kThreads, int kCluster, int kMost, bool kApart = false>
class RowReduce {
 public:
  FN_DEVICE RowReduce(int row, int rank)
      : slots_(shared_slots<kMost>()),
        threads_(kThreads > 0 ? kThreads : int(blockDim.x)),
        warps_(threads_ / 32),
        blocks_(warps_ * kCluster),
        row_(row),
        first_(row * warps_) {
    if (blocks_ < 2) return;
    mine_ = first_ + BlockSlots::slot(rank * warps_ + threadIdx.x / 32, blocks_);
    if (kCluster > 1) cluster_open(slots_);
  }

  // lane[k][j] is the k-th sum of the thread's j-th lane; the lanes of a thread are a power of two.
  template <class Join, int kSums, int kLanes>
  FN_DEVICE void fold(float (&folded)[kSums], float (&lane)[kSums][kLanes]) {
    fold_here<Join>(folded, lane);
    join_warps<Join>(folded);
  }

  // Its two parts: what a warp does for itself, and what its threads do together with those of the other warps.
  template <class Join, int kSums, int kLanes>
  FN_DEVICE void fold_here(float (&folded)[kSums], float (&lane)[kSums][kLanes]) {
    if (kThreads == 0 && threads_ < 32) {  // with all of a thread's lanes no more than 32
      FN_UNROLL
      for (int k = 0; k < kSums; ++k) {
        FN_UNROLL
        for (int held = kLanes / 2; held >= 1; held /= 2) {
          FN_UNROLL
          for (int j = 0; j < held; ++j) lane[k][j] = Join::join(lane[k][j], lane[k][j + held]);
        }
        folded[k] = fold_part_of_warp<Join>(lane[k][0], threads_);
      }
      return;
    }
    if constexpr (kThreads > 0 && kThreads < 32) {
      FN_UNROLL
      for (int k = 0; k < kSums; ++k) folded[k] = fold_few_threads<Join>(lane[k]);
      return;
    }
    fold_warp<Join>(folded, lane);
  }
  template <class Join, int kSums>
  FN_DEVICE void join_warps(float (&folded)[kSums]) {
    static_assert(kSums <= kMost, "no room for so many");
    if (blocks_ < 2) return;
    const int phase = folds_ % 2, turn = folds_ / 2;
    ++folds_;
    const int thread = threadIdx.x % 32;
    if (kCluster > 1) {
      if (phase == 0 && turn == 0) cluster_peers_open();
      if (threadIdx.x == 0) cluster_expect(slots_, phase, blocks_ * kSums);
      FN_UNROLL
      for (int k = 0; k < kSums; ++k) {
        if (thread < kCluster) cluster_put(slots_, phase, k, mine_, folded[k], thread);
      }
      cluster_await(slots_, phase, turn);
    } else {
      FN_UNROLL
      for (int k = 0; k < kSums; ++k) {
        if (thread == 0) slots_.values[phase][k][mine_] = folded[k];
      }
      if (kApart) {
        sync_row(row_, threads_);
      } else {
        sync_cta();
      }
    }
    FN_UNROLL
    for (int k = 0; k < kSums; ++k) {
      folded[k] = BlockSlots::fold<Join>(slots_.values[phase][k] + first_, blocks_);
    }
  }

 private:
  // Part of a warp with more than a block of lanes: each block of 32 for itself, then the blocks.
  template <class Join, int kLanes>
  FN_DEVICE static float fold_few_threads(float (&lane)[kLanes]) {
    constexpr int kBlocks = kLanes * kThreads / 32 > 1 ? kLanes * kThreads / 32 : 1, kOwn = kLanes / kBlocks;
    float block[kBlocks];
    FN_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      float* own = lane + b * kOwn;
      FN_UNROLL
      for (int held = kOwn / 2; held >= 1; held /= 2) {
        FN_UNROLL
        for (int j = 0; j < held; ++j) own[j] = Join::join(own[j], own[j + held]);
      }
      block[b] = fold_part_of_warp<Join>(own[0], kThreads);
    }
    FN_UNROLL
    for (int held = kBlocks / 2; held >= 1; held /= 2) {
      FN_UNROLL
      for (int b = 0; b < held; ++b) block[b] = Join::join(block[b], block[b + held]);
    }
    return block[0];
  }

  Slots<kMost>& slots_;
  int threads_;
  int warps_;
  int blocks_;
  int row_;
  int first_;
  int mine_ = 0;
  int folds_ = 0;
};

#endif  // FN_KERNELS

}  // namespace flashnorm
