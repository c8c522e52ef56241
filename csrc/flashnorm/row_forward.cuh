// The row kernel: load, statistics, maps, store.
//
// One body. Where a row waits between its two passes is a class of its own: `RegisterRow` holds it, as it
// was stored, in a number of registers that is fixed when it is compiled; `StreamedRow` serves every
// other row, in loops, from shared memory or read again. Which of them, how many threads and CTAs a row, how
// many rows a CTA: all of that is the plan's (ffi/plan.h), and no result depends on it (reduce.cuh).
//
// A CTA is blockDim.x threads a row times blockDim.y rows; a cluster of CTAs shares one row.
#pragma once

#include "access.cuh"

#include "reduce.cuh"
#include "stages.cuh"

namespace flashnorm {

// The launch's own arguments, beside the program.
struct RowGrid {
  int64_t rows;
  int64_t inner;  // rows of one outer row; equal to `rows` for [M, H]
  int hidden_size;
  bool prefetch;  // ask for the row and the weights before the wait for the earlier kernel
  bool staged;    // StreamedRow keeps the row in shared memory
};

// How a kernel divides a row, fixed when it is compiled: instructions, not bytes, are what a kernel that asks
// for all of this at run time runs out of.
template <int kThreads_, int kCluster_, int kLanes_, int kGroups_, class Access_ = Whole, bool kEarlyMaps_ = true>
struct Tile {
  static constexpr int kThreads = kThreads_;      // a row, in one CTA; 0: any power of two, blockDim.x
  static constexpr int kCluster = kCluster_;      // CTAs a row
  static constexpr int kLanes = kLanes_;          // a thread; 0: streamed, a lane a thread
  static constexpr int kGroups = kGroups_;        // a lane
  static constexpr bool kEarlyMaps = kEarlyMaps_;  // what the maps read is asked for before the barrier
  static constexpr bool kManyRows = kThreads < 128;  // a CTA may work on several rows
  using Access = Access_;
  static constexpr int kMaxCta = kThreads == 0 || kThreads > 512 ? 1024 : kThreads > 256 ? 512 : 256;
};

template <class... Each>
struct TileList {};

#if FN_KERNELS

// Where this thread stands.
struct Place {
  int64_t row;
  int row_in_cta;
  int rank;         // CTA of the cluster
  int first_group;  // the thread's first lane, and with it its first group
  int left;         // elements of the row from there on; 0 for a row past the end

  template <class Tile>
  FN_DEVICE Place(const RowGrid& grid, Tile) {
    rank = Tile::kCluster > 1 ? cluster_rank() : 0;
    row = blockIdx.x / Tile::kCluster;
    row_in_cta = 0;
    if (Tile::kManyRows) {
      row_in_cta = threadIdx.y;
      row = row * blockDim.y + row_in_cta;
    }
    first_group = rank * int(blockDim.x) + int(threadIdx.x);
    left = row < grid.rows ? grid.hidden_size - first_group * kGroup : 0;
  }

