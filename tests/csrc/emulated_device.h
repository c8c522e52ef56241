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
struct uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace flashnorm {

struct Slots {
  alignas(16) float values[2][32];
  uint64_t barriers[2];
};

namespace emulation {

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
  Slots slots;
  int arrived[2] = {0, 0};  // values that peers have put so far
  int expected[2] = {0, 0};
  std::vector<uint4> dynamic;
  std::vector<Warp> warps;
  Barrier barrier;
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
    for (auto& set : cta.slots.values)
      for (float& value : set) value = __builtin_nanf("");
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

inline float shuffle_xor(float v, int mask) {
  emulation::Fiber& me = *emulation::self;
  emulation::Warp& warp = me.cta->warps[me.number / 32];
  // Two sets in turn: a thread may be one shuffle ahead of another that has yet to read.
  float* values = warp.values[me.shuffles++ % 2];
  values[me.number % 32] = v;
  emulation::wait(warp.barrier, 32);
  return values[(me.number % 32) ^ mask];
}

inline uint32_t shuffle_up(uint32_t v) {
  emulation::Fiber& me = *emulation::self;
  emulation::Warp& warp = me.cta->warps[me.number / 32];
  float* values = warp.values[me.shuffles++ % 2];
  std::memcpy(&values[me.number % 32], &v, 4);
  emulation::wait(warp.barrier, 32);
  const int from = me.number % 32;
  std::memcpy(&v, &values[from > 0 ? from - 1 : 0], 4);
  return v;
}

inline uint4 load_streamed(const uint4* from) { return *from; }
inline void store_streamed(uint4* to, uint4 v) { *to = v; }
inline void prefetch(const void*) {}
inline void start_copy(uint4* to, const uint4* from) { *to = *from; }
inline void await_copies() {}

inline void sync_cta() { emulation::wait(emulation::self->cta->barrier, emulation::cluster->threads); }
inline Slots& shared_slots() { return emulation::self->cta->slots; }
inline uint4* dynamic_shared() { return emulation::self->cta->dynamic.data(); }

inline int cluster_rank() { return emulation::self->cta->rank; }
inline void cluster_open(Slots&) { ++emulation::cluster->opened; }
inline void cluster_peers_open() {
  while (emulation::cluster->opened < int(emulation::cluster->fibers.size())) emulation::yield();
}
inline void cluster_expect(Slots&, int phase, int values) { emulation::self->cta->expected[phase] = values; }
inline void cluster_put(Slots&, int phase, int slot, float v, int rank) {
  emulation::Cta& to = *emulation::cluster->ctas[rank];
  to.slots.values[phase][slot] = v;
  ++to.arrived[phase];
}
inline void cluster_await(Slots&, int phase, int turn) {
  emulation::Cta& cta = *emulation::self->cta;
  while (cta.expected[phase] == 0 || cta.arrived[phase] < cta.expected[phase] * (turn + 1)) emulation::yield();
}

inline void wait_for_earlier_kernels() {}
inline void let_later_kernels_start() {}

}  // namespace flashnorm
