// The row kernels: load, statistics, maps, store.
//
// Two kernels share their services. `rows_in_registers` holds a row, as it was stored, in registers
// between its two passes; the number of groups a thread holds is fixed when it is compiled, whole
// groups only. `rows_streamed` serves every other row: any width and alignment, in loops, the row
// kept in shared memory or read again. Which kernel, how many threads and CTAs a row, how many rows a
// CTA: all of that is the plan's (ffi/launch.h), and no result depends on it (reduce.cuh).
//
// A CTA is blockDim.x threads a row times blockDim.y rows; a cluster of CTAs shares one row.
#pragma once

#include "reduce.cuh"
#include "stages.cuh"

namespace flashnorm {

// The launch's own arguments, beside the program.
struct RowGrid {
  int64_t rows;
  int64_t inner;      // rows of one outer row; equal to `rows` for [M, H]
  int hidden_size;
  int width;          // elements that may be accessed at once (Ragged)
  int cluster;        // CTAs a row
  int cluster_shift;  // log2 of it
  bool staged;        // rows_streamed keeps the row in shared memory
};

#if FN_KERNELS

// Makes the compiler forget what it derived from a pack, so that the second pass widens it again
// instead of carrying twice the registers over the barrier.
template <class T, int N>
FN_DEVICE void forget(Pack<T, N>& pack) {
  FN_UNROLL
  for (int i = 0; i < Pack<T, N>::kWords; ++i) asm volatile("" : "+r"(pack.words[i]));
}

// Where this thread stands.
struct Place {
  Row row;
  int rank;         // CTA of the cluster
  int first_group;  // the thread's first lane, and with it its first group
  int stride;       // threads a row, over all CTAs of the cluster
  int limit;        // columns to touch: H, or 0 for a row past the end

  FN_DEVICE explicit Place(const RowGrid& grid) {
    rank = grid.cluster > 1 ? cluster_rank() : 0;
    const int64_t index = int64_t(blockIdx.x >> grid.cluster_shift) * blockDim.y + threadIdx.y;
    row = {0, index};
    if (grid.inner != grid.rows) {
      row.outer = grid.rows <= 0xFFFFFFFFll ? uint32_t(index) / uint32_t(grid.inner) : index / grid.inner;
      row.inner = index - row.outer * grid.inner;
    }
    first_group = rank * blockDim.x + threadIdx.x;
    stride = blockDim.x << grid.cluster_shift;
    limit = index < grid.rows ? grid.hidden_size : 0;
  }

  FN_DEVICE bool speaks_for_row() const { return first_group == 0 && limit > 0; }
};

// ---------------------------------------------------------------- a row in registers
// What the statistics see of a row held as kept[lane][group of the lane].
template <class Kept, int kLanes, int kGroups, class Reduce>
struct RegisterSums {
  const Pack<Kept, kGroup> (&kept)[kLanes][kGroups];
  Reduce& reduce;
  int width;

  FN_DEVICE int hidden_size() const { return width; }