  FN_DEVICE bool speaks_for_row() const { return first_group == 0 && left > 0; }
};

// The program, with its operands moved to this thread's place: all else is a constant offset from there.
template <class Program>
FN_DEVICE Program entered(Program program, const RowGrid& grid, const Place& place) {
  Row row{0, place.row};
  if (grid.inner != grid.rows) {
    row.outer =
        grid.rows <= 0xFFFFFFFFll ? uint32_t(place.row) / uint32_t(grid.inner) : uint64_t(place.row) / grid.inner;
    row.inner = place.row - row.outer * grid.inner;
  }
  enter(program, row, place.first_group * kGroup);
  return program;
}

// A thread's groups, `col` from its first.
template <class Access>
FN_DEVICE At<Access> at_group(const Place& place, int col) {
  if constexpr (std::is_same_v<Access, Shifted>) {
    return {{0, 0}, col, {place.left - col, place.first_group * kGroup + col}};
  } else {
    return {{0, 0}, col, {}};
  }
}

// Whether to touch a group: all of a warp's threads do where an access is the work of a warp.
template <class Access>
FN_DEVICE bool reaches(const Place& place, int col) {
  return std::is_same_v<Access, Shifted> || col < place.left;
}

// ---------------------------------------------------------------- a row in registers
// The most groups (a power of two, at most `held`) whose reads fit into `bytes`; at least one.
FN_HOST_DEVICE constexpr int batch_of(int held, int raw_bytes, int bytes) {
  while (held > 1 && held * raw_bytes > bytes) held /= 2;
  return held;
}

// Makes the compiler forget what it derived from a pack, so that the second pass widens it again
// instead of carrying twice the registers over the barrier.
template <class T, int N>
FN_DEVICE void forget(Pack<T, N>& pack) {
  FN_UNROLL
  for (int i = 0; i < Pack<T, N>::kWords; ++i) asm volatile("" : "+r"(pack.words[i]));
}

// kLanes lanes a thread, kGroups groups a lane: T threads a row hold L = kLanes * T lanes.
template <class Program, class Tile, class Reduce>
class RegisterRow {
  using Load = decltype(Program::load);
  using Kept = typename Load::Kept;
  using Raw = typename Load::template Raw<kGroup>;
  using MapRaw = typename decltype(Program::maps)::template Raw<kGroup>;
  using Access = typename Tile::Access;

  static constexpr int kLanes = Tile::kLanes, kGroups = Tile::kGroups, kHeld = kLanes * kGroups;
  // Reads in flight before the first is used: all of them, as far as a thread's registers go. Where a row is
  // kept as it was read, the reads take no registers of their own.
  static constexpr int kRegisters = 65536 / Tile::kMaxCta > 128 ? 128 : 65536 / Tile::kMaxCta;
  static constexpr int kSpare = 4 * (kRegisters - 28) - kHeld * int(sizeof(Pack<Kept, kGroup>));
  static constexpr int kReads =
      sizeof(Raw) == sizeof(Pack<Kept, kGroup>) ? kHeld : batch_of(kHeld, sizeof(Raw), kSpare);
  // Maps are read in batches, one ahead of its use: a store keeps every later read behind it.
  static constexpr int kMapReads = Tile::kEarlyMaps ? kHeld : batch_of(kHeld, sizeof(MapRaw), 64);
  static constexpr int kMapBatches = kHeld / kMapReads;

 public:
  FN_DEVICE RegisterRow(const Program& program, const RowGrid& grid, const Place& place, Reduce& reduce)
      : program_(program), place_(place), reduce_(reduce), hidden_size_(grid.hidden_size) {}

  FN_DEVICE void touch() const {
    FN_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      Raw raw;
      MapRaw map_raw;
      if (col(i) >= place_.left) continue;
      program_.load.fetch(raw, At<Touch>{{0, 0}, col(i), {}});
      program_.maps.fetch(map_raw, At<Touch>{{0, 0}, col(i), {}});
    }
  }

  FN_DEVICE void read() {
    FN_UNROLL
    for (int first = 0; first < kHeld; first += kReads) {
      Raw raw[kReads] = {};
      FN_UNROLL
      for (int i = 0; i < kReads; ++i) {
        if (reaches<Access>(place_, col(first + i))) program_.load.fetch(raw[i], at(first + i));
      }
      if (Tile::kEarlyMaps && first == 0) read_maps(0);
      FN_UNROLL
      for (int i = 0; i < kReads; ++i) {
        program_.load.keep(kept_[first + i], raw[i]);
        if (reaches<Access>(place_, col(first + i))) program_.load.save(kept_[first + i], at(first + i));
      }
    }
    if (!Tile::kEarlyMaps) read_maps(0);
  }

  FN_DEVICE int hidden_size() const { return hidden_size_; }
  FN_DEVICE float sum_squares() { return sum<Squares>(); }

