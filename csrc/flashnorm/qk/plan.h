// Which kernel serves a launch of `QkNormRope`: a pure function of the layout and the device. No CUDA runtime: a test
// runs it too.
#pragma once

#include "../ffi/facts.h"
#include "../qk_norm_rope.cuh"
#include "operands.h"

namespace flashnorm {

struct QkPlan {
  int threads;
  int lanes;  // of a sum, a thread
  Groups groups;
  bool staged;
};

template <class Program>
using QkKernel = void (*)(Program, QkGrid);

template <class... Each>
struct QkTiles {
  // visit(tile) for each
  template <class Visit>
  static void each(const Visit& visit) {
    (visit(Each{}), ...);
  }
};

// 1024 lanes at the most. A tile of fewer has a group for each of them; elsewhere lanes say nothing.
template <class Program>
using QkTilesOf = std::conditional_t<
    Program::Options::kScope == Scope::kHidden,
    QkTiles<QkTile<128, 2, Groups::kSteady, true>, QkTile<128, 4, Groups::kSteady, true>,
            QkTile<128, 8, Groups::kSteady, true>, QkTile<512, 2, Groups::kSteady, true>,
            QkTile<128, 8, Groups::kWhole, true>, QkTile<512, 2, Groups::kWhole, true>,
            QkTile<512, 2, Groups::kWhole, false>, QkTile<128, 8, Groups::kLoose, true>,
            QkTile<512, 2, Groups::kLoose, false>>,
    QkTiles<QkTile<128, 1, Groups::kSteady, true>, QkTile<512, 1, Groups::kSteady, true>,
            QkTile<128, 1, Groups::kWhole, true>, QkTile<512, 1, Groups::kWhole, true>,
            QkTile<512, 1, Groups::kWhole, false>, QkTile<128, 1, Groups::kLoose, true>,
            QkTile<512, 1, Groups::kLoose, false>>>;

// Whether groups of 8 elements are never split by a head, or by what turns.
template <class Program>
bool whole_groups(const QkLayout& layout) {
  return layout.head_dim % kGroup == 0 && layout.rotary_dim % (Program::Options::kInterleave ? kGroup : 2 * kGroup) == 0;
}

template <class Program>
QkPlan pick_qk(const DeviceFacts& device, int64_t tokens, const QkLayout& layout, bool aligned) {
  const int bytes = table_bytes(layout) + layout.start(kV) * int(sizeof(typename Program::X));
  const bool whole = aligned && whole_groups<Program>(layout);
  const bool staged = bytes + kOwnSharedMemory <= device.shared_memory;
  const Groups groups = whole ? Groups::kWhole : Groups::kLoose;
  constexpr bool kSums = Program::Options::kScope == Scope::kHidden;
  if (!staged) return {512, kSums ? 2 : 1, groups, false};
  if (!whole) return {128, kSums ? 8 : 1, groups, true};
  // Few tokens, or few that fit on a processor at a time: more threads for each. Either number of them comes to the
  // same channels again where a head is a power of two of at most a warp's groups.
  const bool wide = tokens <= device.processors || bytes > 48 * 1024;
  const bool steady = (layout.head_dim & (layout.head_dim - 1)) == 0 && layout.head_dim <= 32 * kGroup;
  if (wide) return {512, kSums ? 2 : 1, steady ? Groups::kSteady : groups, true};
  if (!kSums) return {128, 1, steady ? Groups::kSteady : groups, true};
  if (!steady) return {128, 8, groups, true};
  const int lanes = lanes_of(layout.width(kQ) > layout.width(kK) ? layout.width(kQ) : layout.width(kK));
  return {128, lanes <= 256 ? 2 : lanes <= 512 ? 4 : 8, Groups::kSteady, true};
}

template <class Program>
struct QkLaunch {
  QkKernel<Program> kernel = nullptr;
  int shared_bytes = 0;
};

template <class Program>
QkLaunch<Program> qk_launch(const QkPlan& plan, const QkLayout& layout) {
  QkLaunch<Program> launch;
  QkTilesOf<Program>::each([&](auto tile) {
    using Tile = decltype(tile);
    if (Tile::kThreads == plan.threads && Tile::kLanes == plan.lanes && Tile::kGroups == plan.groups &&
        Tile::kStaged == plan.staged) {
      launch.kernel = qk_norm_rope<Program, Tile>;
    }
  });
  if (launch.kernel == nullptr) {
    TVM_FFI_THROW(RuntimeError) << "no kernel for " << plan.threads << " threads, " << plan.lanes << " lanes a thread";
  }
  launch.shared_bytes = table_bytes(layout);
  if (plan.staged) launch.shared_bytes += layout.start(kV) * int(sizeof(typename Program::X));
  launch.shared_bytes = (launch.shared_bytes + 15) / 16 * 16;
  return launch;
}

}  // namespace flashnorm
