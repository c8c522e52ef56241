// What the kernels ask of the hardware: shuffles, barriers, shared memory, clusters, dependent launches.
//
// All of it is here so that a test can put another machine underneath: with FLASHNORM_EMULATED the same
// names come from an emulation on the CPU, and the kernels above run as they are.
#pragma once

#include "types.cuh"

#if defined(FLASHNORM_EMULATED)
#define FN_KERNELS 1
#include FLASHNORM_EMULATED
#elif defined(__CUDACC__)
#define FN_KERNELS 1

namespace flashnorm {

// The value of the thread whose number in the warp differs in the bits of `mask`; all 32 threads call it.
FN_DEVICE float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, v, mask); }
FN_DEVICE uint32_t shuffle_xor(uint32_t v, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, v, mask); }

// The value of the thread before this one in the warp (its own, in the first); all 32 threads call it.
FN_DEVICE uint32_t shuffle_up(uint32_t v) { return __shfl_up_sync(0xFFFFFFFFu, v, 1); }

FN_DEVICE void sync_cta() { __syncthreads(); }

// No thread's memory access moves over it; all 32 threads of the warp call it.
FN_DEVICE void sync_warp() { __syncwarp(); }

// The `threads` threads (whole warps) of one of the rows of a CTA, of which there are at most 15.
FN_DEVICE void sync_row(int row, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(row + 1), "r"(threads) : "memory");
}

// Asks for a line to be brought to L2, where the memory of a GPU is coherent: no value is read.
FN_DEVICE void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at)));
}

// What the reductions of a CTA share: two sets of 32 values for each of the sums that are found at once, used in
// turn, each with the barrier that counts the bytes other CTAs of a cluster have put into it.
template <int kSums>
struct Slots {
  alignas(16) float values[2][kSums][32];
  uint64_t barriers[2];
};
template <int kSums>
FN_DEVICE Slots<kSums>& shared_slots() {
  __shared__ Slots<kSums> slots;
  return slots;
}

// The memory whose size the launch says.
FN_DEVICE uint4* dynamic_shared() {
  extern __shared__ uint4 memory[];
  return memory;
}

FN_DEVICE uint32_t shared_address(const void* at) { return uint32_t(__cvta_generic_to_shared(at)); }

// Starts a copy of 16 or 8 bytes to shared memory; `await_copies` waits for all that this thread has started.
FN_DEVICE void start_copy(uint4* to, const uint4* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)),
               "l"(__cvta_generic_to_global(from))
               : "memory");
#else
  *to = *from;
#endif
}
FN_DEVICE void start_copy(uint2* to, const uint2* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)),
               "l"(__cvta_generic_to_global(from))
               : "memory");
#else
  *to = *from;
#endif
}
FN_DEVICE void await_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
// The copies that this thread has started since the last call are a batch, and there may be none; `await_batches`
// waits for all batches but the last `later`, which are at most 3.
FN_DEVICE void end_batch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
FN_DEVICE void await_batches(int later) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if (later == 0) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  } else if (later == 1) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else if (later == 2) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 3;" ::: "memory");
  }
#endif
}

// ---------------------------------------------------------------- clusters (sm_90 and newer)
// A CTA puts values into the shared memory of its peers with asynchronous stores, and each store counts
// towards a barrier beside its target. A barrier of the whole cluster would do as well, but its release
// waits for all of a thread's memory traffic.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FN_CLUSTERS 1
#else
#define FN_CLUSTERS 0
#endif

FN_DEVICE int cluster_rank() {
  uint32_t rank = 0;
#if FN_CLUSTERS
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return int(rank);
}

// Makes the barriers, and tells the peers; every thread of the CTA calls it, early.
template <int kSums>
FN_DEVICE void cluster_open(Slots<kSums>& slots) {
#if FN_CLUSTERS
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&slots.barriers[0])) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&slots.barriers[1])) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// Waits until every peer has opened; once, before the first `cluster_put`.
FN_DEVICE void cluster_peers_open() {
#if FN_CLUSTERS
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// One thread of the CTA: set `phase` of this CTA will take `values` values.
template <int kSums>
FN_DEVICE void cluster_expect(Slots<kSums>& slots, int phase, int values) {
#if FN_CLUSTERS
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&slots.barriers[phase])),
               "r"(4 * values)
               : "memory");
#endif
}

// values[phase][sum][slot] <- v in CTA `rank`.
template <int kSums>
FN_DEVICE void cluster_put(Slots<kSums>& slots, int phase, int sum, int slot, float v, int rank) {
#if FN_CLUSTERS
  uint32_t value, barrier;
  const uint32_t own_value = shared_address(&slots.values[phase][sum][slot]);
  const uint32_t own_barrier = shared_address(&slots.barriers[phase]);
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(value) : "r"(own_value), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(own_barrier), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(value),
               "r"(__float_as_uint(v)), "r"(barrier)
               : "memory");
#endif
}

// Waits for the `turn`-th filling of set `phase` (the first is turn 0).
template <int kSums>
FN_DEVICE void cluster_await(Slots<kSums>& slots, int phase, int turn) {
#if FN_CLUSTERS
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_address(&slots.barriers[phase])), "r"(turn & 1)
        : "memory");
  }
#endif
}

// ---------------------------------------------------------------- programmatic dependent launch
// The wait comes before the first read of anything an earlier kernel may have written, weights
// included. Every kernel waits itself, so the signal may come at once: it says that later kernels may
// take what this one leaves free of the GPU, and nothing about memory.
FN_DEVICE void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

FN_DEVICE void let_later_kernels_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flashnorm

#else
#define FN_KERNELS 0
#endif
