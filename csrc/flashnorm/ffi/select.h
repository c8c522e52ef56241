// From a plan to the kernel that carries it out and that kernel's arguments. No CUDA runtime: a test runs it too.
#pragma once

#include "../row_forward.cuh"
#include "operands.h"
#include "plan.h"

namespace flashnorm {

template <class Program>
using RowKernel = void (*)(Program, RowGrid);

template <class Program, int kLanes, int kGroups, int kMaxThreads>
RowKernel<Program> if_it_fits() {
  if constexpr (kLanes * kGroups * sizeof(Pack<typename decltype(Program::load)::Kept, kGroup>) <= kRegisterBytes) {
    return rows_in_registers<Program, kLanes, kGroups, kMaxThreads>;
  } else {
    return nullptr;
  }
}

// The kernel that holds a row in registers, or null where there is none of that shape. Few shapes: each
// costs about half a second when an operator is built.
template <class Program>
RowKernel<Program> registers_kernel(int lanes, int groups) {
  switch (lanes * 32 + groups) {
    case 1 * 32 + 1:
      return if_it_fits<Program, 1, 1, 1024>();
    case 2 * 32 + 1:
      return if_it_fits<Program, 2, 1, 512>();
    case 4 * 32 + 1:
      return if_it_fits<Program, 4, 1, 256>();
    case 4 * 32 + 2:
      return if_it_fits<Program, 4, 2, 256>();
    case 1 * 32 + 2:
      return if_it_fits<Program, 1, 2, 1024>();
    case 1 * 32 + 4:
      return if_it_fits<Program, 1, 4, 512>();
    case 1 * 32 + 8:
      return if_it_fits<Program, 1, 8, 256>();
    case 1 * 32 + 16:
      return if_it_fits<Program, 1, 16, 128>();
    default:
      return nullptr;
  }
}

template <class Program>
RowKernel<Program> streamed_kernel(bool whole) {
  return whole ? rows_streamed<Program, Whole> : rows_streamed<Program, Ragged>;
}

// Calls `visit(kernel, streamed)` for every kernel of the program.
template <class Program, class Visit>
void for_each_kernel(Visit visit) {
  for (int lanes = 1; lanes <= 4; lanes *= 2) {
    for (int groups = 1; groups <= 16; groups *= 2) {
      if (const RowKernel<Program> kernel = registers_kernel<Program>(lanes, groups)) visit(kernel, false);
    }
  }
  visit(streamed_kernel<Program>(true), true);
  visit(streamed_kernel<Program>(false), true);
}

// What a kernel takes of a CTA's shared memory besides the row: its slots, with room to spare.
constexpr int kOwnSharedMemory = 1024;

template <class Program>
struct RowLaunch {
  RowKernel<Program> kernel;
  RowGrid grid;
  int64_t ctas;
  int stage_bytes;
};

template <class Program>
RowLaunch<Program> row_launch(const Program&, const Operands& operands, const Plan& plan, const DeviceFacts& device) {
  using Kept = typename decltype(Program::load)::Kept;
  const int64_t rows = operands.rows();
  RowLaunch<Program> launch{registers_kernel<Program>(plan.lanes, plan.groups), {}, 0, 0};
  launch.grid = {rows, operands.inner(), operands.hidden_size(), operands.width(), plan.cluster, 0, false};
  while ((1 << launch.grid.cluster_shift) < plan.cluster) ++launch.grid.cluster_shift;
  launch.ctas = (rows + plan.rows - 1) / plan.rows * plan.cluster;
  if (launch.kernel == nullptr) {
    launch.kernel = streamed_kernel<Program>(operands.width() == kGroup);
    const int columns = kGroup * plan.threads * plan.cluster;
    const int64_t groups = (operands.hidden_size() + columns - 1) / columns * plan.threads * plan.rows;
    const int64_t bytes = groups * int64_t(sizeof(Pack<Kept, kGroup>));
    launch.grid.staged = bytes <= device.shared_memory - kOwnSharedMemory;
    if (launch.grid.staged) launch.stage_bytes = int(bytes);
  }
  return launch;
}

}  // namespace flashnorm
