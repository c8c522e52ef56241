// Sums over rows by themselves: a thread has 8 columns of a stream, and needs no other thread.
//
// For rows of any width and alignment, and where only the sums are asked for.
#pragma once

#include "../access.cuh"

#include "../reduce.cuh"
#include "program.cuh"

namespace flashnorm {

constexpr int kColumnThreads = 128;

struct ColumnGrid {
  Streams streams;
  int hidden_size;
};

#if FN_KERNELS

template <class Access>
FN_DEVICE At<Access> at_columns(Row row, int col, int hidden_size) {
  if constexpr (std::is_same_v<Access, Shifted>) {
    return {row, col, {hidden_size - col, col}};
  } else {
    return {row, col, {}};
  }
}

template <class Program, class Access>
__global__ void __launch_bounds__(kColumnThreads)
    backward_columns(const __grid_constant__ Program program, const __grid_constant__ ColumnGrid grid) {
  using Dout = typename Program::Dout;
  using X = typename Program::X;
  constexpr int kSums = Program::kSums;
  constexpr int kAhead = std::is_same_v<Access, Shifted> ? 1 : 4;  // rows whose reads are in flight
  const Streams& streams = grid.streams;
  const int per_row = (grid.hidden_size + kColumnThreads * kGroup - 1) / (kColumnThreads * kGroup);
  const int64_t stream = blockIdx.x / per_row, used = streams.used();
  const int col = (int(blockIdx.x - stream * per_row) * kColumnThreads + int(threadIdx.x)) * kGroup;
  const int64_t weight_row = stream / used, p = stream - weight_row * used;
  const int64_t count = streams.count(p);

  wait_for_earlier_kernels();
  let_later_kernels_start();
  if (col >= grid.hidden_size) return;

  float inner[kSums][kGroup] = {}, outer[kSums][kGroup] = {};
  const auto join = [&]() {
    FN_UNROLL
    for (int q = 0; q < kSums; ++q) {
      FN_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        outer[q][i] = fp::add(outer[q][i], inner[q][i]);
        inner[q][i] = 0.0f;
      }
    }
  };
  for (int64_t first = 0; first < count; first += kAhead) {
    Pack<Dout, kGroup> dout[kAhead];
    Pack<X, kGroup> x[kAhead];
    RowState state[kAhead];
    FN_UNROLL
    for (int n = 0; n < kAhead; ++n) {
      if (first + n >= count) continue;
      const Row row = streams.row(weight_row, p + (first + n) * streams.partials);
      program.dout.load_once(dout[n], at_columns<Access>(row, col, grid.hidden_size));
      if constexpr (Program::kDw) {
        program.x.load_once(x[n], at_columns<Access>(row, col, grid.hidden_size));
        state[n] = program.state(row);
      }
    }
    FN_UNROLL
    for (int n = 0; n < kAhead; ++n) {
      if (first + n >= count) continue;
      float dy[kGroup], xh[kGroup];
      widen(dy, dout[n]);
      if constexpr (Program::kDw) {
        widen(xh, x[n]);
        Program::normalize(xh, state[n]);
        Program::round_norm(xh);
      }
      FN_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        if constexpr (Program::kDw) inner[0][i] = fp::fma(dy[i], xh[i], inner[0][i]);
        if constexpr (Program::kDb) inner[kSums - 1][i] = fp::add(dy[i], inner[kSums - 1][i]);
      }
    }
    static_assert(kInnerRows % kAhead == 0, "a batch ends where the accumulators do");
    if ((first + kAhead) % kInnerRows == 0) join();
  }
  if (count % kInnerRows != 0) join();

  FN_UNROLL
  for (int q = 0; q < kSums; ++q) {
    float* to = program.workspace +
                ((q * streams.weight_rows + weight_row) * streams.partials + p) * grid.hidden_size + col;
    FN_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      if (col + i < grid.hidden_size) to[i] = outer[q][i];
    }
  }
}

#endif  // FN_KERNELS

}  // namespace flashnorm