  template <class Term>
  FN_DEVICE float sum() {
    float lane[kLanes];
    FN_UNROLL
    for (int j = 0; j < kLanes; ++j) {
      Lane<Term> sum;
      FN_UNROLL
      for (int r = 0; r < kGroups; ++r) {
        float v[kGroup];
        widen(v, kept[j][r]);
        r == 0 ? sum.first(v) : sum.next(v);
      }
      lane[j] = sum.fold();
    }
    return reduce.fold(lane);
  }
  FN_DEVICE float sum_squares() { return sum<Squares>(); }
};

// The most groups (a power of two, at most `held`) whose reads fit into `bytes`; at least one.
FN_HOST_DEVICE constexpr int batch_of(int held, int raw_bytes, int bytes) {
  while (held > 1 && held * raw_bytes > bytes) held /= 2;
  return held;
}

// Reads in flight before the first is used: all of them, as far as a thread's registers go. Where a row is
// kept as it was read, the reads take no registers of their own.
template <class Load>
FN_HOST_DEVICE constexpr int reads_in_flight(int held, int max_threads) {
  using Raw = typename Load::template Raw<kGroup>;
  using Kept = Pack<typename Load::Kept, kGroup>;
  if (sizeof(Raw) == sizeof(Kept)) return held;
  const int registers = (max_threads > 512 ? 64 : 128) - 28;
  return batch_of(held, sizeof(Raw), registers * 4 - held * int(sizeof(Kept)));
}

// kLanes lanes a thread, kGroups groups a lane: T threads a row hold L = kLanes * T lanes.
template <class Program, int kLanes, int kGroups, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads)
    rows_in_registers(const __grid_constant__ Program program, const __grid_constant__ RowGrid grid) {
  using Load = decltype(program.load);
  using Kept = typename Load::Kept;
  using Raw = typename Load::template Raw<kGroup>;
  using MapRaw = typename decltype(program.maps)::template Raw<kGroup>;
  constexpr int kHeld = kLanes * kGroups;
  // What the maps read is asked for before the barrier as long as registers are plenty.
  constexpr bool kEarlyMaps = kHeld * (sizeof(Pack<Kept, kGroup>) + sizeof(MapRaw)) <= 160;
  constexpr int kBatch = reads_in_flight<Load>(kHeld, kMaxThreads);

  // One CTA a row is enough for narrow rows: spare them the question.
  using Reduce = RowReduce<(kGroups > 1 && kLanes == 1)>;
  const Place place(grid);
  Reduce reduce(grid.cluster, place.rank);
  auto at = [&](int j, int r) {
    const int group = place.first_group + j * place.stride + r * kMaxLanes;
    return At<Whole>{place.row, group * kGroup, {}};
  };

  wait_for_earlier_kernels();
  Pack<Kept, kGroup> kept[kLanes][kGroups];
  MapRaw map_raw[kEarlyMaps ? kLanes : 1][kEarlyMaps ? kGroups : 1];
  FN_UNROLL
  for (int first = 0; first < kHeld; first += kBatch) {
    Raw raw[kBatch];
    FN_UNROLL
    for (int i = first; i < first + kBatch; ++i) {
      const At<Whole> here = at(i / kGroups, i % kGroups);
      if (here.col < place.limit) program.load.fetch(raw[i - first], here);
    }
    if constexpr (kEarlyMaps) {
      FN_UNROLL
      for (int i = first; i < first + kBatch; ++i) {
        const At<Whole> here = at(i / kGroups, i % kGroups);
        if (here.col < place.limit) program.maps.fetch(map_raw[i / kGroups][i % kGroups], here);
      }
    }
    FN_UNROLL
    for (int i = first; i < first + kBatch; ++i) {
      const At<Whole> here = at(i / kGroups, i % kGroups);
      clear(kept[i / kGroups][i % kGroups]);
      if (here.col < place.limit) {
        program.load.keep(kept[i / kGroups][i % kGroups], raw[i - first]);
        program.load.save(kept[i / kGroups][i % kGroups], here);
      }
    }
  }

#if defined(FLASHNORM_TUNE_TRIGGER)
  let_later_kernels_start();
#endif
  RegisterSums<Kept, kLanes, kGroups, Reduce> sums{kept, reduce, grid.hidden_size};
  const auto state = program.stats.compute(sums);

  FN_UNROLL
  for (int j = 0; j < kLanes; ++j)
    FN_UNROLL
    for (int r = 0; r < kGroups; ++r) {
      forget(kept[j][r]);
      if (at(j, r).col >= place.limit) continue;
      MapRaw& maps = map_raw[kEarlyMaps ? j : 0][kEarlyMaps ? r : 0];
      if constexpr (!kEarlyMaps) program.maps.fetch(maps, at(j, r));
      float v[kGroup];
      widen(v, kept[j][r]);
      program.stats.normalize(v, state);
      program.maps.apply(v, maps);
      program.store.put(v, at(j, r));
    }
  if (place.speaks_for_row()) program.saves.put(state, place.row);
  let_later_kernels_start();
}

// ---------------------------------------------------------------- a row in shared memory, or read twice
// A thread's groups in shared memory, in pieces of 16 bytes side by side over the CTA's threads: no bank
// conflict, and no barrier, for a thread reads only what it wrote.
template <class T>
struct Staged {
  static constexpr int kPieces = sizeof(Pack<T, kGroup>) / 16;
  static_assert(sizeof(Pack<T, kGroup>) % 16 == 0, "a group is whole pieces");
  uint4* base;