  template <class Term>
  FN_DEVICE float sum() {
    float lane[kLanes];
    FN_UNROLL
    for (int j = 0; j < kLanes; ++j) {
      Lane<Term> sum;
      FN_UNROLL
      for (int r = 0; r < kGroups; ++r) {
        float v[kGroup];
        widen(v, kept_[r * kLanes + j]);
        r == 0 ? sum.first(v) : sum.next(v);
      }
      lane[j] = sum.fold();
    }
    return reduce_.fold(lane);
  }

  // The second pass: finish(v, maps, at) for every group.
  template <class Finish>
  FN_DEVICE void finish(const Finish& finish) {
    FN_UNROLL
    for (int batch = 0; batch < kMapBatches; ++batch) {
      if (batch + 1 < kMapBatches) read_maps(batch + 1);
      FN_UNROLL
      for (int i = batch * kMapReads; i < (batch + 1) * kMapReads; ++i) {
        if (kHeld > 2) forget(kept_[i]);
        if (!reaches<Access>(place_, col(i))) continue;
        float v[kGroup];
        widen(v, kept_[i]);
        finish(v, maps_[batch % 2][i % kMapReads], at(i));
      }
    }
  }

 private:
  // Groups are numbered as they lie: lane j of the thread has groups j, j + kLanes, ...
  FN_DEVICE static constexpr int col(int i) {
    // Where blockDim.x is not known, a thread has one group.
    return i * Tile::kThreads * Tile::kCluster * kGroup;
  }
  FN_DEVICE At<Access> at(int i) const { return at_group<Access>(place_, col(i)); }

  FN_DEVICE void read_maps(int batch) {
    FN_UNROLL
    for (int i = 0; i < kMapReads; ++i) {
      const int group = batch * kMapReads + i;
      if (reaches<Access>(place_, col(group))) program_.maps.fetch(maps_[batch % 2][i], at(group));
    }
  }

  const Program& program_;
  const Place& place_;
  Reduce& reduce_;
  int hidden_size_;
  Pack<Kept, kGroup> kept_[kHeld];
  MapRaw maps_[kMapBatches > 1 ? 2 : 1][kMapReads];
};

// ---------------------------------------------------------------- a row in shared memory, or read twice
// One lane a thread, any number of groups a lane. In shared memory a thread reads only what it put there,
// so there is no barrier.
template <class Program, class Tile, class Reduce>
class StreamedRow {
  using Load = decltype(Program::load);
  using Kept = typename Load::Kept;
  using Raw = typename Load::template Raw<kGroup>;
  using MapRaw = typename decltype(Program::maps)::template Raw<kGroup>;
  using Access = typename Tile::Access;
  static constexpr int kStride = Tile::kThreads * Tile::kCluster * kGroup;
  // Groups read at once, and whether maps are read a batch ahead: a shifted access takes all registers there are.
  static constexpr bool kAhead = !std::is_same_v<Access, Shifted>;
  static constexpr int kBatch = kAhead ? batch_of(4, sizeof(Raw), 64) : 1;

 public:
  FN_DEVICE StreamedRow(const Program& program, const RowGrid& grid, const Place& place, Reduce& reduce)
      : program_(program),
        place_(place),
        reduce_(reduce),
        hidden_size_(grid.hidden_size),
        staged_(grid.staged),
        rounds_((grid.hidden_size + kStride - 1) / kStride) {}

  FN_DEVICE void touch() const {
    for (int r = 0; r * kStride < place_.left; ++r) {
      Raw raw;
      MapRaw map_raw;
      program_.load.fetch(raw, At<Touch>{{0, 0}, r * kStride, {}});
      program_.maps.fetch(map_raw, At<Touch>{{0, 0}, r * kStride, {}});
    }
  }

  FN_DEVICE void read() {
    if (staged_) stage();
    if (kAhead) read_maps(ahead_, 0);
    await_copies();
  }

  FN_DEVICE int hidden_size() const { return hidden_size_; }
  FN_DEVICE float sum_squares() { return sum<Squares>(); }

