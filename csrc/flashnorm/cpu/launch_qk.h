// How a generated unit of `QkNormRope` runs on the CPU: split over threads, plain or streamed stores.
#pragma once

#include "qk_norm_rope.h"

#include "../qk/operands.h"

namespace flashnorm {
namespace cpu {

// A thread is worth waking for this many elements, and results of this many do not stay in a cache (cpu/launch.h).
constexpr int64_t kQkGrain = 32768;
constexpr int64_t kQkStreamed = int64_t(4) << 20;

}  // namespace cpu

template <class Program>
void launch_qk(const Program& program, const QkOperands& operands, bool /* enable_pdl: no such thing here */) {
  const int64_t tokens = operands.tokens(), inner = operands.inner();
  const int width = program.layout.start(kV) + program.layout.width(kV);
  const auto run = [&](auto access, int64_t begin, int64_t end) {
    using Access = decltype(access);
    const cpu::IeeeMode mode;
    cpu::QkTokens<Program, Access> work(program);
    for (int64_t i = begin; i < end; ++i) work.token({i / inner, i % inner, i});
    if constexpr (std::is_same_v<Access, cpu::Stream>) cpu::fence();
  };
  const int64_t grain = width < cpu::kQkGrain ? cpu::kQkGrain / width : 1;
  cpu::parallel_rows(tokens, grain, [&](int64_t begin, int64_t end) {
    if (tokens * width >= cpu::kQkStreamed) {
      run(cpu::Stream{}, begin, end);
    } else {
      run(Whole{}, begin, end);
    }
  });
}

}  // namespace flashnorm
