// The last step of a sum over rows: the partials in the workspace are folded by halving, and cast.
#pragma once

#include "../access.cuh"

#include "program.cuh"

namespace flashnorm {

constexpr int kFoldColumns = 16, kFoldSlices = 32;  // of a CTA: fewer slices are more values in flight, and spill

struct FoldGrid {
  int64_t weight_rows;
  int partials;  // P: how many places the workspace has for each weight row
  int written;   // partials of a weight row that are left, a power of two; they lie in the first places
  int64_t used;  // of those, the first so many have any rows; the others are +0, and were not written
  int hidden_size;
};

#if FN_KERNELS

// A partial is never -0: outer accumulators start at +0. So adding the +0 of one without rows may be left out, and is
// not: it costs nothing.
template <int kMost, class Value>
FN_DEVICE float fold_values(int count, const Value& value) {
  float v[kMost];
  FN_UNROLL
  for (int i = 0; i < kMost; ++i) v[i] = i < count ? value(i) : 0.0f;
  FN_UNROLL
  for (int step = kMost / 2; step >= 1; step /= 2) {
    if (step >= count) continue;
    FN_UNROLL
    for (int i = 0; i < step; ++i) v[i] = fp::add(v[i], v[i + step]);
  }
  return v[0];
}

// One column of one weight row a thread, threadIdx.y the slice: slice j has the partials j, j + slices, ...
template <class Program>
__global__ void __launch_bounds__(kFoldColumns* kFoldSlices)
    backward_fold(const __grid_constant__ Program program, const __grid_constant__ FoldGrid grid) {
  constexpr int kMost = 16, kMostOfMost = kMostPartials / kFoldSlices / kMost;
  const int columns = (grid.hidden_size + kFoldColumns - 1) / kFoldColumns;
  const int64_t weight_row = blockIdx.x / columns;
  const int column = int(blockIdx.x - weight_row * columns) * kFoldColumns + int(threadIdx.x);
  const int slices = int(blockDim.y), slice = int(threadIdx.y);
  const bool there = column < grid.hidden_size;
  float* slots = reinterpret_cast<float*>(dynamic_shared());

  wait_for_earlier_kernels();
  let_later_kernels_start();

  FN_UNROLL
  for (int q = 0; q < Program::kSums; ++q) {
    const float* from =
        program.workspace + (q * grid.weight_rows + weight_row) * grid.partials * grid.hidden_size + column;
    const auto partial = [&](int64_t p) {
      return there && p < grid.used ? from[p * grid.hidden_size] : 0.0f;
    };
    const int mine = grid.written / slices;
    float sum;
    if (mine <= kMost) {
      sum = fold_values<kMost>(mine, [&](int i) { return partial(slice + int64_t(i) * slices); });
    } else {
      // Those that are kMost apart meet first.
      float first[kMost];
      FN_UNROLL
      for (int m = 0; m < kMost; ++m) {
        first[m] = fold_values<kMostOfMost>(
            mine / kMost, [&](int i) { return partial(slice + (int64_t(i) * kMost + m) * slices); });
      }
      sum = fold_values<kMost>(kMost, [&](int i) { return first[i]; });
    }
    for (int step = slices / 2; step >= 1; step /= 2) {
      if (slice >= step && slice < 2 * step) slots[(slice - step) * kFoldColumns + int(threadIdx.x)] = sum;
      sync_cta();
      if (slice < step) sum = fp::add(sum, slots[slice * kFoldColumns + int(threadIdx.x)]);
      sync_cta();
    }
    if (there && slice == 0) {
      const Row row{0, weight_row, 0};
      const auto put = [&](const auto& to) {
        using T = std::remove_pointer_t<decltype(to.ptr)>;
        Pack<T, 2> pack;
        const float v[2] = {sum, 0.0f};
        narrow(pack, v);
        detail::store_element(to.row(row) + column, 0, pack.words);
      };
      if constexpr (Program::kDw) {
        if (q == 0) put(program.dweight);
      }
      if constexpr (Program::kDb) {
        if (q == Program::kSums - 1) put(program.dbias);
      }
    }
  }
}

#endif  // FN_KERNELS

}  // namespace flashnorm
