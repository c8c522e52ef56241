// Stands in for flashnorm/ffi/backward_launch.h: the same plans and kernels, run over the emulation.
#pragma once

#define FLASHNORM_EMULATED "emulated_device.h"

#include "flashnorm/ffi/backward_select.h"

namespace flashnorm {

struct ForcedBackward {
  DeviceFacts device{90, 132, 227 * 1024};
  StreamPlan plan{};
  bool apart = false;
  int launches = 0;  // of the last call
};
inline ForcedBackward forced;

template <class Program>
void launch_backward(const Program& program, const Operands& operands, int64_t workspace, bool) {
  check_workspace(program, operands, workspace);
  forced.launches = 0;
  run_backward(program, operands, forced.device, forced.plan, forced.apart,
               [&](auto kernel, const auto& grid, const Extent& extent) {
                 ++forced.launches;
                 const int bytes = int((extent.shared_bytes + 15) / 16 * 16);
                 for (int64_t cta = 0; cta < extent.ctas; cta += extent.cluster) {
                   emulation::run_cluster(unsigned(cta), extent.cluster,
                                          {unsigned(extent.threads_x), unsigned(extent.threads_y), 1}, bytes,
                                          [&] { kernel(program, grid); });
                 }
               });
}

// What the plan would be: threads, rows, cluster, lanes, groups.
inline int64_t picked(int sm, int processors, int memory, int hidden_size, int sums, int field) {
  const StreamPlan plan = pick_streams({sm, processors, memory}, hidden_size, sums);
  const int fields[] = {plan.threads, plan.rows, plan.cluster, plan.lanes, plan.groups};
  return fields[field];
}

inline void force(int sm, int processors, int shared_memory, int threads, int rows, int cluster, int lanes, int groups,
                  int stages, bool apart) {
  forced.device = {sm, processors, shared_memory};
  forced.plan = {threads, rows, cluster, lanes, groups, stages};
  forced.apart = apart;
}
inline int launches() { return forced.launches; }

}  // namespace flashnorm

FLASHNORM_EXPORT(picked, flashnorm::picked)
FLASHNORM_EXPORT(force, flashnorm::force)
FLASHNORM_EXPORT(launches, flashnorm::launches)
