// Stands in for flashnorm/ffi/launch.h: the same plans and kernels, run over the emulation.
#pragma once

#define FLASHNORM_EMULATED "emulated_device.h"

#include <cstring>

#include "flashnorm/ffi/select.h"

namespace flashnorm {

struct Forced {
  DeviceFacts device{90, 132, 227 * 1024};
  Plan plan{0, 0, 0, 0, 0, false};
};
inline Forced forced;

template <class Program>
void launch_rows(const Program& program, const Operands& operands, bool) {
  const Plan plan = plan_of(program, operands, forced.device, forced.plan);
  const RowLaunch<Program> launch = row_launch(program, operands, plan, forced.device);
  for (int64_t cta = 0; cta < launch.ctas; cta += plan.cluster) {
    emulation::run_cluster(unsigned(cta), plan.cluster, {unsigned(plan.threads), unsigned(plan.rows), 1},
                           launch.stage_bytes, [&] { launch.kernel(program, launch.grid); });
  }
}

// What the plan would be: threads, rows, cluster, lanes, groups, rows a thread.
inline int64_t picked(int sm, int processors, int memory, int64_t rows, int hidden_size, int width, int kept,
                      bool heavy, bool layered, bool large, bool modulated, bool gated, int dense, int abreast, int field) {
  const ProgramFacts program{kept, heavy, layered, large, modulated, gated, dense, abreast};
  const Plan plan = pick({sm, processors, memory}, rows, hidden_size, width, program);
  const int fields[] = {plan.threads, plan.rows, plan.cluster, plan.lanes, plan.groups, plan.abreast};
  return fields[field];
}

template <class... Each>
bool any_carries_out(const Plan& plan, int hidden_size, int kept, bool whole, TileList<Each...>) {
  return ((Each::kPresent * Each::kAbreast * kGroup * kept <= kRegisterBytes && carries_out<Each>(plan, whole) &&
           has_room<Each>(plan, hidden_size)) ||
          ...);
}

// Whether a program of some kind has a kernel for a plan.
inline bool has_kernel(int threads, int rows, int cluster, int lanes, int groups, int abreast, int hidden_size, int kept,
                       bool whole, bool heavy, bool layered, bool large, bool modulated, bool, int dense, int most_abreast) {
  const Plan plan{threads, rows, cluster, lanes, groups, false, abreast};
  const auto any = [&](auto tiles) { return any_carries_out(plan, hidden_size, kept, whole, tiles); };
  return (large ? any(LargeTiles{}) : any(Tiles{})) || (modulated && any(ModulatedTiles{})) ||
         (layered ? any(LayerTiles{})
          : dense ? any(DenseTiles{})
                  : heavy && any(HeavyTiles{})) ||
         (most_abreast > 1 && (modulated ? any(SharingModulatedTiles{}) : any(SharingLayerTiles{})));
}

inline void force(int sm, int shared_memory, int threads, int rows, int cluster, int lanes, int groups, int abreast) {
  forced.device = {sm, Forced{}.device.processors, shared_memory};
  forced.plan = {threads, rows, cluster, lanes, groups, true, abreast};
}

}  // namespace flashnorm

FLASHNORM_EXPORT(picked, flashnorm::picked)
FLASHNORM_EXPORT(has_kernel, flashnorm::has_kernel)
FLASHNORM_EXPORT(force, flashnorm::force)
