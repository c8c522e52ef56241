// Stands in for flashnorm/ffi/launch_qk.h: the same plans and kernels, run over the emulation.
#pragma once

#define FLASHNORM_EMULATED "emulated_device.h"

#include <cstring>

#include "flashnorm/qk/plan.h"

namespace flashnorm {

struct Forced {
  DeviceFacts device{90, 132, 227 * 1024};
  QkPlan plan{0, 0, Groups::kLoose, false};
};
inline Forced forced;

template <class Program>
void launch_qk(const Program& program, const QkOperands& operands, bool) {
  QkPlan plan = pick_qk<Program>(forced.device, operands.tokens(), program.layout, operands.whole());
  if (forced.plan.threads != 0) plan = forced.plan;
  const QkLaunch<Program> launch = qk_launch<Program>(plan, program.layout);
  const QkGrid grid(operands.inner(), program, plan.threads);
  for (int64_t token = 0; token < operands.tokens(); ++token) {
    emulation::run_cluster(unsigned(token), 1, {unsigned(plan.threads), 1, 1}, launch.shared_bytes,
                           [&] { launch.kernel(program, grid); });
  }
}

// The device of the next launches, and their plan; no threads for its own.
inline void force(int processors, int shared_memory, int threads, int lanes, int groups, bool staged) {
  forced.device = {90, processors, shared_memory};
  forced.plan = {threads, lanes, Groups(groups), staged};
}

// The sine and the cosine of many positions and frequencies, in place: position, hi, lo -> sine, cosine, lo.
inline void turns(TensorView triples) {
  float* at = static_cast<float*>(triples.data_ptr());
  for (int64_t i = 0; i < triples.numel() / 3; ++i, at += 3) {
    const Turn turn = turn_of(at[0], {at[1], at[2]});
    at[0] = turn.sin, at[1] = turn.cos;
  }
}

}  // namespace flashnorm

FLASHNORM_EXPORT(force, flashnorm::force)
FLASHNORM_EXPORT(turns, flashnorm::turns)
