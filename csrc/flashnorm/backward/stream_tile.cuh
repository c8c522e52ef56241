// How the kernel of streams divides its work, and what it needs for that.
#pragma once

#include "program.cuh"

namespace flashnorm {

// The launch's own arguments, beside the program.
struct StreamGrid {
  Streams streams;
  int hidden_size;
  int folded;          // streams of a CTA that fold together: a power of two, the last ones of their partials' tree
  int stages;          // of the ring: 1 to 4
  bool outer_shared;   // outer accumulators lie in shared memory, behind the ring
};

// How a kernel divides a row, fixed when it is compiled; as for the forward, `kThreads` 0 is a lane a thread of
// blockDim.x <= 32.
template <int kThreads_, int kRows_, int kCluster_, int kLanes_, int kGroups_>
struct StreamTile {
  static constexpr int kThreads = kThreads_;  // a row, in one CTA
  static constexpr int kRows = kRows_;        // streams of a CTA; 0: blockDim.y
  static constexpr int kCluster = kCluster_;  // CTAs a row
  static constexpr int kLanes = kLanes_;      // a thread
  static constexpr int kGroups = kGroups_;    // a lane
  static constexpr int kHeld = kLanes * kGroups;
  static constexpr int kCta = kThreads == 0 ? 256 : kThreads * kRows;
};

template <class... Each>
struct StreamTileList {};

// 16-byte pieces of what a thread reads of a group.
template <class T>
constexpr int kPieces = Elements<T, kGroup>::kBytes / 16;
template <class Program>
constexpr int kStreamPieces = kPieces<typename Program::Dout> + kPieces<typename Program::X> +
                              kPieces<typename Program::G>;
// Whether a thread keeps its part of the weight in registers: one in fp32 with four groups spilled.
template <class Program, class Tile>
constexpr bool kHoldsWeight = Tile::kHeld * Elements<typename Program::W, kGroup>::kBytes <= 64;
// Whether gw and xh of the first pass are there for the second one, or made again from the stages: twice a group. For
// narrow rows ptxas has a step of occupancy in mind, and spills.
template <class Program, class Tile>
constexpr bool kKeepsValues = Program::kRows && Tile::kThreads > 0 && Tile::kHeld <= 2 && Program::kSums < 2 &&
                              Elements<typename Program::W, kGroup>::kBytes <= 16;

// Bytes of shared memory that all streams of a CTA need: of a stage, and of outer accumulators.
template <class Program>
constexpr int64_t stage_bytes(int cta, int held) {
  return int64_t(cta) * held * kStreamPieces<Program> * 16;
}
template <class Program>
constexpr int64_t outer_bytes(int cta, int held) {
  return int64_t(cta) * held * Program::kSums * kGroup * 4;
}

}  // namespace flashnorm
