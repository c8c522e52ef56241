// How the CUDA route launches a backward.
#pragma once

#include "backward_select.h"
#include "runtime.h"

namespace flashnorm {

template <class Program>
const DeviceFacts& backward_facts(int device) {
  return facts_of(device, [](DeviceFacts& facts) {
    for_each_backward_kernel<Program>([&](auto kernel) {
      const void* function = reinterpret_cast<const void*>(kernel);
      const int own = load_kernel(function, facts);
      allow_shared(function, facts.shared_memory - own);
    });
  });
}

#ifdef FLASHNORM_TUNING
// Tuning builds only: a plan from outside, and whether rows and sums are read apart.
struct ForcedStreams {
  StreamPlan plan{};
  bool apart = false;
};
inline ForcedStreams& forced_streams() {
  static ForcedStreams forced;
  return forced;
}
inline void force_streams(int threads, int rows, int cluster, int lanes, int groups, int stages, bool apart) {
  forced_streams() = {{threads, rows, cluster, lanes, groups, stages}, apart};
}
#endif

template <class Program>
void launch_backward(const Program& program, const Operands& operands, int64_t workspace, bool enable_pdl) {
  if (operands.device().device_type != kDLCUDA) throw value_error() << "the tensors are not on a CUDA device";
  check_workspace(program, operands, workspace);
  const int device = operands.device().device_id;
  const DeviceGuard guard(device);
  const DeviceFacts& facts = backward_facts<Program>(device);
  StreamPlan forced{};
  bool apart = false;
#ifdef FLASHNORM_TUNING
  forced = forced_streams().plan;
  apart = forced_streams().apart;
#endif
  run_backward(program, operands, facts, forced, apart, [&](auto kernel, const auto& grid, const Extent& extent) {
    if (extent.ctas > 0x7FFFFFFFll) throw value_error() << "too many rows for one launch";
    const LaunchShape shape{extent.ctas, dim3(extent.threads_x, extent.threads_y), extent.shared_bytes, extent.cluster,
                            enable_pdl && facts.sm >= 90};
    launch_kernel(kernel, program, grid, shape, device);
  });
}

}  // namespace flashnorm

#ifdef FLASHNORM_TUNING
FLASHNORM_EXPORT(force_streams, flashnorm::force_streams)
#endif
