// The shape of a kernel of `QkNormRope`, where things lie in its shared memory, and how a thread walks over heads.
#pragma once

#include "../device.cuh"
#include "program.cuh"

namespace flashnorm {

// How a kernel divides a token, fixed when it is compiled.
template <int kThreads_, int kLanes_, bool kWhole_, bool kStaged_>
struct QkTile {
  static constexpr int kThreads = kThreads_;
  static constexpr int kLanes = kLanes_;     // of a canonical sum, a thread
  static constexpr bool kWhole = kWhole_;    // groups of 8 elements are aligned, and all in one head
  static constexpr bool kStaged = kStaged_;  // Q and K fit into shared memory; else they are read again
};

// The launch's own arguments, beside the program.
struct QkGrid {
  int64_t inner;  // tokens of one outer row
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
