// The store that finds its own scales, one for every block of a row. The interface is described in stages.cuh.
#pragma once

#include "scales.cuh"

namespace flashnorm {

using Cap = Where;  // the name that generated options have for it

// A scale for every `block` elements of a row, from their amax (program/stores.py has the formula). The number of its
// operands is the cap on an amax.
template <class Options, class Dst, class Kept, class... More_>
class QuantBlocks : public BlockOperands<Options::kLayout, Options::kCap, Options::kSide,
                                         typename CodesOut<Options::kFp4, Dst>::Ref, Kept, More_...> {
  using Out = CodesOut<Options::kFp4, Dst>;
  using Operands = typename QuantBlocks::BlockOperands;
  using Operands::dst_;
  using Operands::scales_;
  // floor(log2) of the largest finite code.
  static constexpr uint32_t kTop = Out::kLargest == 448.0f ? 8 : Out::kLargest == 6.0f ? 2 : 15;
  static constexpr uint32_t kExponent = Out::kLargest == 127.0f ? 6 : kTop;

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
    bool usual;     // neither that, nor is one infinite or NaN
  };

  using Operands::Operands;

  FN_HOST_DEVICE Given read() const { return {this->number(0.0f)}; }

  // `amax` as `magnitude` gives it.
  FN_HOST_DEVICE Scale scale(uint32_t amax, Given given) const {
    Scale result;
    result.zero = amax == 0;
    result.usual = amax - 1 < kInfinityBits - 1;
    result.amax = float_of(larger(finite(amax), bits_of(Options::kFloor)));
    if constexpr (Options::kCap != Cap::kNone) {
      const bool stays = result.amax <= given.cap || result.amax != result.amax;
      result.amax = stays ? result.amax : given.cap;
    }
    if constexpr (Options::kRatio) {
      result.ratio = fp::div(Out::kLargest, result.amax);
    } else if constexpr (Options::kUe8m0) {
      result.byte = Options::kOcp ? floored(result.amax) : raised(result.amax);
      result.ratio = inverse_power(result.byte);
    } else {
      result.scale = fp::div(result.amax, Out::kLargest);
      result.ratio = fp::reciprocal(result.scale);
    }
    return result;
  }

  template <int N, class Access>
  FN_HOST_DEVICE void put(float (&v)[N], const Scale& scale, const At<Access>& at) const {
    this->put_side(v, at);
    typename Out::template Codes<N> codes;
#if FN_FAST && !FN_NATIVE_FP4
    if constexpr (Options::kFp4) {
      const float factor = fp::mul(scale.ratio, fast::kUnit);
      if (scale.usual) {
        fast::products<Options::kOcp>(codes, v, factor);
        dst_.store(codes, at);
        return;
      }
    }
#endif
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = fp::mul(v[i], scale.ratio);
    Out::encode(codes, v);
    if (scale.zero) clear(codes);  // also the signs of zeros
    dst_.store(codes, at);
  }

  // The scale of one block of the row, counted from the row's first.
  FN_HOST_DEVICE void put_scale(const Scale& scale, Row row, int block) const {
    if constexpr (Options::kPacked) {
      uint8_t* bytes = reinterpret_cast<uint8_t*>(&scales_.at(row, block / 4));
      bytes[block % 4] = uint8_t(scale.byte);
      if (block + 1 < blocks(scales_.hidden_size())) return;
      FN_UNROLL
      for (int i = 1; i < 4; ++i) {
        if (i > block % 4) bytes[i] = 0;  // there are no such blocks
      }
    } else {
      Kept value;
      if constexpr (Options::kUe8m0) {
        value = Kept(scale.byte);
      } else if constexpr (Options::kRatio) {
        value = fp::div(scale.amax, Out::kLargest);
      } else {
        value = scale.scale;
      }
      scales_.put(row, block, blocks(scales_.hidden_size()), value);
    }
  }

  // Columns of the scales of a row.
  static int columns(int hidden_size) { return Options::kPacked ? (blocks(hidden_size) + 3) / 4 : blocks(hidden_size); }

 private:
  FN_HOST_DEVICE static int blocks(int hidden_size) {
    return kBlock == kWholeRow ? 1 : (hidden_size + kBlock - 1) / kBlock;
  }

  // 127 + the smallest e with 2^e >= div(v, Q), clamped to 0 ... 254; 0xFF for a NaN. For v >= 0.
  FN_HOST_DEVICE static uint32_t raised(float v) {
#if FN_FAST
    // Compared, not divided: v is at most Q 2^e where the quotient, rounded, is at most 2^e, because Q 2^e has neighbours
    // further away than that rounding reaches. The quotient of the next number after Q 2^-127 is a subnormal one.
    constexpr uint32_t kRest = Out::kLargest == 127.0f ? 0x7E0000u : Out::kLargest == 6.0f ? 0x400000u : 0x600000u;
    const uint32_t bits = bits_of(v);
    const uint32_t up = ((bits + 0x007FFFFFu - kRest) >> 23) - kExponent;
    return bits > kInfinityBits ? 0xFFu : bits <= (kExponent << 23) + kRest + 1 ? 0u : up;
#else
    const uint32_t bits = bits_of(fp::div(v, Out::kLargest));
    if (bits > kInfinityBits) return 0xFFu;
    const uint32_t up = (bits + 0x007FFFFFu) >> 23;
    return bits <= 0x00400000u ? 0u : up > 254u ? 254u : up;  // 0x00400000: 2^-127
#endif
  }
  // 127 + floor(log2(v)) - floor(log2(Q)), clamped to 0 ... 254; 0xFF for a NaN. For v >= 0.
  FN_HOST_DEVICE static uint32_t floored(float v) {
    const uint32_t bits = bits_of(v), exponent = bits >> 23;
    return bits > kInfinityBits ? 0xFFu : exponent > kTop ? exponent - kTop : 0u;
  }
  // 2^(127 - byte), which is div(1, scale) exactly; NaN for 0xFF.
  FN_HOST_DEVICE static float inverse_power(uint32_t byte) {
    const uint32_t bits = byte == 254u ? 0x00400000u : (254u - byte) << 23;
    return float_of(byte == 0xFFu ? kNanWord : bits);
  }
};

}  // namespace flashnorm
