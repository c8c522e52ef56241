// How a generated unit runs on the CPU: split over threads, plain or streamed stores.
#pragma once

#include "row_forward.h"

#include "../ffi/operands.h"
#include "grain.h"

namespace flashnorm {

template <class Program>
void launch_rows(const Program& program, const Operands& operands, bool /* enable_pdl: no such thing here */) {
  const int hidden_size = operands.hidden_size();
  const int64_t rows = operands.rows(), inner = operands.inner();
  const int64_t grain = hidden_size < cpu::kGrain ? cpu::kGrain / hidden_size : 1;
  const bool streamed = cpu::passes_caches(operands);
  cpu::parallel_rows(operands.grid_rows(), grain, [&](int64_t begin, int64_t end) {
    if (streamed) {
      cpu::forward_rows<cpu::Stream>(program, hidden_size, rows, inner, begin, end);
    } else {
      cpu::forward_rows<Whole>(program, hidden_size, rows, inner, begin, end);
    }
  });
}

}  // namespace flashnorm
