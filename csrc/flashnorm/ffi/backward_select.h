// From a call to the kernels that carry it out and their arguments. No CUDA runtime: a test runs it too.
#pragma once

#include "../row_backward.cuh"

#include "../backward/place.h"
#include "backward_plan.h"
#include "operands.h"

namespace flashnorm {

template <class Program, class Grid>
using BackwardKernel = void (*)(Program, Grid);

// The size of a launch.
struct Extent {
  int64_t ctas;
  int threads_x;
  int threads_y;
  int cluster;
  int64_t shared_bytes;
};

template <class Tile>
bool carries_out(const StreamPlan& plan) {
  const bool threads = Tile::kThreads == 0 ? plan.threads <= 32 && plan.threads * plan.rows == Tile::kCta
                                           : Tile::kThreads == plan.threads && Tile::kRows == plan.rows;
  return plan.threads > 0 && threads && Tile::kCluster == plan.cluster && Tile::kLanes == plan.lanes &&
         Tile::kGroups == plan.groups;
}

template <class Visit, class... Each>
void for_each_tile(Visit&& visit, StreamTileList<Each...>) {
  (visit(Each{}), ...);
}

// visit(kernel) for every kernel of the program.
template <class Program, class Visit>
void for_each_backward_kernel(Visit&& visit) {
  if constexpr (Program::kRows) {
    for_each_tile([&](auto tile) { visit(backward_streams<Program, decltype(tile)>); }, StreamTilesOf<Program>{});
  }
  if constexpr (Program::kRows || Program::kDw) {
    visit(backward_rows<Program, Whole, 1>);
    visit(backward_rows<Program, Shifted, 1>);
    visit(backward_rows<Program, Shifted, 2>);
  }
  if constexpr (Program::kSums > 0) {
    visit(backward_columns<Program, Whole>);
    visit(backward_columns<Program, Shifted>);
    visit(backward_fold<Program>);
  }
}

// Calls `run(kernel, grid, extent)` for each kernel of the call, in order. `forced` has threads 0 for a plan of its own.
template <class Program, class Run>
void run_backward(const Program& program, const Operands& operands, const DeviceFacts& device, const StreamPlan& forced,
                  bool apart, const Run& run) {
  const int hidden_size = operands.hidden_size();
  const bool whole = operands.width() == kGroup;
  const Streams streams = streams_of(program, operands);
  const int64_t rows = operands.rows();
  bool done = rows == 0;
  int written = streams.partials;

  if constexpr (Program::kRows) {
    if (whole && !done && !streams.own && !apart && !weighs_each_row(program)) {
      StreamPlan plan = forced.threads > 0 ? forced : pick_streams(device, hidden_size, Program::kSums);
      const int64_t longest = (streams.rows + streams.partials - 1) / streams.partials;
      const int held = plan.lanes * plan.groups, cta = plan.threads * plan.rows;
      StreamMemory memory{};
      if (plan.threads > 0) {
        memory = divide_memory(device.shared_memory - kOwnSharedMemory, stage_bytes<Program>(cta, held),
                               outer_bytes<Program>(cta, held), longest, plan.stages);
      }
      if (memory.stages > 0) {
        const int folded = Program::kSums == 0 ? 1 : plan.rows < streams.partials ? plan.rows : streams.partials;
        written = streams.partials / folded;
        const int64_t used = streams.used() < written ? streams.used() : written;
        const int64_t bundles = plan.rows / folded;
        const int64_t ctas = (streams.weight_rows * used + bundles - 1) / bundles * plan.cluster;
        const StreamGrid grid{streams, hidden_size, folded, memory.stages, memory.outer};
        for_each_tile(
            [&](auto tile) {
              using Tile = decltype(tile);
              if (done || !carries_out<Tile>(plan)) return;
              run(backward_streams<Program, Tile>, grid,
                  Extent{ctas, plan.threads, plan.rows, plan.cluster, memory.bytes});
              done = true;
            },
            StreamTilesOf<Program>{});
        if (!done) throw runtime_error() << "no kernel for the plan of a backward";
      }
    }
  }
  if constexpr (Program::kSums > 0) {
    // Before the rows: a gradient of rows may be written over the incoming one.
    if (!done && !streams.own) {
      written = streams.partials;
      const int per_row = (hidden_size + kColumnThreads * kGroup - 1) / (kColumnThreads * kGroup);
      const Extent extent{streams.weight_rows * streams.used() * per_row, kColumnThreads, 1, 1, 0};
      const ColumnGrid grid{streams, hidden_size};
      if (whole) {
        run(backward_columns<Program, Whole>, grid, extent);
      } else {
        run(backward_columns<Program, Shifted>, grid, extent);
      }
    }
  }
  if constexpr (Program::kRows || Program::kDw) {
    if (!done && (Program::kRows || streams.own)) {
      const int lanes = lanes_of(hidden_size), most = whole ? kRowThreads<Whole> : kRowThreads<Shifted>;
      const int threads = lanes < most ? lanes : most, in_cta = threads < 256 ? 256 / threads : 1;
      const Extent extent{(rows + in_cta - 1) / in_cta, threads, in_cta, 1, 0};
      const RowsGrid grid{streams, rows, operands.inner(), hidden_size};
      if (whole) {
        run(backward_rows<Program, Whole, 1>, grid, extent);
      } else if (threads == lanes) {
        run(backward_rows<Program, Shifted, 1>, grid, extent);
      } else {
        run(backward_rows<Program, Shifted, 2>, grid, extent);
      }
    }
  }
  if constexpr (Program::kSums > 0) {
    if (!streams.own) {
      const int slices = written < kFoldSlices ? written : kFoldSlices;
      const int64_t columns = (hidden_size + kFoldColumns - 1) / kFoldColumns;
      const int64_t used = streams.used() < written ? streams.used() : written;
      const FoldGrid grid{streams.weight_rows, streams.partials, written, used, hidden_size};
      run(backward_fold<Program>, grid,
          Extent{columns * streams.weight_rows, kFoldColumns, slices, 1, kFoldColumns * kFoldSlices * 2});
    }
  }
}

}  // namespace flashnorm
