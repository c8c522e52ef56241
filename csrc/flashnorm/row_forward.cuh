// The row kernel: load, statistics, maps, store.
//
// One body. Where a row waits between its passes is a class of its own: `RegisterRow` holds it, as it
// was stored, in a number of registers that is fixed when it is compiled; `StreamedRow` serves every
// other row, in loops, from shared memory or read again. Which of them, how many threads and CTAs a row, how
// many rows a CTA: all of that is the plan's (ffi/plan.h), and no result depends on it (reduce.cuh).
#pragma once

#include "row/place.cuh"
#include "row/registers.cuh"
#include "row/streamed.cuh"

namespace flashnorm {

#if FN_KERNELS

// The larger of an amax and |v|, as `magnitude` gives it: a NaN is the largest.
FN_DEVICE uint32_t larger_magnitude(uint32_t amax, float v) {
#if FN_DEVICE_CODE && __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(float_of(amax)), "f"(fabsf(v)));
  return bits_of(result);
#else
  return larger(amax, magnitude(v));
#endif
}

// The largest |v| of the elements that are there, as `magnitude` gives it.
template <int N, class Access>
FN_DEVICE uint32_t amax_of(const float (&v)[N], const Access& access) {
  const int count = count_of<N>(access);
  uint32_t amax = 0;
  FN_UNROLL
  for (int i = 0; i < N; ++i) {
    // Where groups are whole, one question is enough.
    const bool there = !std::is_same_v<Access, Shifted> || i < count;
    amax = larger_magnitude(amax, there ? v[i] : 0.0f);
  }
  return count > 0 ? amax : 0;
}

// The largest value of kNeighbours neighbouring threads, or of all `threads` on the row where it has fewer. All
// threads of the warp call it.
template <int kNeighbours>
FN_DEVICE uint32_t largest_of_neighbours(uint32_t v, int threads) {
  static_assert(kNeighbours <= 32 && (kNeighbours & (kNeighbours - 1)) == 0, "a block is a power of two of groups");
  FN_UNROLL
  for (int step = kNeighbours / 2; step >= 1; step /= 2) {
    if (step < threads) v = larger(v, shuffle_xor(v, step));
  }
  return v;
}

// A row as it is stored, as its statistics see it.
template <class HeldRow>
struct RowAgain {
  HeldRow& row;
  FN_DEVICE int hidden_size() const { return row.hidden_size(); }
  FN_DEVICE void sum_squares(float (&sums)[1]) { row.sum_squares_again(sums); }
};

// The passes from the statistics on: what is computed of every group, and stored. `result(v, maps, at)` makes y.
template <class Store, class HeldRow, class Reduce, class Result>
FN_DEVICE void store_row(const Store& store, typename Store::Given given, HeldRow& row, Reduce& reduce,
                         const Place& place, const Result& result) {
  if constexpr (AgainOf<Store>::kThere) {
    row.renew([&](auto& v, const auto& maps, const auto& at, auto& again) {
      result(v, maps, at);
      clear_missing(v, count_of<kGroup>(at.access));
      narrow(again, v);
      store.put_again(again, at);
    });
    RowAgain<HeldRow> again{row};
    const auto stats = store.stats();
    typename decltype(stats)::State states[1];
    stats.compute(states, again);
    row.finish_again([&](auto& v, const auto& raw, const auto& at) { store.put(v, raw, states[0], at); });
  } else if constexpr (Store::kBlock == kNoBlock) {
    const auto scale = store.scale(given);
    row.template finish<false>([&](auto& v, const auto& maps, const auto& at) {
      result(v, maps, at);
      store.put(v, scale, at);
    });
  } else if constexpr (Store::kBlock == kWholeRow) {
    static_assert(HeldRow::kRows == 1, "each has a scale of its own");
    uint32_t amax = 0;
    row.survey([&](auto& v, const auto& maps, const auto& at) {
      result(v, maps, at);
      amax = larger(amax, amax_of(v, at.access));
    });
    float own[1][1] = {{float_of(amax)}}, all[1];
    reduce.template fold<Larger>(all, own);
    const auto scale = store.scale(bits_of(all[0]), given);
    row.template finish<false, !HeldRow::kHoldsResult>([&](auto& v, const auto& maps, const auto& at) {
      if constexpr (!HeldRow::kHoldsResult) result(v, maps, at);
      store.put(v, scale, at);
    });
    if (place.speaks_for_row()) store.put_scale(scale, Row{0, 0}, 0);
  } else {
    // Neighbouring groups are in neighbouring threads, so a block is a part of a warp: that or, for a narrow row,
    // of a row's threads.
    constexpr int kNeighbours = Store::kBlock / kGroup;
    static_assert(HeldRow::kRows == 1, "each has scales of its own");
    row.template finish<true>([&](auto& v, const auto& maps, const auto& at) {
      result(v, maps, at);
      const uint32_t amax = largest_of_neighbours<kNeighbours>(amax_of(v, at.access), int(blockDim.x));
      const auto scale = store.scale(amax, given);
      store.put(v, scale, at);
      if (count_of<kGroup>(at.access) > 0 && place.first_group % kNeighbours == 0) {
        store.put_scale(scale, Row{0, 0}, (place.first_group * kGroup + at.col) / Store::kBlock);
      }
    });
  }
}

// All of a thread's rows that are there, once their reads have begun.
template <class Program, class HeldRow, class Reduce>
FN_DEVICE void finish_row(const Program& program, const RowGrid& grid, HeldRow& row, Reduce& reduce, const Place& place,
                          typename decltype(Program::store)::Given given) {
  typename decltype(Program::stats)::State states[HeldRow::kRows];
  program.stats.compute(states, row);
  store_row(program.store, given, row, reduce, place, [&](auto& v, const auto& maps, const auto& at) {
    program.stats.template normalize<HeldRow::kCentred>(v, states[at.row.inner]);
    program.maps.apply(v, maps.raw, maps.rows);
  });
  FN_UNROLL
  for (int r = 0; r < HeldRow::kRows; ++r) {
    if (place.speaks_for(r, grid)) program.saves.put(states[r], Row{0, r, r});
  }
}

// CTAs that a processor must have registers for: where a thread's part of a row waits in 32 of them or fewer.
template <class Program, class Tile>
constexpr int residents() {
  return Tile::kPresent * kGroup * held_bytes<Program>() <= 128 ? Tile::kResident : 0;
}

// ---------------------------------------------------------------- the kernel
template <class Program, class Tile>
__global__ void __launch_bounds__(Tile::kMaxCta, residents<Program, Tile>())
    row_forward(const __grid_constant__ Program launched, const __grid_constant__ RowGrid grid) {
  using Reduce = RowReduce<Tile::kThreads, Tile::kCluster, Tile::kAbreast * decltype(Program::stats)::kSums>;
  using HeldRow = std::conditional_t<Tile::kLanes != 0, RegisterRow<Program, Tile, Reduce>,
                                     StreamedRow<Program, Tile, Reduce>>;
  const Place place(grid, Tile{});
  const Program program = entered(launched, grid, place);
  Reduce reduce(place.row_in_cta, place.rank);
  HeldRow row(program, grid, place, reduce);

  if (grid.prefetch) row.touch();
  wait_for_earlier_kernels();
  let_later_kernels_start();

  const auto given = program.store.read();
  row.read();
  finish_row(program, grid, row, reduce, place, given);
  if constexpr (decltype(Program::store)::kBlock != kNoBlock) {
    // Rows of the grid past the last one write zeros where the scales are padded.
    if (place.row >= grid.rows && place.row < program.store.padded_rows()) {
      program.store.pad(Row{0, 0}, place.first_group, int(blockDim.x) * Tile::kCluster);
    }
  }
}

#endif  // FN_KERNELS

}  // namespace flashnorm
