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

// What is summed: `first` starts a position's sum with its first term, `next` adds a further one.
struct Squares {
  FN_HOST_DEVICE static float first(float v) { return fp::mul(v, v); }
  FN_HOST_DEVICE static float next(float sum, float v) { return fp::fma(v, v, sum); }
};

// One lane's sum: 8 positions, accumulated over its groups in order, then folded.
template <class Term>
struct Lane {
  float at[kGroup];

  FN_HOST_DEVICE void first(const float (&v)[kGroup]) {
    FN_UNROLL
    for (int i = 0; i < kGroup; ++i) at[i] = Term::first(v[i]);
  }
  FN_HOST_DEVICE void next(const float (&v)[kGroup]) {
    FN_UNROLL
    for (int i = 0; i < kGroup; ++i) at[i] = Term::next(at[i], v[i]);
  }
  FN_HOST_DEVICE float fold() const {
    const float even = fp::add(fp::add(at[0], at[4]), fp::add(at[2], at[6]));
    const float odd = fp::add(fp::add(at[1], at[5]), fp::add(at[3], at[7]));
    return fp::add(even, odd);
  }
};

#if FN_KERNELS

FN_DEVICE int log2_of(int power_of_two) {
  int log = 0;
  FN_UNROLL
  for (int i = 1; i < 6; ++i) log += power_of_two >> i ? 1 : 0;
  return log;
}

FN_DEVICE float add_across(float v, int lane_mask) { return fp::add(v, shuffle_xor(v, lane_mask)); }

// Folds the lanes of a warp whose 32 threads are on one row, each thread holding kLanes of them, and
// then their blocks of 32 over the lanes that a thread holds. The result is in every thread.
//
// kLanes separate butterflies would be 5 * kLanes shuffles. Here a step hands half of the values over
// and keeps the other half, so that all steps together take kLanes - 1 + 5; an addition commutes, so
// the sums are the same ones.
template <int kLanes>
FN_DEVICE float fold_warp(float (&lane)[kLanes]) {
  static_assert((kLanes & (kLanes - 1)) == 0 && kLanes <= 32, "a power of two");
  const int thread = threadIdx.x % 32;
  int step = 16;
  FN_UNROLL
  for (int held = kLanes / 2; held >= 1; held /= 2, step /= 2) {
    const bool upper = thread & step;
    FN_UNROLL
    for (int j = 0; j < held; ++j) {
      const float give = upper ? lane[j] : lane[j + held];
      const float keep = upper ? lane[j + held] : lane[j];
      lane[j] = fp::add(keep, shuffle_xor(give, step));
    }
  }
  float v = lane[0];
  FN_UNROLL
  for (; step >= 1; step /= 2) v = add_across(v, step);
  FN_UNROLL
  for (int held = kLanes / 2, across = 16; held >= 1; held /= 2, across /= 2) v = add_across(v, across);
  return v;
}

// Folds `lanes` (1 to 32, a power of two) neighbouring threads, one lane each.
FN_DEVICE float fold_part_of_warp(float v, int lanes) {
  FN_UNROLL
  for (int step = 16; step >= 1; step /= 2) {
    if (step < lanes) v = add_across(v, step);
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
  FN_DEVICE static float fold(const float* values, int blocks) {
    if (blocks == 2) return fp::add(values[0], values[1]);
    const int quarter = blocks / 4;
    const float4 b = reinterpret_cast<const float4*>(values)[threadIdx.x & (quarter - 1)];
    return fold_part_of_warp(fp::add(fp::add(b.x, b.z), fp::add(b.y, b.w)), quarter);
  }
};

// Joins the threads of a row: kThreads of this CTA (0: blockDim.x, a power of two), and those of the other
// CTAs of its cluster. `row` is the row among those of the CTA. One object a kernel; `fold` may be called
// several times, by all threads of the CTA.
template <int kThreads, int kCluster>
class RowReduce {
 public:
  FN_DEVICE RowReduce(int row, int rank)
      : slots_(shared_slots()),
        threads_(kThreads > 0 ? kThreads : int(blockDim.x)),
        warps_(threads_ / 32),
        blocks_(warps_ * kCluster),
        first_(row * warps_) {
    if (blocks_ < 2) return;
    mine_ = first_ + BlockSlots::slot(rank * warps_ + threadIdx.x / 32, blocks_);
    if (kCluster > 1) cluster_open(slots_);
  }

  // lane[j] is the sum of the thread's j-th lane; the lanes of a thread are a power of two.
  template <int kLanes>
  FN_DEVICE float fold(float (&lane)[kLanes]) {
    if (kLanes == 1 && threads_ < 32) return fold_part_of_warp(lane[0], threads_);
    const float v = fold_warp(lane);
    if (blocks_ == 1) return v;
    const int phase = sums_ % 2, turn = sums_ / 2;
    ++sums_;
    const int thread = threadIdx.x % 32;
    if (kCluster > 1) {
      if (phase == 0 && turn == 0) cluster_peers_open();
      if (threadIdx.x == 0) cluster_expect(slots_, phase, blocks_);
      if (thread < kCluster) cluster_put(slots_, phase, mine_, v, thread);
      cluster_await(slots_, phase, turn);
    } else {
      if (thread == 0) slots_.values[phase][mine_] = v;
      sync_cta();
    }
    return BlockSlots::fold(slots_.values[phase] + first_, blocks_);
  }

 private:
  Slots& slots_;
  int threads_;
  int warps_;
  int blocks_;
  int first_;
  int mine_ = 0;
  int sums_ = 0;
};

#endif  // FN_KERNELS

}  // namespace flashnorm