  FN_DEVICE uint4& piece(int r, int i) const {
    const int threads = blockDim.x * blockDim.y;
    return base[(r * kPieces + i) * threads + threadIdx.y * blockDim.x + threadIdx.x];
  }
  FN_DEVICE void put(int r, const Pack<T, kGroup>& pack) const {
    FN_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t* w = pack.words + 4 * i;
      piece(r, i) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
  FN_DEVICE void get(int r, Pack<T, kGroup>& pack) const {
    FN_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const uint4 w = piece(r, i);
      uint32_t* to = pack.words + 4 * i;
      to[0] = w.x, to[1] = w.y, to[2] = w.z, to[3] = w.w;
    }
  }
};

template <class Access>
FN_DEVICE Access access_of(int col, const RowGrid& grid) {
  if constexpr (std::is_same_v<Access, Ragged>) {
    const int left = grid.hidden_size - col;
    return {left < kGroup ? left : kGroup, grid.width};
  } else {
    return {};
  }
}

// What the statistics see of a row that is streamed. One lane a thread, any number of groups a lane.
template <class Program, class Access>
struct StreamSums {
  using Load = decltype(Program::load);
  using Kept = typename Load::Kept;
  // Groups in flight at once: a thread's loads are issued before any of them is used.
  static constexpr int kBatch =
      batch_of(4, sizeof(typename Load::template Raw<kGroup>), std::is_same_v<Access, Whole> ? 64 : 32);

  const Program& program;
  const RowGrid& grid;
  const Place& place;
  Staged<Kept> staged;
  RowReduce<true>& reduce;

  FN_DEVICE int hidden_size() const { return grid.hidden_size; }
  FN_DEVICE At<Access> at(int r) const {
    const int col = (place.first_group + r * place.stride) * kGroup;
    return {place.row, col, access_of<Access>(col, grid)};
  }

  // The pass over the row: the only one that reads it, where it is staged.
  template <class Term>
  FN_DEVICE float sum() {
    Lane<Term> sum;
    const float zero[kGroup] = {};
    sum.first(zero);
    for (int r0 = 0; at(r0).col < place.limit; r0 += kBatch) {
      typename Load::template Raw<kGroup> raw[kBatch];
      FN_UNROLL
      for (int i = 0; i < kBatch; ++i)
        if (at(r0 + i).col < place.limit) program.load.fetch(raw[i], at(r0 + i));
      FN_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (at(r0 + i).col >= place.limit) continue;
        Pack<Kept, kGroup> kept;
        program.load.keep(kept, raw[i]);
        if (grid.staged) {
          program.load.save(kept, at(r0 + i));
          staged.put(r0 + i, kept);
        }
        float v[kGroup];
        widen(v, kept);
        r0 + i == 0 ? sum.first(v) : sum.next(v);
      }
    }
    float lane[1] = {sum.fold()};
    return reduce.fold(lane);
  }
  FN_DEVICE float sum_squares() { return sum<Squares>(); }
};

// One lane a thread: T threads a row, all CTAs of the cluster together, are the row's L lanes.
template <class Program, class Access>
__global__ void __launch_bounds__(1024)
    rows_streamed(const __grid_constant__ Program program, const __grid_constant__ RowGrid grid) {
  using Load = decltype(program.load);
  using Kept = typename Load::Kept;
  const Place place(grid);
  RowReduce<true> reduce(grid.cluster, place.rank);

  wait_for_earlier_kernels();
  StreamSums<Program, Access> sums{program, grid, place, {dynamic_shared()}, reduce};
  const auto state = program.stats.compute(sums);

  for (int r = 0; sums.at(r).col < place.limit; ++r) {
    const At<Access> at = sums.at(r);
    typename decltype(program.maps)::template Raw<kGroup> maps;
    program.maps.fetch(maps, at);
    Pack<Kept, kGroup> kept;
    if (grid.staged) {
      sums.staged.get(r, kept);
    } else {
      typename Load::template Raw<kGroup> raw;
      program.load.fetch(raw, at);
      program.load.keep(kept, raw);
      program.load.save(kept, at);
    }
    float v[kGroup];
    widen(v, kept);
    program.stats.normalize(v, state);
    program.maps.apply(v, maps);
    program.store.put(v, at);
  }
  if (place.speaks_for_row()) program.saves.put(state, place.row);
  let_later_kernels_start();
}

#endif  // FN_KERNELS

}  // namespace flashnorm
