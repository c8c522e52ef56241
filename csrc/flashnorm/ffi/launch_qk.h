// How the CUDA route launches `QkNormRope`.
#pragma once

#include "../qk/plan.h"
#include "runtime.h"

namespace flashnorm {

template <class Program>
const DeviceFacts& qk_device(int device) {
  return facts_of(device, [](DeviceFacts& facts) {
    QkTilesOf<Program>::each([&](auto tile) {
      const QkKernel<Program> kernel = qk_norm_rope<Program, decltype(tile)>;
      const void* function = reinterpret_cast<const void*>(kernel);
      load_kernel(function, facts);
      allow_shared(function, facts.shared_memory - kOwnSharedMemory);
    });
  });
}

#ifdef FLASHNORM_TUNING
// Tuning builds only (benchmarks/tune_qk.py): a plan from outside instead of `pick_qk`'s; no threads for its own.
inline QkPlan& forced_qk_plan() {
  static QkPlan plan{};
  return plan;
}
inline void force_plan(int threads, int lanes, int groups, bool staged) {
  forced_qk_plan() = {threads, lanes, Groups(groups), staged};
}
#endif

template <class Program>
void launch_qk(const Program& program, const QkOperands& operands, bool enable_pdl) {
  if (operands.device().device_type != kDLCUDA) throw value_error() << "the tensors are not on a CUDA device";
  const int64_t tokens = operands.tokens();
  if (tokens == 0) return;
  if (tokens > 0x7FFFFFFFll) throw value_error() << tokens << " tokens are too many for one launch";
  const int device = operands.device().device_id;
  const DeviceGuard guard(device);
  const DeviceFacts& facts = qk_device<Program>(device);
  QkPlan plan = pick_qk<Program>(facts, tokens, program.layout, operands.whole());
#ifdef FLASHNORM_TUNING
  if (forced_qk_plan().threads > 0) plan = forced_qk_plan();
#endif
  const QkLaunch<Program> launch = qk_launch<Program>(plan, program.layout);

  const QkGrid grid(operands.inner(), program, plan.threads);
  const LaunchShape shape{tokens, dim3(unsigned(plan.threads)), launch.shared_bytes, 1, enable_pdl && facts.sm >= 90};
  launch_kernel(launch.kernel, program, grid, shape, device);
}

}  // namespace flashnorm

#ifdef FLASHNORM_TUNING
FLASHNORM_EXPORT(force_plan, flashnorm::force_plan)
#endif
