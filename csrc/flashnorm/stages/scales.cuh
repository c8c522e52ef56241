// What stores with a scale for every block of a row share: how an amax is found and where scales go.
#pragma once

#include <type_traits>

#include "../codec4.cuh"
#include "../codec8.cuh"
#include "../fp.cuh"
#include "../vec.cuh"
#include "parts.cuh"
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

// What a store with a scale for every block of a row is given: where codes and scales go, then, as far as there are
// such operands, a number and a side output. `More_` are the element types of a second layout of scales, of the number
// in device memory and of the side output.
template <Layout kLayout, Where kNumber, bool kSide, class CodesRef, class Kept, class... More_>
class BlockOperands {
  static constexpr bool kBoth = kLayout == Layout::kBoth;
  static constexpr bool kOnDevice = kNumber == Where::kDevice;
  static_assert(sizeof...(More_) == int(kBoth) + int(kOnDevice) + int(kSide), "an element type an operand");

  using NumberElement = typename Nth<int(kBoth), More_...>::Type;
  using SideElement = typename Nth<int(kBoth) + int(kOnDevice), More_...>::Type;
  using Number =
      std::conditional_t<kOnDevice, const NumberElement*, std::conditional_t<kNumber == Where::kValue, float, Nothing>>;
  using Side = std::conditional_t<kSide, RowRef<SideElement>, Nothing>;

 public:
  // The operands in their order, then the number where it is a value.
  template <class... More>
  FN_HOST_DEVICE BlockOperands(CodesRef dst, More... more) : dst_(dst) {
    (take(more), ...);
  }

  FN_HOST_DEVICE void enter(Row row, int col) {
    dst_.enter(row, col);
    scales_.enter(row);
    if constexpr (kSide) side_.enter(row, col);
  }
  FN_HOST_DEVICE void pad(Row row, int first, int step) const { scales_.pad(row, first, step); }
  FN_HOST_DEVICE int64_t padded_rows() const { return scales_.padded_rows(); }

 protected:
  FN_HOST_DEVICE float number(float otherwise) const {
    if constexpr (kOnDevice) {
      return widened(*number_);
    } else if constexpr (kNumber == Where::kValue) {
      return number_;
    } else {
      return otherwise;
    }
  }

  template <int N, class Access>
  FN_HOST_DEVICE void put_side(const float (&v)[N], const At<Access>& at) const {
    if constexpr (kSide) {
      Pack<SideElement, N> pack;
      narrow(pack, v);
      side_.store(pack, at);
    }
  }

  CodesRef dst_;
  ScalesOut<kLayout, Kept> scales_;

 private:
  FN_HOST_DEVICE void take(const BlocksRef<Kept>& rows) { scales_.take(rows); }
  FN_HOST_DEVICE void take(const SwizzledRef<Kept>& tiles) { scales_.take(tiles); }
  FN_HOST_DEVICE void take(const RowRef<SideElement>& side) { side_ = side; }
  template <class T>
  FN_HOST_DEVICE void take(T number) {
    number_ = number;
  }

  Number number_;
  Side side_;
};

}  // namespace flashnorm
