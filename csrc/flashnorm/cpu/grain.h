// How much work a thread of the CPU route is worth, and what is too much for a cache.
#pragma once

#include <cstdint>

#include "../ffi/operands.h"

namespace flashnorm {
namespace cpu {

// A thread is worth waking for this many elements: 5 us of work, where waking costs 1 to 2 us.
constexpr int64_t kGrain = 32768;

// Results of this many elements (8 or 16 MiB) do not stay in a cache until somebody reads them, and go to memory past
// all of them. Not those that replace what was read: their lines are in a cache by then, and throwing each out takes
// ten times as long as writing it (bfloat16 on Zen 3).
constexpr int64_t kStreamed = int64_t(4) << 20;

inline bool passes_caches(const Operands& operands) {
  return operands.rows() * operands.hidden_size() >= kStreamed && !operands.in_place();
}

}  // namespace cpu
}  // namespace flashnorm
