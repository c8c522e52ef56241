// From a plan to the kernel that carries it out and that kernel's arguments. No CUDA runtime: a test runs it too.
#pragma once

#include <cstring>

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
         (Tile::kManyRows || plan.rows == 1) && plan.threads * plan.rows <= Tile::kMaxCta && plan.abreast == Tile::kAbreast &&
         std::is_same_v<typename Tile::Access, Shifted> != whole;
}

template <class Visit, class... Each>
void for_each_tile(Visit&& visit, TileList<Each...>) {
  (visit(Each{}), ...);
}

// Whether a tile has room for a row.
template <class Tile>
bool has_room(const Plan& plan, int hidden_size) {
  return Tile::kPresent == Tile::kLanes * Tile::kGroups ||
         hidden_size <= Tile::kPresent * plan.threads * plan.cluster * kGroup;
}

// Calls `visit(kernel, tile)` for every kernel of the program.
template <class Program, class Visit>
void for_each_kernel(Visit&& visit) {
  for_each_tile(
      [&](auto tile) {
        using Tile = decltype(tile);
        if constexpr (Tile::kPresent * Tile::kAbreast * kGroup * held_bytes<Program>() <= kRegisterBytes) {
          visit(static_cast<RowKernel<Program>>(row_forward<Program, Tile>), tile);
        }
      },
      TilesOf<Program>{});
}

// Whether what is read besides rows is the same for a row and the one below it, within an outer row.
template <class Program>
bool same_below(const Program& program) {
  // All bytes, padding too, are copied and compared: where a map has a row of its own, its operand has moved on.
  using Maps = decltype(Program::maps);
  static_assert(std::is_trivially_copyable_v<Maps>, "compared as bytes");
  std::aligned_storage_t<sizeof(Maps), alignof(Maps)> below;
  std::memcpy(&below, &program.maps, sizeof(Maps));
  reinterpret_cast<Maps*>(&below)->enter(Row{0, 1, 1}, 0);
  return std::memcmp(&below, &program.maps, sizeof(Maps)) == 0 && vecs_same_below(program.load);
}

// Whether a thread may work on several rows, one below the other: they share what is read besides, and are all of one
// outer row.
template <class Program>
bool may_be_abreast(const Program& program, const Operands& operands, int rows) {
  if (rows == 1) return true;
  return (operands.inner() == operands.rows() || operands.inner() % rows == 0) && same_below(program);
}

// The plan for a launch: its own, or as much as can be of one that is forced (which has threads then).
template <class Program>
Plan plan_of(const Program& program, const Operands& operands, const DeviceFacts& device, Plan forced = {}) {
  ProgramFacts facts = facts_of<Program>();
  int& abreast = forced.threads > 0 ? forced.abreast : facts.abreast;
  if (!may_be_abreast(program, operands, abreast)) abreast = 1;
  if (forced.threads > 0) return forced;
  return pick(device, operands.grid_rows(), operands.hidden_size(), operands.width(), facts);
}

template <class Program>
struct RowLaunch {
  RowKernel<Program> kernel;
  RowGrid grid;
  int64_t ctas;
  int stage_bytes;
};

template <class Program>
RowLaunch<Program> row_launch(const Program&, const Operands& operands, const Plan& plan, const DeviceFacts& device) {
  using Raw = typename LocatedOf<Program>::template Raw<kGroup>;
  const int64_t rows = operands.rows();
  const bool whole = operands.width() == kGroup;
  RowLaunch<Program> launch{nullptr, {rows, operands.inner(), operands.hidden_size(), plan.prefetch, false}, 0, 0};
  int present = 0;  // of the tiles that carry it out, the one with the least room
  for_each_kernel<Program>([&](RowKernel<Program> kernel, auto tile) {
    using Tile = decltype(tile);
    if (!carries_out<Tile>(plan, whole) || !has_room<Tile>(plan, operands.hidden_size())) return;
    if (launch.kernel != nullptr && Tile::kPresent > present) return;
    launch.kernel = kernel;
    present = Tile::kPresent;
  });
  if (launch.kernel == nullptr) {
    throw runtime_error() << "no kernel for " << plan.threads << " threads x " << plan.cluster
                          << " CTAs a row, " << plan.lanes << " lanes a thread, " << plan.groups
                          << " groups a lane";
  }
  const int together = plan.rows * plan.abreast;
  launch.ctas = (operands.grid_rows() + together - 1) / together * plan.cluster;
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
