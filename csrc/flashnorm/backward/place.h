// From the operands of a call to its streams; host code, the same for every C++ route.
#pragma once

#include "../ffi/operands.h"
#include "program.cuh"

namespace flashnorm {

// How the call's rows belong to weight rows: all to one, or, where dweight has rows, the inner ones of the row grid each
// to its own and the outer ones are those that share it.
template <class Program>
Streams streams_of(const Program& program, const Operands& operands) {
  const int64_t rows = operands.rows(), inner = operands.inner();
  Streams streams{rows, 1, inner, 0, 0, false, inner >= rows};
  if constexpr (Program::kDw) {
    const auto& dweight = program.dweight;
    if (dweight.inner_stride != 0 || dweight.outer_stride != 0) {
      const bool all = operands.outer() == 1 || dweight.outer_stride != 0;
      if (all && inner > 1 && dweight.inner_stride == 0) {
        throw value_error() << "rows of dweight must be the inner ones of the grid";
      }
      if (all) {
        streams.own = true;
      } else {
        streams.rows = operands.outer();
        streams.weight_rows = inner;
        streams.even = true;
      }
    }
  }
  if (Program::kDb && (streams.own || streams.weight_rows > 1)) {
    throw value_error() << "a bias goes with a weight that all rows share";
  }
  streams.partials = partials_of(streams.weight_rows, operands.hidden_size());
  while (1 << streams.shift < streams.partials) ++streams.shift;
  return streams;
}

// Whether rows have weights of their own that nobody asks the gradient of: then rows are no streams.
template <class Program>
bool weighs_each_row(const Program& program) {
  if constexpr (Program::kWeight && !Program::kDw) {
    return program.weight.inner_stride != 0 || program.weight.outer_stride != 0;
  } else {
    return false;
  }
}

// What the workspace must hold.
template <class Program>
void check_workspace(const Program& program, const Operands& operands, int64_t elements) {
  const Streams streams = streams_of(program, operands);
  const int64_t needed = streams.own ? 0
                                     : Program::kSums * streams.weight_rows * streams.partials * operands.hidden_size();
  if (elements < needed || reinterpret_cast<uintptr_t>(program.workspace) % 16 != 0) {
    throw value_error() << "the workspace must be aligned to 16 bytes and hold " << needed
                        << " elements, got " << elements;
  }
}

}  // namespace flashnorm
