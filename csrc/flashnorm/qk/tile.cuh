// The shape of a kernel of `QkNormRope`, where things lie in its shared memory, and how a thread walks over heads.
#pragma once

#include "../device.cuh"
#include "program.cuh"

namespace flashnorm {

// What a thread's units are: elements of any place; groups of 8 that are aligned and never split by a head or by what
// turns; or such groups that have the same channels in every head that the thread comes to.
enum class Groups { kLoose, kWhole, kSteady };

// How a kernel divides a token, fixed when it is compiled.
template <int kThreads_, int kLanes_, Groups kGroups_, bool kStaged_, int kPresent_ = kLanes_>
struct QkTile {
  static constexpr int kThreads = kThreads_;
  static constexpr int kLanes = kLanes_;      // of a canonical sum, a thread
  static constexpr int kPresent = kPresent_;  // that have a group; where it is not all of them, one and no more
  static constexpr bool kShort = kPresent < kLanes;
  static constexpr Groups kGroups = kGroups_;
  static constexpr bool kWhole = kGroups != Groups::kLoose;
  static constexpr bool kSteady = kGroups == Groups::kSteady;
  static constexpr bool kStaged = kStaged_;  // Q and K fit into shared memory; else they are read again
};

// Division by a number that is known when a kernel is launched, for numerators below 2^31: a product's upper half. The
// quotient of Granlund and Montgomery (1994), whose multiplier has 32 bits for such numerators.
struct Divisor {
  uint32_t divisor;
  uint32_t multiplier;
  uint32_t shift;

  Divisor() = default;
  explicit Divisor(uint32_t by) : divisor(by), multiplier(0), shift(0) {
    while ((uint64_t(1) << shift) < by) ++shift;
    multiplier = uint32_t((uint64_t(1) << (31 + shift)) / by + 1);
  }
  FN_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    return uint32_t(uint64_t(2 * n) * multiplier >> 32) >> shift;  // the upper half of a product: one instruction
  }
};

// The launch's own arguments, beside the program.
struct QkGrid {
  Divisor inner;  // tokens of one outer row
  Divisor sequence, plane, width;
  int head_shift;  // log2 of head_dim, where groups are steady
  // There, how far it is from one of a thread's groups to the next, in results and in weights: a kernel that computed
  // it would do so for every group.
  int64_t out_step[kParts];
  int64_t weight_step[2];

  template <class Program>
  QkGrid(int64_t tokens, const Program& program, int threads)
      : inner(uint32_t(tokens)),
        sequence(uint32_t(program.layout.grid[0]) * program.layout.grid[1] * program.layout.grid[2]),
        plane(uint32_t(program.layout.grid[1]) * program.layout.grid[2]),
        width(uint32_t(program.layout.grid[2])),
        head_shift(0),
        weight_step{} {
    while ((1 << head_shift) < program.layout.head_dim) ++head_shift;
    const int heads = threads * kGroup / program.layout.head_dim;
    for (int part = kQ; part <= kV; ++part) out_step[part] = heads * program.out[part].head_stride;
    if constexpr (!std::is_void_v<WeightOf<Program, kQ>>) weight_step[kQ] = heads * program.q_weight.head_stride;
    if constexpr (!std::is_void_v<WeightOf<Program, kK>>) weight_step[kK] = heads * program.k_weight.head_stride;
  }

  // The token's place in the grid of its sequence.
  FN_HOST_DEVICE GridPlace place(uint32_t token) const {
    const uint32_t i = token - sequence.quotient(token) * sequence.divisor;
    const uint32_t frame = plane.quotient(i), rest = i - frame * plane.divisor;
    const uint32_t row = width.quotient(rest);
    return {int(frame), int(row), int(rest - row * width.divisor)};
  }
};

// Where the parts of a CTA's shared memory begin: cosines, sines, then Q and K. Pairs are rounded up to whole vectors.
FN_HOST_DEVICE int table_pairs(const QkLayout& layout) { return (layout.pairs() + 3) / 4 * 4; }
FN_HOST_DEVICE int table_bytes(const QkLayout& layout) { return 2 * table_pairs(layout) * int(sizeof(float)); }

#if FN_KERNELS

// A walk over the elements of a part, `kThreads` units at a time: where it is, as a head and a channel.
struct Walk {
  int head;
  int channel;

  FN_DEVICE void step(const Walk& by, int head_dim) {
    head += by.head;
    channel += by.channel;
    if (channel >= head_dim) channel -= head_dim, ++head;
  }
};

#endif  // FN_KERNELS

}  // namespace flashnorm
