// The GPU of device.cuh on a CPU: every thread of a cluster is a fiber, and they take turns.
//
// Slow and exact. A test compiles the very kernels of the CUDA route over it, to see on a machine without
// a GPU that every launch plan adds in the canonical order and touches what it should. What it does not
// show: the device bodies of whole loads and stores and of conversions, and anything about memory ordering.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace flashnorm {

template <int kSums>
struct Slots {
  alignas(16) float values[2][kSums][32];
  uint64_t barriers[2];
};

namespace emulation {

constexpr int kMostSums = 4;

struct Barrier {
  int waiting = 0;
  long turn = 0;
};

struct Warp {
  float values[2][32];
  Barrier barrier;
};

struct Cta {
  dim3 index;
  int rank;
  alignas(16) char slots[sizeof(Slots<kMostSums>)];
  int arrived[2] = {0, 0};  // values that peers have put so far
  std::vector<int> expected[2];  // values that will have been put after each turn
  std::vector<uint4> dynamic;
  std::vector<Warp> warps;
  Barrier barrier;
  Barrier rows[16];
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  dim3 thread;
  int number;  // in its CTA
  Cta* cta;
  long shuffles = 0;
  bool done = false;
};

struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<Fiber> fibers;
  int opened = 0;
  int threads = 0;  // a CTA
  std::function<void()> body;
  ucontext_t scheduler;
};

inline Cluster* cluster = nullptr;
inline Fiber* self = nullptr;
inline dim3 block_dim;

inline void yield() {
  Fiber* me = self;
  swapcontext(&me->context, &cluster->scheduler);
}

inline void wait(Barrier& barrier, int all) {
  const long turn = barrier.turn;
  if (++barrier.waiting == all) {
    barrier.waiting = 0;
    ++barrier.turn;
    return;
  }
  while (barrier.turn == turn) yield();
}

inline void run_fiber() {
  cluster->body();
  self->done = true;
  yield();
}

// Runs the CTAs [first, first + ctas) as one cluster, to the end.
inline void run_cluster(unsigned first, int ctas, dim3 block, int dynamic_bytes, const std::function<void()>& body) {
  Cluster here;
  cluster = &here;
  block_dim = block;
  here.body = body;
  here.threads = int(block.x * block.y);
  if (here.threads % 32 != 0 || here.threads > 1024) throw std::runtime_error("a CTA of an odd size");
  here.fibers.resize(size_t(ctas) * here.threads);
  constexpr size_t kStack = 64 * 1024;
  for (int c = 0; c < ctas; ++c) {
    here.ctas.push_back(std::make_unique<Cta>());
    Cta& cta = *here.ctas.back();
    cta.index = {first + unsigned(c), 1, 1};
    cta.rank = c;
    cta.warps.resize(here.threads / 32);
    cta.dynamic.resize(dynamic_bytes / 16);
    std::memset(cta.slots, 0xFF, sizeof(cta.slots));  // NaN
    for (int t = 0; t < here.threads; ++t) {
      Fiber& fiber = here.fibers[size_t(c) * here.threads + t];
      fiber.stack.reset(new char[kStack]);
      fiber.number = t;
      fiber.thread = {unsigned(t) % block.x, unsigned(t) / block.x, 0};
      fiber.cta = &cta;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, run_fiber, 0);
    }
  }
  for (bool alive = true; alive;) {
    alive = false;
    for (Fiber& fiber : here.fibers) {
      if (fiber.done) continue;
      alive = true;
      self = &fiber;
      swapcontext(&here.scheduler, &fiber.context);
    }
  }
  cluster = nullptr;
  self = nullptr;
}

}  // namespace emulation

#define threadIdx (::flashnorm::emulation::self->thread)
#define blockIdx (::flashnorm::emulation::self->cta->index)
#define blockDim (::flashnorm::emulation::block_dim)

// The value of thread `from` of the warp.
template <class T>
T shuffle(T v, int from) {
  static_assert(sizeof(T) == sizeof(float), "one word");
  emulation::Fiber& me = *emulation::self;
  emulation::Warp& warp = me.cta->warps[me.number / 32];
  // Two sets in turn: a thread may be one shuffle ahead of another that has yet to read.
  float* values = warp.values[me.shuffles++ % 2];
  std::memcpy(&values[me.number % 32], &v, sizeof(T));
  emulation::wait(warp.barrier, 32);
  std::memcpy(&v, &values[from], sizeof(T));
  return v;
}
inline int lane_number() { return emulation::self->number % 32; }

inline float shuffle_xor(float v, int mask) { return shuffle(v, lane_number() ^ mask); }
inline uint32_t shuffle_xor(uint32_t v, int mask) { return shuffle(v, lane_number() ^ mask); }
inline uint32_t shuffle_up(uint32_t v) { return shuffle(v, lane_number() > 0 ? lane_number() - 1 : 0); }

inline void prefetch(const void*) {}
inline void start_copy(uint4* to, const uint4* from) { *to = *from; }
inline void start_copy(uint2* to, const uint2* from) { *to = *from; }
inline void await_copies() {}
inline void end_batch() {}
inline void await_batches(int) {}

inline void sync_warp() { shuffle(0.0f, 0); }
inline void sync_cta() { emulation::wait(emulation::self->cta->barrier, emulation::cluster->threads); }
inline void sync_row(int row, int threads) { emulation::wait(emulation::self->cta->rows[row], threads); }
template <int kSums>
Slots<kSums>& shared_slots() {
  static_assert(kSums <= emulation::kMostSums, "more room");
  return *reinterpret_cast<Slots<kSums>*>(emulation::self->cta->slots);
}
inline uint4* dynamic_shared() { return emulation::self->cta->dynamic.data(); }

inline int cluster_rank() { return emulation::self->cta->rank; }
template <int kSums>
void cluster_open(Slots<kSums>&) {
  ++emulation::cluster->opened;
}
inline void cluster_peers_open() {
  while (emulation::cluster->opened < int(emulation::cluster->fibers.size())) emulation::yield();
}
template <int kSums>
void cluster_expect(Slots<kSums>&, int phase, int values) {
  std::vector<int>& turns = emulation::self->cta->expected[phase];
  turns.push_back((turns.empty() ? 0 : turns.back()) + values);
}
template <int kSums>
void cluster_put(Slots<kSums>&, int phase, int sum, int slot, float v, int rank) {
  emulation::Cta& to = *emulation::cluster->ctas[rank];
  reinterpret_cast<Slots<kSums>*>(to.slots)->values[phase][sum][slot] = v;
  ++to.arrived[phase];
}
template <int kSums>
void cluster_await(Slots<kSums>&, int phase, int turn) {
  emulation::Cta& cta = *emulation::self->cta;
  const std::vector<int>& turns = cta.expected[phase];
  while (int(turns.size()) <= turn || cta.arrived[phase] < turns[turn]) emulation::yield();
}

inline void wait_for_earlier_kernels() {}
inline void let_later_kernels_start() {}

}  // namespace flashnorm
