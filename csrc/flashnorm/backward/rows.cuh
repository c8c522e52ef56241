// The gradients of rows by themselves, of any width and alignment: a lane a thread, read twice.
//
// Where every row has a weight row of its own, the weight's gradient is one of a row too.
#pragma once

#include "../access.cuh"

#include "../reduce.cuh"
#include "program.cuh"

namespace flashnorm {

struct RowsGrid {
  Streams streams;
  int64_t rows;   // of all
  int64_t inner;  // of the row grid
  int hidden_size;
};

#if FN_KERNELS

template <class Program, class Access>
__global__ void __launch_bounds__(kMaxLanes)
    backward_rows(const __grid_constant__ Program program, const __grid_constant__ RowsGrid grid) {
  using Dout = typename Program::Dout;
  using X = typename Program::X;
  using Reduce = RowReduce<0, 1, Program::kRowSums>;
  const int64_t number = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool there = number < grid.rows;
  Row row{0, there ? number : 0, 0};
  if (grid.inner != grid.rows && there) row = {number / grid.inner, number % grid.inner, 0};
  const int col = int(threadIdx.x) * kGroup, stride = int(blockDim.x) * kGroup;
  const int left = there ? grid.hidden_size - col : 0;
  Reduce reduce(int(threadIdx.y), 0);

  wait_for_earlier_kernels();
  let_later_kernels_start();

  const auto at = [&](int c) {
    if constexpr (std::is_same_v<Access, Shifted>) {
      return At<Shifted>{row, col + c, {left - c, col + c}};
    } else {
      return At<Access>{row, col + c, {}};
    }
  };
  // xh and gw of the group at `c`; elements that the row has not are +0. `dy` is the gradient as it came.
  const auto compute = [&](int c, const RowState& state, float (&xh)[kGroup], float (&dy)[kGroup],
                           float (&gw)[kGroup]) {
    Pack<Dout, kGroup> dout;
    Pack<X, kGroup> x;
    program.dout.load(dout, at(c));
    program.x.load(x, at(c));
    typename Elements<typename Program::W, kGroup>::Type weights;
    if constexpr (Program::kWeight) program.weight.load(weights, at(c));
    widen(dy, dout);
    widen(gw, dout);
    widen(xh, x);
    Program::normalize(xh, state);
    Program::weigh(gw, weights);
    if (std::is_same_v<Access, Shifted>) {
      FN_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        xh[i] = i < left - c ? xh[i] : 0.0f;
        gw[i] = i < left - c ? gw[i] : 0.0f;
      }
    }
  };

  const RowState state = there ? program.state(row) : RowState{};
  float xh[kGroup], dy[kGroup], gw[kGroup];
  RowLane<Program> sum;
  sum.clear();
  const int rounds = (grid.hidden_size + stride - 1) / stride;
  for (int r = 0; r < rounds; ++r) {
    if (r * stride < left) {
      compute(r * stride, state, xh, dy, gw);
      r == 0 ? sum.first(gw, xh) : sum.next(gw, xh);
    } else if (r > 0) {
      sum.missing();
    }
  }
  float lane[Program::kRowSums][1], sums[Program::kRowSums];
  FN_UNROLL
  for (int k = 0; k < Program::kRowSums; ++k) lane[k][0] = sum.fold(k);
  reduce.template fold<Add>(sums, lane);
  const RowSums means = Program::means_of(sums, grid.hidden_size);

  const auto put = [&](const auto& to, const float (&v)[kGroup], int c) {
    using T = std::remove_pointer_t<decltype(to.ptr)>;
    Pack<T, kGroup> pack;
    narrow(pack, v);
    to.store(pack, at(c));
  };
  for (int r = 0; r < rounds; ++r) {
    const int c = r * stride;
    // A shifted store is the work of a warp: threads without elements come along.
    if (!std::is_same_v<Access, Shifted> && c >= left) break;
    compute(c, state, xh, dy, gw);
    if constexpr (Program::kDw) {
      if (grid.streams.own) {
        float term[kGroup];
        FN_UNROLL
        for (int i = 0; i < kGroup; ++i) term[i] = xh[i];
        Program::round_norm(term);
        FN_UNROLL
        for (int i = 0; i < kGroup; ++i) term[i] = fp::mul(dy[i], term[i]);
        put(program.dweight, term, c);
      }
    }
    if constexpr (Program::kRows) {
      typename Elements<typename Program::G, kGroup>::Type more;
      if constexpr (Program::kJoins) program.g_residual.load(more, at(c));
      Program::differentiate(gw, xh, state, means);
      Program::join(gw, more);
      if constexpr (Program::kDx) put(program.dx, gw, c);
      if constexpr (Program::kDres) put(program.dresidual, gw, c);
    }
  }
}

#endif  // FN_KERNELS

}  // namespace flashnorm
