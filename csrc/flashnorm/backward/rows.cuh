// The gradients of rows by themselves, of any width and alignment: a lane or two a thread, read twice.
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

// Shifted accesses take all registers there are, so CTAs are smaller and threads have two of 1024 lanes.
template <class Access>
constexpr int kRowThreads = std::is_same_v<Access, Shifted> ? kMaxLanes / 2 : kMaxLanes;

template <class Program, class Access, int kLanes>
__global__ void __launch_bounds__(kRowThreads<Access>)
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
  const auto load_dout = [&](float (&dy)[kGroup], int c) {
    Pack<Dout, kGroup> dout;
    program.dout.load(dout, at(c));
    widen(dy, dout);
  };
  // xh and gw of the group at `c`; elements that the row has not are +0.
  const auto compute = [&](int c, const RowState& state, float (&xh)[kGroup], float (&gw)[kGroup]) {
    Pack<X, kGroup> x;
    load_dout(gw, c);
    typename Elements<typename Program::W, kGroup>::Type weights;
    if constexpr (Program::kWeight) program.weight.load(weights, at(c));
    Program::weigh(gw, weights);
    program.x.load(x, at(c));
    widen(xh, x);
    Program::normalize(xh, state);
    if (std::is_same_v<Access, Shifted>) {
      FN_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        xh[i] = i < left - c ? xh[i] : 0.0f;
        gw[i] = i < left - c ? gw[i] : 0.0f;
      }
    }
  };

  const RowState state = there ? program.state(row) : RowState{};
  float xh[kGroup], gw[kGroup];
  float lane[Program::kRowSums][kLanes], sums[Program::kRowSums];
  const int rounds = (grid.hidden_size + kLanes * stride - 1) / (kLanes * stride);
  FN_UNROLL
  for (int j = 0; j < kLanes; ++j) {
    RowLane<Program> sum;
    sum.clear();
    for (int r = 0; r < rounds; ++r) {
      const int c = (r * kLanes + j) * stride;
      if (c < left) {
        compute(c, state, xh, gw);
        r == 0 ? sum.first(gw, xh) : sum.next(gw, xh);
      } else if (r > 0) {
        sum.missing();
      }
    }
    FN_UNROLL
    for (int k = 0; k < Program::kRowSums; ++k) lane[k][j] = sum.fold(k);
  }
  reduce.template fold<Add>(sums, lane);
  const RowSums means = Program::means_of(sums, grid.hidden_size);

  const auto put = [&](const auto& to, const float (&v)[kGroup], int c) {
    using T = std::remove_pointer_t<decltype(to.ptr)>;
    Pack<T, kGroup> pack;
    narrow(pack, v);
    to.store(pack, at(c));
  };
  for (int r = 0; r < kLanes * rounds; ++r) {
    const int c = r * stride;
    // A shifted store is the work of a warp: threads without elements come along.
    if (!std::is_same_v<Access, Shifted> && c >= left) break;
    if constexpr (Program::kDw) {
      if (grid.streams.own) {
        compute(c, state, xh, gw);
        Program::round_norm(xh);
        load_dout(gw, c);
        FN_UNROLL
        for (int i = 0; i < kGroup; ++i) xh[i] = fp::mul(gw[i], xh[i]);
        put(program.dweight, xh, c);
      }
    }
    if constexpr (Program::kRows) {
      compute(c, state, xh, gw);
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
