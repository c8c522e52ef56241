// How the CUDA route launches a program: which kernel, how many threads, and the launch itself.
#pragma once

#include "runtime.h"
#include "select.h"

namespace flashnorm {

template <class Program>
const DeviceFacts& device_facts(int device) {
  return facts_of(device, [](DeviceFacts& facts) {
    for_each_kernel<Program>([&](RowKernel<Program> kernel, auto tile) {
      const void* function = reinterpret_cast<const void*>(kernel);
      load_kernel(function, facts);
      if (tile.kLanes == 0) allow_shared(function, facts.shared_memory - kOwnSharedMemory);
    });
  });
}

#ifdef FLASHNORM_TUNING
// Tuning builds only (benchmarks/tune_cuda.py): a plan from outside instead of `pick`'s, and what there is to choose.
inline Plan& forced_plan() {
  static Plan plan{};
  return plan;
}
inline void force_plan(int threads, int rows, int cluster, int lanes, int groups, bool prefetch, int abreast) {
  forced_plan() = {threads, rows, cluster, lanes, groups, prefetch, abreast};
}

// threads, cluster, lanes, groups, groups that are there, threads of a CTA at most, whether a CTA may have several rows,
// the rows of a thread, whether it is for rows that are not whole aligned groups, and which programs have it (0: all
// but large ones, 1: heavy ones, 2: those of several sums, 3: large ones, 4: modulated ones, 5: dense ones; 6 and 7:
// those of 2 and 4 that share much), of every tile, one after the other: the number at a place of that list, -1 behind it.
inline int64_t tiles(int64_t place) {
  int64_t found = -1, at = 0;
  const auto describe = [&](auto tile, int programs) {
    const bool shifted = std::is_same_v<typename decltype(tile)::Access, Shifted>;
    const int numbers[] = {tile.kThreads, tile.kCluster,  tile.kLanes, tile.kGroups, tile.kPresent,
                           tile.kMaxCta,  tile.kManyRows, tile.kAbreast, int(shifted), programs};
    for (const int number : numbers) {
      if (at++ == place) found = number;
    }
  };
  for_each_tile([&](auto tile) { describe(tile, 0); }, Tiles{});
  for_each_tile([&](auto tile) { describe(tile, 1); }, HeavyTiles{});
  for_each_tile([&](auto tile) { describe(tile, 2); }, LayerTiles{});
  for_each_tile([&](auto tile) { describe(tile, 6); }, SharingLayerTiles{});
  for_each_tile([&](auto tile) { describe(tile, 3); }, LargeTiles{});
  for_each_tile([&](auto tile) { describe(tile, 4); }, ModulatedTiles{});
  for_each_tile([&](auto tile) { describe(tile, 7); }, SharingModulatedTiles{});
  for_each_tile([&](auto tile) { describe(tile, 5); }, DenseTiles{});
  return found;
}
#endif

template <class Program>
void launch_rows(const Program& program, const Operands& operands, bool enable_pdl) {
  if (operands.device().device_type != kDLCUDA) throw value_error() << "the tensors are not on a CUDA device";
  const int64_t rows = operands.grid_rows();
  if (rows == 0) return;
  const int device = operands.device().device_id;
  const DeviceGuard guard(device);
  const DeviceFacts& facts = device_facts<Program>(device);

#ifdef FLASHNORM_TUNING
  const Plan plan = plan_of(program, operands, facts, forced_plan());
#else
  const Plan plan = plan_of(program, operands, facts);
#endif
  const RowLaunch<Program> launch = row_launch(program, operands, plan, facts);
  if (launch.ctas > 0x7FFFFFFFll) throw value_error() << rows << " rows are too many for one launch";

  const bool pdl = enable_pdl && facts.sm >= 90;
  const LaunchShape shape{launch.ctas, dim3(plan.threads, plan.rows), launch.stage_bytes, plan.cluster, pdl};
  launch_kernel(launch.kernel, program, launch.grid, shape, device);
}

}  // namespace flashnorm

#ifdef FLASHNORM_TUNING
FLASHNORM_EXPORT(force_plan, flashnorm::force_plan)
FLASHNORM_EXPORT(tiles, flashnorm::tiles)
#endif
