// The canonical sum of a row on a CPU (arithmetic.md, "Rows"): its order of additions, at vector speed.
//
// The order asks for horizontal sums: the 8 positions of a group, then 32 lanes, then the blocks. Done
// group by group that is slow; but a fold (simd.h) does one level for two vectors at once, and after
// three levels one vector holds W finished lanes. So the sum costs about two shuffles for a vector of
// elements, and the elements never leave the registers.
#pragma once

#include "simd.h"

namespace flashnorm {
namespace cpu {

constexpr int kBlockLanes = 32;                      // lanes that are halved together first
constexpr int kMaxLanes = 1024;
constexpr int kMaxBlocks = kMaxLanes / kBlockLanes;
constexpr int kBlock = kBlockLanes * kGroup;         // elements of one round of a block
constexpr int kRound = kMaxLanes * kGroup;           // elements of one round of all lanes

// What is summed: t of the first round, and how a later round joins.
struct Squares {
  FN_HOST_DEVICE static V first(V h) { return h * h; }
  FN_HOST_DEVICE static V join(V sum, V h) { return fma(h, h, sum); }
};
struct Values {
  FN_HOST_DEVICE static V first(V h) { return h; }
  FN_HOST_DEVICE static V join(V sum, V h) { return sum + h; }
};

// One block of 32 lanes, after its step s = 16 and, for narrow vectors, 8 and 4: W lane sums. `term(i)`
// gives the i-th vector of the block's 256 elements. Which lane lies where is what `fold_lanes` undoes. Lanes
// that do not exist must leave a sum as it is: they are -0, since adding +0 makes +0 of -0.
template <class Term>
FN_HOST_DEVICE V fold_block(Term&& term, int lanes = kBlockLanes) {
  constexpr int kParts = kBlockLanes / W;
  V part[kParts];
#pragma GCC unroll 2
  for (int p = 0; p < kParts; ++p) {
    if (p * W >= lanes) {
      part[p] = splat(-0.0f);
      continue;
    }
    V t[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) t[i] = term(p * 8 + i);
    // Positions: bit 2, then 1, then 0 of the element's place in its group.
    const V a = fold_bit1(fold_bit2(t[0], t[1]), fold_bit2(t[2], t[3]));
    const V b = fold_bit1(fold_bit2(t[4], t[5]), fold_bit2(t[6], t[7]));
    part[p] = fold_bit0(a, b);
  }
#pragma GCC unroll 4
  for (int s = kParts / 2; s >= 1; s /= 2) {
#pragma GCC unroll 4
    for (int p = 0; p < s; ++p) part[p] = part[p] + part[p + s];
  }
  return part[0];
}

// The last log2(W) steps inside a block, for W blocks at once. The bits of a vector's index are now, from the
// top, lanes 1 0 3 2 (W = 16), 0 2 1 (8) or 1 0 (4): the folds take the lanes in falling order and leave the
// number of the block, in natural order. fold(pair) applies a fold to all pairs of vectors there are.
template <class Fold>
FN_HOST_DEVICE void fold_lanes(Fold&& fold) {
  fold([](V a, V b) { return fold_bit1(a, b); });
  fold([](V a, V b) { return fold_bit0(a, b); });
#if FN_CPU_WIDTH == 16
  fold([](V a, V b) { return fold_bit3(a, b); });
#endif
#if FN_CPU_WIDTH >= 8
  fold([](V a, V b) { return fold_bit2(a, b); });
#endif
}

// The rest, for a row of one block.
FN_HOST_DEVICE float fold_only_block(V v) {
  fold_lanes([&](auto pair) __attribute__((always_inline)) { v = pair(v, v); });
  return v[0];
}

// The rest, for `blocks` blocks, a power of two above 1. `sums` is overwritten.
inline __attribute__((noinline)) float fold_blocks(V* sums, int blocks) {
  int left = blocks;
  fold_lanes([&](auto pair) __attribute__((always_inline)) {
    // Where blocks run out, a leftover is folded that ends up in the place of a block that does not exist.
    left = left > 1 ? left / 2 : 1;
    for (int i = 0; i < left; ++i) sums[i] = pair(sums[2 * i], sums[2 * i + 1]);
  });
  for (int s = blocks / W / 2; s >= 1; s /= 2) {
    for (int i = 0; i < s; ++i) sums[i] = sums[i] + sums[i + s];
  }
  V v = sums[0];
#if FN_CPU_WIDTH == 16
  if (blocks > 8) v = fold_bit3(v, v);
#endif
#if FN_CPU_WIDTH >= 8
  if (blocks > 4) v = fold_bit2(v, v);
#endif
  if (blocks > 2) v = fold_bit1(v, v);
  return fold_bit0(v, v)[0];
}

// put(i, h) for the vectors of the elements [begin, end), where i counts from begin: whole steps, and a
// last one filled up with +0.
template <class Row, class Put>
FN_HOST_DEVICE void each_step(const Row& row, int begin, int end, Put&& put) {
  float h[kStep];
  int col = begin;
  for (; col + kStep <= end; col += kStep) {
    row.whole(h, col);
    for (int i = 0; i < kStep; i += W) put(col - begin + i, load(h + i));
  }
  if (col >= end) return;
  row.part(h, col, end - col);
  for (int i = 0; i < kStep; i += W) put(col - begin + i, load(h + i));
}

// Rows wider than one round: every lane first sums its groups, in order, in memory.
template <class Terms, class Row>
__attribute__((noinline)) float sum_rounds(const Row& row, int hidden) {
  alignas(64) float terms[kRound + kStep];  // the compiler does not see that a round is whole steps
  alignas(64) V sums[kMaxBlocks];
  each_step(row, 0, kRound, [&](int i, V h) { store(terms + i, Terms::first(h)); });
  for (int base = kRound; base < hidden; base += kRound) {
    const int end = hidden - base < kRound ? hidden : base + kRound;
    each_step(row, base, end, [&](int i, V h) { store(terms + i, Terms::join(load(terms + i), h)); });
    // The elements that the last round lacks are +0. Adding one changes nothing but a sum of -0.
    for (int i = (end - base + kStep - 1) / kStep * kStep; i < kRound; i += W) {
      store(terms + i, Terms::join(load(terms + i), V{}));
    }
  }
  for (int b = 0; b < kMaxBlocks; ++b) {
    sums[b] = fold_block([&](int i) { return load(terms + b * kBlock + i * W); });
  }
  return fold_blocks(sums, kMaxBlocks);
}

// A block that the row does not fill: its elements from `begin` on, then +0. A row of one block has `lanes`
// of its 32 lanes. A function of its own: copies of it in every sum were half of what a unit took to compile.
template <class Terms, class Row>
__attribute__((noinline)) V fold_last_block(const Row& row, int begin, int hidden, int lanes) {
  constexpr int kVectors = kStep / W;
  float h[kStep];
  const auto term = [&](int i) __attribute__((always_inline)) {
    const int col = begin + i * W, first = begin + i / kVectors * kStep;
    if (col >= begin + lanes * kGroup) return splat(-0.0f);
    if (first >= hidden) return V{};
    if (i % kVectors == 0) {
      if (first + kStep <= hidden) {
        row.whole(h, first);
      } else {
        row.part(h, first, hidden - first);
      }
    }
    V t = Terms::first(load(h + i % kVectors * W));
    if (W > kGroup && lanes == 1) {
      for (int j = kGroup; j < W; ++j) t[j] = -0.0f;  // half of the only vector
    }
    return t;
  };
  return fold_block(term, lanes);
}

// sum(t) over a row. `row.whole(h, col)` gives the kStep elements from col on, `row.part(h, col, count)`
// the first `count` of them and +0 for the rest.
template <class Terms, class Row>
FN_HOST_DEVICE float canonical_sum(const Row& row, int hidden) {
  if (hidden > kRound) return sum_rounds<Terms>(row, hidden);
  // Every lane has one group: nothing accumulates, and terms go from the row into the folds.
  const int groups = (hidden + kGroup - 1) / kGroup;
  int lanes = 1;
  while (lanes < groups) lanes *= 2;
  const int blocks = lanes / kBlockLanes;
  if (blocks <= 1) return fold_only_block(fold_last_block<Terms>(row, 0, hidden, lanes));
  alignas(64) V sums[kMaxBlocks];
  int done = 0;
  for (; (done + 1) * kBlock <= hidden; ++done) {
    float h[kStep];
    sums[done] = fold_block([&](int i) __attribute__((always_inline)) {
      constexpr int kVectors = kStep / W;
      if (i % kVectors == 0) row.whole(h, done * kBlock + i * W);
      return Terms::first(load(h + i % kVectors * W));
    });
  }
  if (done * kBlock < hidden) {
    sums[done] = fold_last_block<Terms>(row, done * kBlock, hidden, kBlockLanes);
    ++done;
  }
  for (; done < blocks; ++done) sums[done] = V{};
  return fold_blocks(sums, blocks);
}

}  // namespace cpu
}  // namespace flashnorm
