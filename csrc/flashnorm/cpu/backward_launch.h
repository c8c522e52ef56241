// How a generated backward unit runs on the CPU.
#pragma once

#include "row_backward.h"

#include "../backward/place.h"
#include "../ffi/operands.h"
#include "grain.h"

namespace flashnorm {

template <class Program>
void launch_backward(const Program& program, const Operands& operands, int64_t workspace, bool /* enable_pdl */) {
  check_workspace(program, operands, workspace);
  const int hidden_size = operands.hidden_size();
  const Streams streams = streams_of(program, operands);
  const int64_t rows = operands.rows();
  const bool streamed = cpu::passes_caches(operands);
  const auto grain = [&](int64_t elements) { return elements < cpu::kGrain ? cpu::kGrain / elements : 1; };

  if (Program::kSums == 0 || streams.own) {
    if constexpr (Program::kRows || Program::kDw) {
      cpu::parallel_rows(rows, grain(hidden_size), [&](int64_t begin, int64_t end) {
        if (streamed) {
          cpu::backward_rows<cpu::Stream>(program, streams, hidden_size, begin, end);
        } else {
          cpu::backward_rows<Whole>(program, streams, hidden_size, begin, end);
        }
      });
    }
    return;
  }
  if constexpr (Program::kSums > 0) {
    const int64_t longest = (streams.rows + streams.partials - 1) / streams.partials;
    cpu::parallel_rows(streams.weight_rows * streams.used(), grain((longest > 0 ? longest : 1) * hidden_size),
                       [&](int64_t begin, int64_t end) {
                         if (streamed) {
                           cpu::backward_partials<cpu::Stream>(program, streams, hidden_size, begin, end);
                         } else {
                           cpu::backward_partials<Whole>(program, streams, hidden_size, begin, end);
                         }
                       });
    const int64_t used = streams.used() > 0 ? streams.used() : 1;
    const int64_t blocks = (hidden_size + cpu::kFoldBlock - 1) / cpu::kFoldBlock;
    cpu::parallel_rows(streams.weight_rows * blocks, grain(used * cpu::kFoldBlock), [&](int64_t begin, int64_t end) {
      cpu::fold_partials(program, streams, hidden_size, begin, end);
    });
  }
}

}  // namespace flashnorm
