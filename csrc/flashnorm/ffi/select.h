// From a plan to the kernel that carries it out and that kernel's arguments. No CUDA runtime: a test runs it too.
#pragma once

#include <algorithm>

#include "../row_forward.cuh"
#include "operands.h"
#include "plan.h"

namespace flashnorm {

template <class Program>
using RowKernel = void (*)(Program, RowGrid);

// Whether a tile is the plan's, for rows of whole aligned groups or for others.
template <class Tile>
bool carries_out(const Plan& plan, bool whole) {
  const bool threads = Tile::kNarrow ? plan.threads * plan.lanes <= 32
                                     : Tile::kThreads == 0 || Tile::kThreads == plan.threads;
  return threads && Tile::kCluster == plan.cluster && Tile::kLanes == plan.lanes && Tile::kGroups == plan.groups &&
         (Tile::kManyRows || plan.rows == 1) && plan.threads * plan.rows <= Tile::kMaxCta && plan.stays == Tile::kStays &&
         std::is_same_v<typename Tile::Access, Shifted> != whole;
}

template <class Visit, class... Each>
void for_each_tile(Visit&& visit, TileList<Each...>) {
  (visit(Each{}), ...);
}

// Calls `visit(kernel, tile)` for every kernel of the program.
template <class Program, class Visit>
void for_each_kernel(Visit&& visit) {
  for_each_tile(
      [&](auto tile) {
        using Tile = decltype(tile);
        if constexpr (Tile::kPresent * kGroup * held_bytes<Program>() <= kRegisterBytes) {
          visit(static_cast<RowKernel<Program>>(row_forward<Program, Tile>), tile);
        }
      },
      TilesOf<Program>{});
}

template <class Program>
struct RowLaunch {
  RowKernel<Program> kernel;
  RowGrid grid;
  int64_t ctas;
  int stage_bytes;
};

template <class Program>
RowLaunch<Program> row_launch(const Program&, const Operands& operands, Plan plan, const DeviceFacts& device) {
  using Raw = typename LocatedOf<Program>::template Raw<kGroup>;
  const int64_t rows = operands.rows();
  const bool whole = operands.width() == kGroup;
  RowLaunch<Program> launch{nullptr, {rows, operands.inner(), operands.hidden_size(), plan.prefetch, false, 0}, 0, 0};
  plan.stays = plan.stays && operands.inner() == rows;  // a place in rows of rows costs a division a turn
  int resident = 0;
  int present = 0;  // of the tiles that carry it out, the one with the least room
  for_each_kernel<Program>([&](RowKernel<Program> kernel, auto tile) {
    using Tile = decltype(tile);
    const bool room = Tile::kPresent == Tile::kLanes * Tile::kGroups ||
                      operands.hidden_size() <= Tile::kPresent * plan.threads * plan.cluster * kGroup;
    if (!carries_out<Tile>(plan, whole) || !room || (launch.kernel != nullptr && Tile::kPresent > present)) return;
    launch.kernel = kernel;
    present = Tile::kPresent;
    resident = Tile::kResident;
  });
  if (launch.kernel == nullptr) {
    TVM_FFI_THROW(RuntimeError) << "no kernel for " << text(plan.threads) << " threads x " << text(plan.cluster)
                                << " CTAs a row, " << text(plan.lanes) << " lanes a thread, " << text(plan.groups)
                                << " groups a lane";
  }
  launch.ctas = (operands.grid_rows() + plan.rows - 1) / plan.rows * plan.cluster;
  if (plan.stays) {
    launch.ctas = std::min<int64_t>(launch.ctas, resident * int64_t(device.processors));
    launch.grid.at_once = launch.ctas * plan.rows;
    launch.stage_bytes = present * plan.threads * plan.rows * int(sizeof(Raw));
  }
  if (plan.lanes == 0) {
    const int columns = kGroup * plan.threads * plan.cluster;
    const int64_t groups = (operands.hidden_size() + columns - 1) / columns * plan.threads * plan.rows;
    const int64_t bytes = groups * int64_t(sizeof(Raw));
    launch.grid.staged = bytes <= device.shared_memory - kOwnSharedMemory;
    if (launch.grid.staged) launch.stage_bytes = int(bytes);
  }
  return launch;
}

}  // namespace flashnorm
