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

template <class... Each, class... More>
QkTiles<Each..., More...> joined(QkTiles<Each...>, QkTiles<More...>);

// Tuning builds only (benchmarks/tune_qk.py): what the plans of steady groups are compared with.
#ifdef FLASHNORM_TUNING
using QkTrialSums = QkTiles<QkTile<32, 8, Groups::kSteady, true>, QkTile<64, 8, Groups::kSteady, true>,
                            QkTile<128, 2, Groups::kSteady, true>>;
using QkTrials = QkTiles<QkTile<32, 1, Groups::kSteady, true>>;
#else
using QkTrialSums = QkTiles<>;
using QkTrials = QkTiles<>;
#endif

// 1024 lanes at the most. A tile of fewer has a group for each of them; elsewhere lanes say nothing.
using QkSumTiles =
    QkTiles<QkTile<32, 4, Groups::kSteady, true>, QkTile<64, 4, Groups::kSteady, true>,
            QkTile<128, 4, Groups::kSteady, true>, QkTile<128, 8, Groups::kSteady, true>,
            QkTile<128, 8, Groups::kSteady, true, 5>,  // up to 40 heads of 128
            QkTile<512, 2, Groups::kSteady, true>, QkTile<64, 4, Groups::kWhole, true>,
            QkTile<128, 8, Groups::kWhole, true>, QkTile<512, 2, Groups::kWhole, true>,
            QkTile<512, 2, Groups::kWhole, false>, QkTile<128, 8, Groups::kLoose, true>,
            QkTile<512, 2, Groups::kLoose, false>>;
using QkOtherTiles = QkTiles<QkTile<64, 1, Groups::kSteady, true>, QkTile<128, 1, Groups::kSteady, true>,
                             QkTile<512, 1, Groups::kSteady, true>, QkTile<128, 1, Groups::kWhole, true>,
                             QkTile<512, 1, Groups::kWhole, true>, QkTile<512, 1, Groups::kWhole, false>,
                             QkTile<128, 1, Groups::kLoose, true>, QkTile<512, 1, Groups::kLoose, false>>;
template <class Program>
using QkTilesOf =
    std::conditional_t<Program::Options::kScope == Scope::kHidden, decltype(joined(QkSumTiles{}, QkTrialSums{})),
                       decltype(joined(QkOtherTiles{}, QkTrials{}))>;

// Whether groups of 8 elements are never split by a head, or by what turns.
template <class Program>
bool whole_groups(const QkLayout& layout) {
  return layout.head_dim % kGroup == 0 && layout.rotary_dim % (Program::Options::kInterleave ? kGroup : 2 * kGroup) == 0;
}

inline int widest(const QkLayout& layout) {
  return layout.width(kQ) > layout.width(kK) ? layout.width(kQ) : layout.width(kK);
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
  // What a thread does once for a token costs as much as five groups of 8: as many threads as have two to four groups
  // of Q and of K each. 12 heads of 128 are three on 64 threads, where they would be one and a half on 128.
  const int lanes = lanes_of(widest(layout));
  if (!kSums) return {steady && lanes <= 256 ? 64 : 128, 1, steady ? Groups::kSteady : groups, true};
  if (!steady) return {lanes <= 256 ? 64 : 128, lanes <= 256 ? 4 : 8, groups, true};
  const int threads = lanes <= 128 ? 32 : lanes <= 256 ? 64 : 128;
  return {threads, lanes <= 512 ? 4 : 8, Groups::kSteady, true};
}

template <class Program>
struct QkLaunch {
  QkKernel<Program> kernel = nullptr;
  int shared_bytes = 0;
};

template <class Program>
QkLaunch<Program> qk_launch(const QkPlan& plan, const QkLayout& layout) {
  QkLaunch<Program> launch;
  int present = 0;  // of the tiles that carry it out, the one with the least room
  QkTilesOf<Program>::each([&](auto tile) {
    using Tile = decltype(tile);
    const bool room = !Tile::kShort || widest(layout) <= Tile::kPresent * plan.threads * kGroup;
    if (Tile::kThreads == plan.threads && Tile::kLanes == plan.lanes && Tile::kGroups == plan.groups &&
        Tile::kStaged == plan.staged && room && (present == 0 || Tile::kPresent < present)) {
      launch.kernel = qk_norm_rope<Program, Tile>;
      present = Tile::kPresent;
    }
  });
  const bool few = plan.threads * plan.lanes < kMaxLanes && plan.threads * plan.lanes < lanes_of(widest(layout));
  if (launch.kernel == nullptr || (few && Program::Options::kScope == Scope::kHidden)) {
    throw runtime_error() << "no kernel for " << plan.threads << " threads, " << plan.lanes
                          << " lanes a thread";
  }
  launch.shared_bytes = table_bytes(layout);
  if (plan.staged) launch.shared_bytes += layout.start(kV) * int(sizeof(typename Program::X));
  launch.shared_bytes = (launch.shared_bytes + 15) / 16 * 16;
  return launch;
}

}  // namespace flashnorm