  template <class Term>
  FN_DEVICE float sum() {
    Lane<Term> sum;
    const float zero[kGroup] = {};
    sum.first(zero);
    for (int first = 0; first < rounds_; first += kBatch) {
      Raw raw[kBatch];
      FN_UNROLL
      for (int i = 0; i < kBatch; ++i) get(raw[i], first + i);
      FN_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if ((first + i) * kStride >= place_.left) continue;
        float v[kGroup];
        Pack<Kept, kGroup> kept;
        program_.load.keep(kept, raw[i]);
        widen(v, kept);
        first + i == 0 ? sum.first(v) : sum.next(v);
      }
    }
    float lane[1] = {sum.fold()};
    return reduce_.fold(lane);
  }

  // The second pass: finish(v, maps, at) for every group.
  template <class Finish>
  FN_DEVICE void finish(const Finish& finish) {
    for (int first = 0; first < rounds_; first += kBatch) {
      MapRaw maps[kBatch];
      if (!kAhead) read_maps(ahead_, first);
      FN_UNROLL
      for (int i = 0; i < kBatch; ++i) maps[i] = ahead_[i];
      if (kAhead) read_maps(ahead_, first + kBatch);
      FN_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (!reaches<Access>(place_, (first + i) * kStride)) continue;
        Raw raw;
        float v[kGroup];
        Pack<Kept, kGroup> kept;
        get(raw, first + i);
        program_.load.keep(kept, raw);
        program_.load.save(kept, at(first + i));
        widen(v, kept);
        finish(v, maps[i], at(first + i));
      }
    }
  }

 private:
  FN_DEVICE At<Access> at(int r) const { return at_group<Access>(place_, r * kStride); }

  FN_DEVICE void stage() const {
    for (int r = 0; r * kStride < place_.left; ++r) {
      if constexpr (std::is_same_v<Access, Shifted>) {
        Raw raw;
        program_.load.fetch(raw, at(r));
        slot(r) = raw;
      } else {
        program_.load.fetch(slot(r), At<Async>{{0, 0}, r * kStride, {}});
      }
    }
  }

  FN_DEVICE Raw& slot(int r) const {
    return reinterpret_cast<Raw*>(dynamic_shared())[r * Tile::kThreads + int(threadIdx.x)];
  }
  FN_DEVICE void get(Raw& raw, int r) const {
    if (r * kStride >= place_.left) return;
    if (staged_) {
      raw = slot(r);
    } else {
      program_.load.fetch(raw, at(r));
    }
  }
  FN_DEVICE void read_maps(MapRaw (&maps)[kBatch], int first) const {
    FN_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      if ((first + i) * kStride < place_.left) program_.maps.fetch(maps[i], at(first + i));
    }
  }

  const Program& program_;
  const Place& place_;
  Reduce& reduce_;
  int hidden_size_;
  bool staged_;
  int rounds_;
  MapRaw ahead_[kBatch];
};

// ---------------------------------------------------------------- the kernel
template <class Program, class Tile>
__global__ void __launch_bounds__(Tile::kMaxCta)
    row_forward(const __grid_constant__ Program launched, const __grid_constant__ RowGrid grid) {
  using Reduce = RowReduce<Tile::kThreads, Tile::kCluster>;
  using HeldRow = std::conditional_t<Tile::kLanes != 0, RegisterRow<Program, Tile, Reduce>,
                                     StreamedRow<Program, Tile, Reduce>>;
  const Place place(grid, Tile{});
  const Program program = entered(launched, grid, place);
  Reduce reduce(place.row_in_cta, place.rank);
  HeldRow row(program, grid, place, reduce);

  if (grid.prefetch) row.touch();
  wait_for_earlier_kernels();
  let_later_kernels_start();

  row.read();
  const auto state = program.stats.compute(row);
  row.finish([&](auto& v, const auto& maps, const auto& at) {
    program.stats.normalize(v, state);
    program.maps.apply(v, maps);
    program.store.put(v, at);
  });
  if (place.speaks_for_row()) program.saves.put(state, Row{0, 0});
}

#endif  // FN_KERNELS

}  // namespace flashnorm
