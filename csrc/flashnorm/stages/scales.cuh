// What stores with a scale for every block of a row share: how an amax is found and where scales go.
#pragma once

#include <type_traits>

#include "../codec4.cuh"
#include "../codec8.cuh"
#include "../fp.cuh"
#include "../vec.cuh"
#include "store.cuh"

namespace flashnorm {

// Where scales go: by rows, in tiles, or both (tiles first).
enum class Layout { kRows, kSwizzled, kBoth };

constexpr uint32_t kInfinityBits = 0x7F800000u, kFloatMaxBits = 0x7F7FFFFFu;

// |v|, as bits that compare like it: finite < infinite < NaN.
FN_HOST_DEVICE uint32_t magnitude(float v) { return bits_of(v) & 0x7FFFFFFFu; }

FN_HOST_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// An infinite amax counts as the largest finite number.
FN_HOST_DEVICE uint32_t finite(uint32_t amax) { return amax == kInfinityBits ? kFloatMaxBits : amax; }

struct Nothing {};

// The n-th of some types, or void.
template <int kIndex, class... Types>
struct Nth {
  using Type = void;
};
template <int kIndex, class First, class... Rest>
struct Nth<kIndex, First, Rest...> {
  using Type = typename Nth<kIndex - 1, Rest...>::Type;
};
template <class First, class... Rest>
struct Nth<0, First, Rest...> {
  using Type = First;
};

// The scales of a row, wherever they lie.
template <Layout kLayout, class T>
class ScalesOut {
  static constexpr bool kTiles = kLayout != Layout::kRows, kByRows = kLayout != Layout::kSwizzled;

 public:
  FN_HOST_DEVICE void take(const BlocksRef<T>& rows) { rows_ = rows; }
  FN_HOST_DEVICE void take(const SwizzledRef<T>& tiles) { tiles_ = tiles; }

  FN_HOST_DEVICE void enter(Row row) {
    if constexpr (kByRows) rows_.enter(row);
    if constexpr (kTiles) tiles_.enter(row);
  }

  // The scale of block `block` of `blocks`; that of the last one zeros the columns that no block has.
  FN_HOST_DEVICE void put(Row row, int block, int blocks, T value) const {
    if constexpr (kByRows) rows_.at(row, block) = value;
    if constexpr (kTiles) {
      tiles_.at(row, block) = value;
      if (block + 1 < blocks) return;
      for (int column = blocks; column < tiles_.columns; ++column) tiles_.at(row, column) = T(0);
    }
  }

  FN_HOST_DEVICE T& at(Row row, int column) const { return rows_.at(row, column); }

  // Rows of scales that belong to no row get zeros: every `step`-th column from `first` on. With both layouts only
  // tiles have such rows.
  FN_HOST_DEVICE void pad(Row row, int first, int step) const {
    if constexpr (kTiles) {
      for (int column = first; column < tiles_.columns; column += step) tiles_.at(row, column) = T(0);
    } else {
      for (int column = first; column < rows_.columns; column += step) rows_.at(row, column) = T(0);
    }
  }
  FN_HOST_DEVICE int64_t padded_rows() const {
    if constexpr (kTiles) {
      return tiles_.rows;
    } else {
      return rows_.rows;
    }
  }
  FN_HOST_DEVICE int hidden_size() const {
    if constexpr (kTiles) {
      return tiles_.hidden_size;
    } else {
      return rows_.hidden_size;
    }
  }

 private:
  std::conditional_t<kByRows, BlocksRef<T>, Nothing> rows_;
  std::conditional_t<kTiles, SwizzledRef<T>, Nothing> tiles_;
};

// The codes of a store: 8-bit ones of the destination's own type, or pairs of 4 bits.
template <bool kPairs, class Dst>
struct CodesOut {
  static constexpr float kLargest = Code<Dst>::kLargest;
  template <int N>
  using Codes = Pack<Dst, N>;
  using Ref = RowRef<Dst>;
  template <int N>
  FN_HOST_DEVICE static void encode(Codes<N>& codes, const float (&v)[N]) {
    narrow(codes, v);
  }
};
template <class Dst>
struct CodesOut<true, Dst> {
  static constexpr float kLargest = kLargestE2m1;
  template <int N>
  using Codes = Pack<uint8_t, N / 2>;
  using Ref = PairsRef<uint8_t>;
  template <int N>
  FN_HOST_DEVICE static void encode(Codes<N>& codes, const float (&v)[N]) {
    narrow_e2m1(codes, v, v);
  }
};

}  // namespace flashnorm
