// How the CUDA route splits a launch: a pure function of the shape and the device, so that it can be
// asked about devices that are not here. All the numbers of the route are in this file.
#pragma once

#include <cstdint>

#include "../row_forward.cuh"
#include "facts.h"

namespace flashnorm {

// How a launch is split. No result depends on it.
struct Plan {
  int threads;    // a row, in one CTA
  int rows;       // a CTA
  int cluster;    // CTAs a row
  int lanes;      // a thread, in registers; 0: streamed
  int groups;     // a lane
  bool prefetch;  // before the wait for the earlier kernel
  int abreast = 1;  // rows a thread
};

// The tiles there are. Each is a kernel to build, about 0.4 s; a plan with `lanes` is one of them.
//
// Holding maps back until the sum is known frees registers for the row, and so room for rows.
using Tiles = TileList<
    // threads, cluster, lanes, groups
    Tile<0, 1, 1, 1>,                     // a lane a thread: narrow rows, and few rows
    Tile<32, 1, 2, 1>,                    // a warp a row, without a barrier: many rows of up to 2048
    Tile<32, 1, 4, 1>,                    //
    Tile<32, 1, 8, 1>,                    //
    Tile<256, 1, 2, 1>,                   // many rows of up to 4096
    Tile<256, 1, 4, 1>,                   // of up to 8192
    Tile<512, 1, 2, 1>,                   //
    Tile<512, 1, 2, 2>,                   // of up to 16384
    Tile<512, 1, 2, 4, Whole, false>,     // of up to 32768
    Tile<512, 2, 1, 4>,                   // few rows of up to 32768
    Tile<256, 4, 1, 8, Whole, false>,     // of up to 65536
    Tile<128, 8, 1, 16, Whole, false>,    // of up to 131072
    // rows of any width and alignment
    Tile<0, 1, 1, 1, Shifted>,      //
    Tile<256, 1, 2, 1, Shifted>,    //
    Tile<256, 1, 4, 1, Shifted>,    //
    // streamed, a lane a thread: rows of more than 8192 that registers do not hold
    Tile<1024, 1, 0, 0>, Tile<128, 8, 0, 0>, Tile<1024, 1, 0, 0, Shifted>>;

// The same for programs that read much more than a row and a vector: what they read takes registers, so that no CTA has
// 1024 threads, and none of 512 four groups a thread.
using LargeTiles = TileList<
    Tile<0, 1, 1, 1, Whole, true, 1, 512>,  //
    Tile<32, 1, 2, 1>, Tile<32, 1, 4, 1>, Tile<32, 1, 8, 1>, Tile<256, 1, 2, 1>, Tile<256, 1, 4, 1>, Tile<512, 1, 2, 1>,
    Tile<256, 2, 2, 2>, Tile<256, 4, 1, 4>, Tile<256, 4, 1, 8, Whole, false>,
    // rows of any width and alignment
    Tile<0, 1, 1, 1, Shifted, true, 1, 512>, Tile<256, 1, 2, 1, Shifted>,
    // streamed; told of 512 threads, ptxas does not spill for a step of occupancy
    Tile<256, 1, 0, 0>, Tile<128, 8, 0, 0>, Tile<256, 1, 0, 0, Shifted, true, 0, 512>>;

// Further tiles for diffusion transformers, whose rows are gated, summed twice and modulated: instructions are close to
// the limit (26 an element, 400 a thread and row), so few threads a row, and none that idles at the widths in use.
using ModulatedTiles = TileList<                  //
    Tile<128, 1, 4, 1, Whole, false, 3, 128>,     // many rows of up to 3072
    Tile<128, 1, 8, 1, Whole, false, 5, 128>,     // many rows of up to 5120
    Tile<128, 1, 8, 1, Whole, false, 8, 128>>;    // of up to 8192
using SharingModulatedTiles = TileList<                //
    Tile<128, 1, 4, 1, Whole, false, 3, 128, 0, 2>,    // many rows of up to 3072
    Tile<256, 1, 4, 1, Whole, false, 3, 256, 0, 2>>;   // of up to 6144

// Further tiles for programs of many instructions a byte: 32 elements share a thread's own work.
using HeavyTiles = TileList<    //
    Tile<64, 1, 4, 1>,          // many rows of up to 2048
    Tile<128, 1, 4, 1>>;        // of up to 4096

// In their place for programs of several sums and two vectors (LayerNorm): few threads, which load the vectors late,
// leave registers for several rows on a processor.
using LayerTiles = TileList<            //
    Tile<0, 1, 2, 1, Whole, false>,     // many rows of up to 256
    Tile<0, 1, 4, 1, Whole, false>,     // and more of them
    Tile<64, 1, 4, 1>,                  // many rows of up to 2048
    Tile<128, 1, 4, 1, Whole, false>,   // of up to 4096
    Tile<128, 1, 8, 1, Whole, false, 7, 128, 6>,  // of up to 7168, six rows on a processor
    Tile<128, 1, 8, 1, Whole, false>,   // of up to 8192
    Tile<256, 1, 4, 2, Whole, false>,   // of up to 16384
    Tile<128, 4, 2, 4, Whole, false>>;  // of up to 32768
using SharingLayerTiles = TileList<                    //
    Tile<128, 1, 4, 1, Whole, false, 4, 128, 0, 2>,    // many rows of up to 4096
    Tile<128, 1, 8, 1, Whole, false, 7, 128, 5, 2>,    // of up to 7168, ten rows on a processor
    Tile<128, 1, 8, 1, Whole, false, 8, 128, 4, 2>,    // of up to 8192
    Tile<256, 1, 4, 2, Whole, false, 8, 256, 2, 2>>;   // of up to 16384

// In their place for programs whose limit is instructions: four lanes a thread, which share a thread's own work, or
// eight where fewer threads leave none of them idle.
using DenseTiles = TileList<           //
    Tile<0, 1, 4, 1>,                  // many rows of up to 256
    Tile<0, 1, 8, 1>,                  //
    Tile<16, 1, 4, 1>,                 // of up to 512
    Tile<8, 1, 8, 1>,                  //
    Tile<16, 1, 8, 1>,                 // of up to 1024
    Tile<64, 1, 4, 1>,                 // of up to 2048
    Tile<128, 1, 4, 1>,                // of up to 4096
    Tile<128, 1, 8, 1, Whole, false>>; // of up to 8192

template <class... A, class... B>
TileList<A..., B...> joined(TileList<A...>, TileList<B...>);

// Whether a program takes many instructions for a byte of memory: it reads bytes, or 16-bit elements of which it
// makes codes or needs several sums, or it finds scales of blocks (fused add to 1x128, 16384 x 7168: 271 us on 256
// threads, 276 on 512).
template <class Program>
constexpr bool is_heavy() {
  constexpr int kBytes = sizeof(typename LocatedOf<Program>::template Raw<kGroup>) / kGroup;
  constexpr bool kMuch = decltype(Program::stats)::kSums > 1 || decltype(Program::store)::kCodes;
  return kBytes == 1 || (kBytes == 2 && kMuch) || decltype(Program::store)::kBlock > kWholeRow;
}

// The groups of a block of scales are in neighbouring threads, which tiles of several sums may not have.
template <class Program>
constexpr bool is_layered() {
  return decltype(Program::stats)::kSums > 1 && decltype(Program::store)::kBlock <= kWholeRow;
}

template <class Load>
struct IsModulated : std::false_type {};
template <class... Each>
struct IsModulated<GateResidual<Each...>> : std::true_type {};
// Whether a program is one of diffusion transformers.
template <class Program>
constexpr bool is_modulated() {
  return IsModulated<decltype(Program::load)>::value;
}

template <class Load>
struct IsGated : std::false_type {};
template <class... Each>
struct IsGated<LoadGated<Each...>> : std::true_type {};

// Whether a program takes many registers: it reads more than LayerNorm with a residual, a weight and a bias, or rows and
// vectors in further places, has the row again, or computes much on the way from what is read to what is kept.
template <class Program>
constexpr bool is_large() {
  using Load = LocatedOf<Program>;
  using Maps = decltype(Program::maps);
  return int(sizeof(typename Load::template Raw<kGroup>)) + Maps::raw_bytes() > 96 || Maps::row_bytes() > 0 ||
         VecsOf<Load>::kThere || AgainOf<decltype(Program::store)>::kThere || is_modulated<Program>() ||
         IsGated<decltype(Program::load)>::value;
}

// Whether instructions are the limit of a program, so that no thread should idle at the end of a row: 0, or the threads
// that share a row at least, the neighbours of a block of scales.
template <class Program>
constexpr int least_dense() {
  constexpr int kBlock = decltype(Program::store)::kBlock;
  if (kBlock > kWholeRow) return kBlock <= 32 ? kBlock / kGroup : 0;
  return kBlock == kNoBlock && decltype(Program::maps)::dense() ? 1 : 0;
}

// Rows that a thread works on at once where there are many: two, where so much is read for all rows, in the last pass
// above all, that it pays to read it once for both (fp32 vectors in groups of 8 take L1 twice the time of their bytes,
// half a sector at a time), and the statistics leave registers for two.
template <class Program>
constexpr int rows_abreast() {
  using Load = decltype(Program::load);
  using Maps = decltype(Program::maps);
  using Store = decltype(Program::store);
  constexpr bool kMay = is_layered<Program>() && Store::kBlock == kNoBlock && !AgainOf<Store>::kThere &&
                        Maps::row_bytes() == 0;
  constexpr int kFirst = kVectorBytesOf<Load>, kLast = Maps::vector_bytes();
  constexpr bool kMuch = is_modulated<Program>() ? kLast >= 12 || kFirst + kLast >= 16
                                                 : kLast >= 8 && held_bytes<Program>() == 2;
  return kMay && kMuch ? 2 : 1;
}

// What the plan needs to know of a program.
struct ProgramFacts {
  int kept_bytes;  // of an element, between the passes
  bool heavy, layered, large, modulated;
  bool gated;  // vectors are read along with the rows
  int dense, abreast;
};
template <class Program>
constexpr ProgramFacts facts_of() {
  constexpr bool kGated = VecsOf<decltype(Program::load)>::kThere;
  return {held_bytes<Program>(),   is_heavy<Program>(), is_layered<Program>(),  is_large<Program>(),
          is_modulated<Program>(), kGated,              least_dense<Program>(), rows_abreast<Program>()};
}

template <bool kWanted, class List>
using TilesIf = std::conditional_t<kWanted, List, TileList<>>;
template <bool kHeavy, bool kLayered, bool kDense>
using FurtherTiles = std::conditional_t<kLayered, LayerTiles,
                                        std::conditional_t<kDense, DenseTiles, TilesIf<kHeavy, HeavyTiles>>>;
template <bool kSharing, bool kModulated>
using MoreTiles = decltype(joined(
    TilesIf<kModulated, ModulatedTiles>{},
    TilesIf<kSharing, std::conditional_t<kModulated, SharingModulatedTiles, SharingLayerTiles>>{}));
template <class Program>
using TilesOf = decltype(joined(
    joined(std::conditional_t<is_large<Program>(), LargeTiles, Tiles>{},
           FurtherTiles<is_heavy<Program>(), is_layered<Program>(), least_dense<Program>() != 0>{}),
    MoreTiles<(rows_abreast<Program>() > 1), is_modulated<Program>()>{}));

// A thread's part of a row stays in registers up to this many bytes, else in shared memory.
constexpr int kRegisterBytes = 256;

inline Plan one_lane(int lanes, int cta) { return {lanes, lanes < cta ? cta / lanes : 1, 1, 1, 1, false}; }

// Rows of up to 8192 elements that are not whole aligned groups.
inline Plan pick_shifted(int hidden_size) {
  const int lanes = lanes_of(hidden_size);
  if (hidden_size > kGroup * kMaxLanes) return {kMaxLanes, 1, 1, 0, 0, false};
  return lanes <= 256 ? one_lane(lanes, 256) : Plan{256, 1, 1, lanes / 256, 1, false};
}

// Few rows: latency counts. A group or two a thread, and clusters from where a CTA has not enough threads for it.
inline Plan pick_for_few(int hidden_size, bool clusters, bool few) {
  const int lanes = lanes_of(hidden_size);
  if (lanes == 512 && few) return {256, 1, 1, 2, 1, false};  // 1 x 4096: 1.24 us, 1.37 on 512 threads
  if (lanes < kMaxLanes) return one_lane(lanes, lanes <= 16 ? 64 : 32);
  if (hidden_size <= 8192) return {512, 1, 1, 2, 1, false};
  if (hidden_size <= 16384) return {512, 1, 1, 2, 2, false};
  if (!clusters) return {1024, 1, 1, 0, 0, false};
  if (hidden_size <= 32768) return {512, 1, 2, 1, 4, false};
  if (hidden_size <= 65536) return {256, 1, 4, 1, 8, false};
  if (hidden_size <= 131072) return {128, 1, 8, 1, 16, false};
  return {128, 1, 8, 0, 0, false};
}

// Many rows: bandwidth counts. Few barriers and 16 elements a thread or more, as long as a processor still holds
// more than one row.
inline Plan pick_for_many(int hidden_size, int size, bool some, bool clusters) {
  const int lanes = lanes_of(hidden_size);
  if (lanes <= 32) return one_lane(lanes, 256);
  if (lanes <= 256 && size <= 1536) return {32, 4, 1, lanes / 32, 1, false};
  if (lanes <= 256) return one_lane(lanes, 256);
  // An fp32 sum waits in twice the registers: fused add, 16384 x 4096: 133.5 us on 512 threads, 134.3 on 256.
  if (lanes == 512) return size > hidden_size ? one_lane(lanes, lanes) : Plan{256, 1, 1, 2, 1, false};
  if (size <= 6144 || (some && hidden_size <= 8192)) return {256, 1, 1, 4, 1, false};  // 1024 x 8192: 9.4, 10.1 on 512
  if (hidden_size <= 8192) return {512, 1, 1, 2, 1, false};
  if (hidden_size <= 16384) return {512, 1, 1, 2, 2, false};
  if (size <= 32768) return {512, 1, 1, 2, 4, false};
  if (!clusters) return {1024, 1, 1, 0, 0, false};
  if (hidden_size <= 32768) return {512, 1, 2, 1, 4, false};  // fused add, 4096 x 32768: 263, 365 in shared memory
  if (hidden_size <= 65536) return {256, 1, 4, 1, 8, false};  // 4096 x 65536: 258, and 528 with the addition
  return {128, 1, 8, 0, 0, false};
}

// The same for heavy programs: 32 elements a thread where there are threads enough, and no more barriers than before.
inline Plan pick_for_many_heavy(int hidden_size, int size, bool some, bool clusters) {
  const int lanes = lanes_of(hidden_size);
  if (lanes == 256 && size > 1536) return {64, 2, 1, 4, 1, false};
  if (lanes == 512) return {128, 1, 1, 4, 1, false};
  if (hidden_size > 4096 && hidden_size <= 8192) return {256, 1, 1, 4, 1, false};
  return pick_for_many(hidden_size, size, some, clusters);
}

// The same for dense programs, whose rows are on `least` threads or more.
inline Plan pick_for_many_dense(int hidden_size, int size, bool some, bool clusters, int least) {
  const int lanes = lanes_of(hidden_size), groups = (hidden_size + kGroup - 1) / kGroup;
  if (lanes >= 4 && lanes <= 128) {
    const bool eight = lanes >= 16 && groups % (lanes / 4) != 0 && groups % (lanes / 8) == 0;
    const int held = eight ? 8 : 4, threads = lanes / held;
    if (threads >= least) return {threads, 128 / threads, 1, held, 1, false};
  }
  if (hidden_size > 4096 && hidden_size <= 8192 && groups % 256 != 0) return {128, 1, 1, 8, 1, false};
  return pick_for_many_heavy(hidden_size, size, some, clusters);
}

// The same for programs of several sums; `most` says that there are more rows than run at once.
inline Plan pick_for_many_layered(int hidden_size, int size, bool some, bool most, bool heavy, bool clusters,
                                  int abreast) {
  const int lanes = lanes_of(hidden_size);
  // What a thread does for itself (the roots and quotients of a row) is half of all, at a group a thread. 32768 x 128
  // to e4m3: 6.4 us on 8 threads a row, 7.5 on 4; beyond what runs at once fewer are better.
  if (lanes >= 4 && lanes <= 32) {
    return most ? Plan{lanes / 4, 512 / lanes, 1, 4, 1, false} : Plan{lanes / 2, 256 / lanes, 1, 2, 1, false};
  }
  // Some rows: more threads (1024 x 8192: 13.3 us on 256 threads, 15.8 on 128; 512 x 4096: 4.4 and 4.8).
  // Many, two abreast, to e4m3: 16384 x 7168 97.9 us, 114.9 one by one; 32760 x 5120 160.9 and 184.4, x 3072 100.7 and 109.9.
  if (lanes == 512) return some ? Plan{256, 1, 1, 2, 1, false} : Plan{128, 1, 1, 4, 1, false, abreast};
  if (lanes == 1024 && hidden_size <= 8192) {
    return some ? Plan{256, 1, 1, 4, 1, false} : Plan{128, 1, 1, 8, 1, false, abreast};
  }
  // 8192 x 16384: 119.6 us, 148.1 one by one.
  if (hidden_size > 8192 && hidden_size <= 16384) return {256, 1, 1, 4, 2, false, some ? 1 : abreast};
  // 4096 x 32768 to e4m3: 172 us on four CTAs a row, 210 on one, whose vectors (256 KB) no L1 holds.
  if (hidden_size > 16384 && size <= 32768 && clusters) return {128, 1, 4, 2, 4, false};
  return heavy ? pick_for_many_heavy(hidden_size, size, some, clusters)
               : pick_for_many(hidden_size, size, some, clusters);
}

// The same for diffusion transformers. Figures: gate, gamma and beta in fp32, 32760 and 1920 rows of 3072: 197.8 and
// 16.0 us on 128 threads, 200.2 and 19.2 on 64; gated, 16384 x 7168: 236 on 256 threads, 252 on 128 (without a gate 257
// and 234). Two rows abreast, where vectors have biases: 199.3 us at 32760 x 3072, 227.4 one by one; at 32760 x 5120 344.4
// and 358.6 gated, 330 and 322 without a gate.
inline Plan pick_for_many_modulated(int hidden_size, int size, bool some, bool most, bool clusters,
                                    const ProgramFacts& program) {
  const int abreast = some ? 1 : program.abreast;
  if (lanes_of(hidden_size) == 512) return {128, 1, 1, 4, 1, false, hidden_size <= 3072 ? abreast : 1};
  if (hidden_size > 4096 && hidden_size <= 8192) {
    if (program.gated && !some && hidden_size <= 6144 && abreast > 1) return {256, 1, 1, 4, 1, false, abreast};
    if (program.gated && !some && hidden_size > 5120) return {256, 1, 1, 4, 1, false};
    return {128, 1, 1, 8, 1, false};
  }
  return program.layered ? pick_for_many_layered(hidden_size, size, some, most, program.heavy, clusters, 1)
                         : pick_for_many_heavy(hidden_size, size, some, clusters);
}

// The plan for rows of `hidden_size` elements. Figures from an H200 (benchmarks/tune_cuda.py), bfloat16, in rows a
// processor.
inline Plan pick_any(const DeviceFacts& device, int64_t rows, int hidden_size, int width, const ProgramFacts& program) {
  if (width < kGroup) {
    Plan plan = pick_shifted(hidden_size);
    plan.prefetch = 4 * rows <= 5 * device.processors;
    return plan;
  }
  const auto [kept_bytes, heavy, layered, large, modulated, gated, dense, abreast] = program;
  const bool clusters = device.sm >= 90;
  const bool few = 4 * rows <= 5 * device.processors;
  const int size = hidden_size * kept_bytes / 2;
  const bool some = rows <= 24 * device.processors;
  const bool most = rows > 744 * device.processors;
  const int most_few = (layered && !modulated ? 2 : 6) * device.processors;
  Plan plan = rows <= most_few ? pick_for_few(hidden_size, clusters, few)
              : modulated      ? pick_for_many_modulated(hidden_size, size, some, most, clusters, program)
              : layered        ? pick_for_many_layered(hidden_size, size, some, most, heavy, clusters, abreast)
              : dense          ? pick_for_many_dense(hidden_size, size, some, clusters, dense)
              : heavy          ? pick_for_many_heavy(hidden_size, size, some, clusters)
                               : pick_for_many(hidden_size, size, some, clusters);
  if (plan.lanes * plan.groups * kGroup * kept_bytes > kRegisterBytes) {
    plan = clusters ? Plan{128, 1, 8, 0, 0, false} : Plan{1024, 1, 1, 0, 0, false};
  }
  plan.prefetch = few;
  return plan;
}

// The plan in its place for a program that takes many registers.
inline Plan with_registers(Plan plan, bool clusters, bool shifted) {
  const int held = plan.lanes * plan.groups;
  if (shifted && (held == 0 || held == 4)) return {256, 1, 1, 0, 0, plan.prefetch};
  if (held > 8) return {128, 1, 8, 0, 0, plan.prefetch};
  if (plan.threads >= 512 && plan.cluster == 2) return {256, 1, 4, 1, 4, plan.prefetch};
  if (plan.threads >= 512 && held == 4 && clusters) return {256, 1, 2, 2, 2, plan.prefetch};
  if (plan.threads >= 512 && plan.cluster == 1 && (held == 0 || held >= 4)) return {256, 1, 1, 0, 0, plan.prefetch};
  return plan;
}

inline Plan pick(const DeviceFacts& device, int64_t rows, int hidden_size, int width, const ProgramFacts& program) {
  const Plan plan = pick_any(device, rows, hidden_size, width, program);
  return program.large ? with_registers(plan, device.sm >= 90, width < kGroup) : plan;
}

}  // namespace flashnorm
