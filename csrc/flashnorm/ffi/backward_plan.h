// How the CUDA route splits a backward: a pure function of the shape and the device. All the numbers of it are here.
#pragma once

#include <cstdint>

#include "../row_backward.cuh"
#include "facts.h"

namespace flashnorm {

// How `backward_streams` is launched. No result depends on it.
struct StreamPlan {
  int threads;  // a row, in one CTA; 0: the kernel does not serve the call
  int rows;     // streams of a CTA
  int cluster;  // CTAs a row
  int lanes;    // a thread
  int groups;   // a lane
  int stages;   // of the ring; 0: as many as fit
};

// The tiles there are. A CTA's streams fold together, so several of them are a smaller workspace.
using StreamTiles = StreamTileList<     // threads, rows, cluster, lanes, groups
    StreamTile<0, 0, 1, 1, 1>,          // up to 256
    StreamTile<32, 8, 1, 2, 1>,         // up to 512
    StreamTile<32, 8, 1, 4, 1>,         // up to 1024
    StreamTile<128, 4, 1, 2, 1>,        // up to 2048
    StreamTile<256, 2, 1, 2, 1>,        // up to 4096
    StreamTile<512, 1, 1, 2, 1>>;       // up to 8192
using WideTiles = StreamTileList<       //
    StreamTile<512, 1, 1, 2, 2>,        // up to 16384
    StreamTile<512, 1, 2, 1, 4>>;       // up to 32768
// Two sums over rows take twice the registers.
using WideTilesOfTwo = StreamTileList<  //
    StreamTile<256, 1, 2, 2, 2>,        //
    StreamTile<256, 1, 4, 1, 4>>;       //

template <class... A, class... B>
StreamTileList<A..., B...> joined(StreamTileList<A...>, StreamTileList<B...>);
template <class Program>
using StreamTilesOf = decltype(joined(
    StreamTiles{}, std::conditional_t<(Program::kSums > 1), WideTilesOfTwo, WideTiles>{}));

inline StreamPlan pick_streams(const DeviceFacts& device, int hidden_size, int sums) {
  const int lanes = lanes_of(hidden_size);
  if (lanes <= 32) return {lanes, 256 / lanes, 1, 1, 1, 0};
  if (lanes <= 128) return {32, 8, 1, lanes / 32, 1, 0};
  if (lanes == 256) return {128, 4, 1, 2, 1, 0};
  if (lanes == 512) return {256, 2, 1, 2, 1, 0};
  if (hidden_size <= 8192) return {512, 1, 1, 2, 1, 0};
  const bool clusters = device.sm >= 90;
  if (hidden_size <= 16384 && sums < 2) return {512, 1, 1, 2, 2, 0};
  if (hidden_size <= 16384 && clusters) return {256, 1, 2, 2, 2, 0};
  if (hidden_size <= 32768 && clusters) return sums < 2 ? StreamPlan{512, 1, 2, 1, 4, 0} : StreamPlan{256, 1, 4, 1, 4, 0};
  return {};
}

constexpr int kMostStages = 4;

// The ring and the outer accumulators of a CTA: its stages, and whether the accumulators are in shared memory.
struct StreamMemory {
  int stages;  // 0: not even one fits
  bool outer;
  int64_t bytes;
};

// `stage` and `outer` in bytes; `rows` of the longest stream.
inline StreamMemory divide_memory(int64_t available, int64_t stage, int64_t outer, int64_t rows, int forced) {
  const auto stages_in = [&](int64_t bytes) {
    int64_t most = bytes / stage < kMostStages ? bytes / stage : kMostStages;
    if (most > rows) most = rows;
    if (forced > 0 && most > forced) most = forced;
    return int(bytes < 0 ? 0 : most);
  };
  const int64_t kept = rows > kInnerRows ? outer : 0;  // a stream of so few rows never needs them
  const int without = stages_in(available);
  const int with = stages_in(available - kept);
  // Rows in flight are worth more than accumulators that are touched once in 16 rows.
  if (with >= 2 || (with == 1 && without == 1)) return {with, kept > 0, with * stage + kept};
  return {without, false, without * stage};
}

}  // namespace flashnorm
