// The store that finds its own scales, one for every block of a row. The interface is described in stages.cuh.
#pragma once

#include <type_traits>

#include "../codec8.cuh"
#include "../fp.cuh"
#include "../vec.cuh"
#include "store.cuh"

namespace flashnorm {

// Where the cap on an amax is: nowhere, in the launch, or an element in device memory.
enum class Cap { kNone, kValue, kDevice };

// |v|, as bits that compare like it: finite < infinite < NaN.
FN_HOST_DEVICE uint32_t magnitude(float v) { return bits_of(v) & 0x7FFFFFFFu; }

FN_HOST_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// A scale for every `block` elements of a row, from their amax (program/stores.py has the formula). `Given...` are the
// element types of the operands that not every such program has: a cap in device memory, and the side output.
template <class Options, class Dst, class Kept, class... Given_>
class QuantBlocks {
  struct Nothing {};
  template <class First, class...>
  struct FirstOf {
    using Type = First;
  };
  template <class First, class... Rest>
  struct LastOf {
    using Type = typename LastOf<Rest...>::Type;
  };
  template <class Last>
  struct LastOf<Last> {
    using Type = Last;
  };
  static constexpr bool kCapOnDevice = Options::kCap == Cap::kDevice;
  static_assert(sizeof...(Given_) == int(kCapOnDevice) + int(Options::kSide), "an element type for each operand");

  using CapElement = typename FirstOf<Given_..., void>::Type;
  using SideElement = typename LastOf<void, Given_...>::Type;
  using CapMember = std::conditional_t<kCapOnDevice, const CapElement*,
                                       std::conditional_t<Options::kCap == Cap::kValue, float, Nothing>>;
  using SideMember = std::conditional_t<Options::kSide, RowRef<SideElement>, Nothing>;

  static constexpr uint32_t kInfinity = 0x7F800000u, kFloatMax = 0x7F7FFFFFu;

 public:
  static constexpr bool kCodes = true;
  static constexpr int kBlock = Options::kBlock;
  static_assert(kBlock % kGroup == 0, "a block is whole groups");
  static_assert(!(Options::kRatio && Options::kUe8m0) && (Options::kUe8m0 || !Options::kPacked), "no such scale");

  struct Given {
    float cap;
  };
  struct Scale {
    float amax;     // as it is divided: floored and capped
    float scale;    // div(amax, Q); not found where codes are made with a ratio
    uint32_t byte;  // of a scale that is a power of two
    float ratio;    // what elements are multiplied with
    bool zero;      // all elements are
  };

  // The operands in their order, then the cap where it is a value.
  template <class... More>
  FN_HOST_DEVICE QuantBlocks(RowRef<Dst> dst, BlocksRef<Kept> scales, More... more) : dst_(dst), scales_(scales) {
    (take(more), ...);
  }

  FN_HOST_DEVICE void enter(Row row, int col) {
    dst_.enter(row, col);
    scales_.enter(row);
    if constexpr (Options::kSide) side_.enter(row, col);
  }

  FN_HOST_DEVICE Given read() const {
    if constexpr (kCapOnDevice) {
      return {widened(*cap_)};
    } else if constexpr (Options::kCap == Cap::kValue) {
      return {cap_};
    } else {
      return {0.0f};
    }
  }

  // `amax` as `magnitude` gives it.
  FN_HOST_DEVICE Scale scale(uint32_t amax, Given given) const {
    const uint32_t finite = amax == kInfinity ? kFloatMax : amax;
    Scale result;
    result.zero = amax == 0;
    result.amax = float_of(larger(finite, bits_of(Options::kFloor)));
    if constexpr (Options::kCap != Cap::kNone) {
      const bool stays = result.amax <= given.cap || result.amax != result.amax;
      result.amax = stays ? result.amax : given.cap;
    }
    if constexpr (Options::kRatio) {
      result.ratio = fp::div(Code<Dst>::kLargest, result.amax);
    } else {
      result.scale = fp::div(result.amax, Code<Dst>::kLargest);
      if constexpr (Options::kUe8m0) {
        result.byte = exponent(result.scale);
        result.ratio = inverse_power(result.byte);
      } else {
        result.ratio = fp::reciprocal(result.scale);
      }
    }
    return result;
  }

  template <int N, class Access>
  FN_HOST_DEVICE void put(float (&v)[N], const Scale& scale, const At<Access>& at) const {
    if constexpr (Options::kSide) {
      Pack<SideElement, N> pack;
      narrow(pack, v);
      side_.store(pack, at);
    }
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = fp::mul(v[i], scale.ratio);
    Pack<Dst, N> codes;
    narrow(codes, v);
    if (scale.zero) clear(codes);  // also the signs of zeros
    dst_.store(codes, at);
  }

  // The scale of one block of the row, counted from the row's first.
  FN_HOST_DEVICE void put_scale(const Scale& scale, Row row, int block) const {
    if constexpr (Options::kPacked) {
      uint8_t* bytes = reinterpret_cast<uint8_t*>(&scales_.at(row, block / 4));
      bytes[block % 4] = uint8_t(scale.byte);
      if (block + 1 < blocks(scales_.hidden_size)) return;
      FN_UNROLL
      for (int i = 1; i < 4; ++i) {
        if (i > block % 4) bytes[i] = 0;  // there are no such blocks
      }
    } else if constexpr (Options::kUe8m0) {
      scales_.at(row, block) = uint8_t(scale.byte);
    } else if constexpr (Options::kRatio) {
      scales_.at(row, block) = fp::div(scale.amax, Code<Dst>::kLargest);
    } else {
      scales_.at(row, block) = scale.scale;
    }
  }

  // Rows of scales that belong to no row get zeros: every `step`-th column from `first` on.
  FN_HOST_DEVICE void pad(Row row, int first, int step) const {
    for (int column = first; column < scales_.columns; column += step) scales_.at(row, column) = 0;
  }
  FN_HOST_DEVICE int64_t padded_rows() const { return scales_.rows; }

  // Columns of the scales of a row.
  static int columns(int hidden_size) { return Options::kPacked ? (blocks(hidden_size) + 3) / 4 : blocks(hidden_size); }

 private:
  FN_HOST_DEVICE static int blocks(int hidden_size) {
    return kBlock == kWholeRow ? 1 : (hidden_size + kBlock - 1) / kBlock;
  }

  // 127 + the smallest e with 2^e >= v, clamped to 0 ... 254; 0xFF for a NaN. For v >= 0.
  FN_HOST_DEVICE static uint32_t exponent(float v) {
    const uint32_t bits = bits_of(v);
    if (bits > kInfinity) return 0xFFu;
    const uint32_t up = (bits + 0x007FFFFFu) >> 23;
    return bits <= 0x00400000u ? 0u : up > 254u ? 254u : up;  // 0x00400000: 2^-127
  }
  // 2^(127 - byte), which is div(1, scale) exactly; NaN for 0xFF.
  FN_HOST_DEVICE static float inverse_power(uint32_t byte) {
    const uint32_t bits = byte == 254u ? 0x00400000u : (254u - byte) << 23;
    return float_of(byte == 0xFFu ? kNanWord : bits);
  }

  FN_HOST_DEVICE void take(RowRef<SideElement> side) { side_ = side; }
  template <class T>
  FN_HOST_DEVICE void take(T cap) {
    cap_ = cap;
  }

  RowRef<Dst> dst_;
  BlocksRef<Kept> scales_;
  CapMember cap_;
  SideMember side_;
};

}  // namespace flashnorm
