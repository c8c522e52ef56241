// How much work a thread of the CPU route is worth.
#pragma once

#include <cstdint>

namespace flashnorm {
namespace cpu {

// A thread is worth waking for this many elements: 5 us of work, where waking costs 1 to 2 us.
constexpr int64_t kGrain = 32768;

// Results of this many elements (8 or 16 MiB) do not stay in a cache until somebody reads them.
constexpr int64_t kStreamed = int64_t(4) << 20;

}  // namespace cpu
}  // namespace flashnorm
