// The launch's own arguments, the shape of a kernel, and where a thread stands.
//
// A CTA is blockDim.x threads a row times blockDim.y rows; a cluster of CTAs shares one row.
#pragma once

#include "../access.cuh"

#include "../reduce.cuh"
#include "../stages.cuh"

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
template <int kThreads_, int kCluster_, int kLanes_, int kGroups_, class Access_ = Whole, bool kEarlyMaps_ = true,
          int kPresent_ = kLanes_ * kGroups_, int kMaxCta_ = 0, int kResident_ = 0, int kAbreast_ = 1>
struct Tile {
  static constexpr int kThreads = kThreads_;      // a row, in one CTA; 0: any power of two, blockDim.x, of which
                                                  // several lanes a thread are at most 32 lanes
  static constexpr int kCluster = kCluster_;      // CTAs a row
  static constexpr int kLanes = kLanes_;          // a thread; 0: streamed
  static constexpr int kGroups = kGroups_;        // a lane
  static constexpr int kPresent = kPresent_;      // groups of a thread that rows have at most
  static constexpr bool kEarlyMaps = kEarlyMaps_;  // what the maps read is asked for before the barrier
  static constexpr bool kManyRows = kThreads < 128 || (kLanes > 0 && kMaxCta_ > kThreads);  // a CTA may work on several rows
  // CTAs that a processor should have registers for, where rows leave room for that; 0: no matter.
  static constexpr int kResident = kResident_;
  // Rows that a thread works on at once, one below the other: what maps and loads read besides rows serves them all.
  static constexpr int kAbreast = kAbreast_;
  using Access = Access_;
  static constexpr bool kNarrow = kThreads == 0 && kLanes > 1;
  static constexpr int kMaxCta =
      kMaxCta_ > 0 ? kMaxCta_ : (kThreads == 0 && !kNarrow) || kThreads > 512 ? 1024 : kThreads > 256 ? 512 : 256;
  static_assert(kPresent == kLanes * kGroups || kGroups == 1, "a lane's groups are all there or none is");
  static_assert(kAbreast == 1 || (kLanes > 0 && kThreads >= 32), "in registers, by whole warps");
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
    row *= Tile::kAbreast;
    first_group = rank * int(blockDim.x) + int(threadIdx.x);
    left = left_below(0, grid);
  }
  // What `left` is in the r-th row below.
  FN_DEVICE int left_below(int r, const RowGrid& grid) const {
    return row + r < grid.rows ? grid.hidden_size - first_group * kGroup : 0;
  }

  FN_DEVICE bool speaks_for_row() const { return first_group == 0 && left > 0; }
  // The same, for the r-th row below.
  FN_DEVICE bool speaks_for(int r, const RowGrid& grid) const { return first_group == 0 && row + r < grid.rows; }
};

// The program, with its operands moved to this thread's place: all else is a constant offset from there.
template <class Program>
FN_DEVICE Program entered(Program program, const RowGrid& grid, const Place& place) {
  Row row{0, place.row, place.row};
  if (grid.inner != grid.rows) {
    row.outer =
        grid.rows <= 0xFFFFFFFFll ? uint32_t(place.row) / uint32_t(grid.inner) : uint64_t(place.row) / grid.inner;
    row.inner = place.row - row.outer * grid.inner;
  }
  enter(program, row, place.first_group * kGroup);
  return program;
}

// A thread's group that lies `col` elements from its first.
template <class Access>
FN_DEVICE At<Access> at_group(const Place& place, int left, int col) {
  if constexpr (std::is_same_v<Access, Shifted>) {
    return {{0, 0}, col, {left - col, place.first_group * kGroup + col}};
  } else if constexpr (std::is_same_v<Access, Gated>) {
    return {{0, 0}, col, {col < left}};
  } else {
    return {{0, 0}, col, {}};
  }
}

// Whether to touch a group: all of a warp's threads do where an access is the work of a warp.
template <class Access>
FN_DEVICE bool reaches(int left, int col) {
  return std::is_same_v<Access, Shifted> || std::is_same_v<Access, Gated> || col < left;
}

// Elements of the group that the row has: all or none, unless rows have any width.
template <class Access>
FN_DEVICE int elements_of(int left, int col) {
  if constexpr (std::is_same_v<Access, Shifted>) {
    return left - col;
  } else {
    return col < left ? kGroup : 0;
  }
}

// How a pass accesses groups: with `kTogether`, all threads of a warp come along to the end.
template <class Access, bool kTogether>
using PassAccess = std::conditional_t<kTogether && std::is_same_v<Access, Whole>, Gated, Access>;

// The most groups (a power of two, at most `held`) whose reads fit into `bytes`; at least one.
FN_HOST_DEVICE constexpr int batch_of(int held, int raw_bytes, int bytes) {
  while (held > 1 && held * raw_bytes > bytes) held /= 2;
  return held;
}

// The load stage once the row's place is known.
template <class Program>
using LocatedOf = decltype(std::declval<decltype(Program::load)>().locate(Row{}, true));

// Bytes of an element that wait between the passes: of the row with what the maps read beside it, or of the row as it
// is stored, which comes in its place.
template <class Program>
constexpr int held_bytes() {
  using Again = typename AgainOf<decltype(Program::store)>::Type;
  constexpr int kFirst = int(sizeof(Pack<typename LocatedOf<Program>::Kept, kGroup>)) + decltype(Program::maps)::row_bytes();
  if constexpr (std::is_void_v<Again>) {
    return kFirst / kGroup;
  } else {
    return (kFirst > int(sizeof(Pack<Again, kGroup>)) ? kFirst : int(sizeof(Pack<Again, kGroup>))) / kGroup;
  }
}

// What a store that has the row again holds and reads of a group.
template <class Store, bool kThere = AgainOf<Store>::kThere>
struct NextOf {
  using Again = Nothing;
  using Raw = Nothing;
};
template <class Store>
struct NextOf<Store, true> {
  using Again = Pack<typename Store::Again, kGroup>;
  using Raw = typename Store::template Raw<kGroup>;
  template <class Access>
  FN_DEVICE static void fetch(const Store& store, Raw& raw, const At<Access>& at) {
    store.fetch(raw, at);
  }
};

// Asks for what will be read of a group.
template <class Program>
FN_DEVICE void touch_group(const Program& program, int col) {
  using Maps = decltype(Program::maps);
  using Store = decltype(Program::store);
  const At<Touch> at{{0, 0}, col, {}};
  typename Maps::template Raw<kGroup> raw;
  typename Maps::template Rows<kGroup> rows;
  program.load.touch(at);
  program.maps.fetch(raw, at);
  program.maps.fetch_rows(rows, at);
  if constexpr (AgainOf<Store>::kThere) {
    typename NextOf<Store>::Raw next;
    program.store.fetch(next, at);
  }
}

// What was read for the maps of a group.
template <class Maps>
struct MapReads {
  const typename Maps::template Raw<kGroup>& raw;
  const typename Maps::template Rows<kGroup>& rows;
};

#endif  // FN_KERNELS

}  // namespace flashnorm
