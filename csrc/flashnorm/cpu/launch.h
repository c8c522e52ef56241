// How a generated unit runs on the CPU: split over threads, plain or streamed stores.
#pragma once

#include "row_forward.h"

#include "../ffi/operands.h"

namespace flashnorm {
namespace cpu {

// A thread is worth waking for this many elements: 5 us of work, where waking costs 1 to 2 us.
constexpr int64_t kGrain = 32768;

// Results of this many elements (8 or 16 MiB) do not stay in a cache until somebody reads them.
constexpr int64_t kStreamed = int64_t(4) << 20;

}  // namespace cpu

template <class Program>
void launch_rows(const Program& program, const Operands& operands, bool /* enable_pdl: no such thing here */) {
  const int hidden_size = operands.hidden_size();
  const int64_t rows = operands.rows(), inner = operands.inner();
  const int64_t grain = hidden_size < cpu::kGrain ? cpu::kGrain / hidden_size : 1;
  const bool streamed = rows * hidden_size >= cpu::kStreamed;
  cpu::parallel_rows(operands.grid_rows(), grain, [&](int64_t begin, int64_t end) {
    if (streamed) {
      cpu::forward_rows<cpu::Stream>(program, hidden_size, rows, inner, begin, end);
    } else {
      cpu::forward_rows<Whole>(program, hidden_size, rows, inner, begin, end);
    }
  });
}

}  // namespace flashnorm
