// How a generated unit of `QkNormRope` runs on the CPU: split over threads, plain or streamed stores.
#pragma once

#include "qk_norm_rope.h"

#include "../qk/operands.h"
#include "grain.h"

namespace flashnorm {

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
  const int64_t grain = width < cpu::kGrain ? cpu::kGrain / width : 1;
  cpu::parallel_rows(tokens, grain, [&](int64_t begin, int64_t end) {
    if (tokens * width >= cpu::kStreamed) {
      run(cpu::Stream{}, begin, end);
    } else {
      run(Whole{}, begin, end);
    }
  });
}

}  // namespace flashnorm
