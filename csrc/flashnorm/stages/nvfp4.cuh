// e2m1 codes with an e4m3 scale for every block. The interface is described in stages.cuh.
#pragma once

#include "scales.cuh"

namespace flashnorm {

using GlobalScale = Where;  // the name that generated options have for it; nowhere: 1

// sf = e4m3(min(mul(G, div(amax, 6)), 448)); code = e2m1(div(mul(y, G), f(sf))). program/stores.py has the special
// values. The number of its operands is the global scale.
template <class Options, class Dst, class Kept, class... More_>
class QuantNvfp4
    : public BlockOperands<Options::kLayout, Options::kGlobalScale, Options::kSide, PairsRef<uint8_t>, Kept, More_...> {
  using Operands = typename QuantNvfp4::BlockOperands;
  using Operands::dst_;
  using Operands::scales_;

 public:
  static constexpr bool kCodes = true;
  static constexpr int kBlock = Options::kBlock;
  static_assert(kBlock % kGroup == 0, "a block is whole groups");

  struct Given {
    float gain;
  };
  struct Scale {
    uint32_t byte;
    float value;    // of the byte
    float inverse;  // div(1, value); with `usual`, a little less, and
    float rest;     // what it lacks
    float gain;
    bool zero, nan;  // all codes are +0, or all 7
    bool usual;      // neither, and no quotient is far beyond the largest code
  };

  using Operands::Operands;

  FN_HOST_DEVICE Given read() const { return {this->number(1.0f)}; }

  FN_HOST_DEVICE Scale scale(uint32_t amax, Given given) const {
    float wanted = sixth(float_of(finite(amax)), given.gain);
    if constexpr (Options::kGlobalScale != GlobalScale::kNone) wanted = fp::mul(given.gain, wanted);
    Scale result;
    // The quotient of a normal scale that was not too large is at most 6.4.
    result.usual = FN_FAST && wanted >= 0x1p-6f && wanted <= 464.0f && amax < kInfinityBits;
    wanted = wanted > Code<e4m3>::kLargest ? Code<e4m3>::kLargest : wanted;  // a NaN stays
    const float four[4] = {wanted, 0.0f, 0.0f, 0.0f};
    Pack<e4m3, 4> code;
    narrow(code, four);
    result.byte = code.words[0] & 0xFFu;
    result.gain = given.gain;
    result.zero = amax == 0 || result.byte == 0;
    result.nan = result.byte == 0x7Fu && !result.zero;
#if FN_FAST
    result.value = fp::mul(float_of(result.byte << 20), 0x1p120f);  // of no meaning for NaN
    const float inverse = fp::approximate_reciprocal(result.value);
    result.inverse = fp::mul(inverse, kLess * kUnit);
    result.rest = fp::mul(inverse, fp::fma(-result.value, result.inverse, kUnit));
#else
    result.value = soft::Float8<e4m3>::widen(result.byte);
    result.inverse = fp::reciprocal(result.value);
    result.rest = 0.0f;
#endif
    return result;
  }

  template <int N, class Access>
  FN_HOST_DEVICE void put(float (&v)[N], const Scale& scale, const At<Access>& at) const {
    this->put_side(v, at);
    if constexpr (Options::kGlobalScale != GlobalScale::kNone) {
      FN_UNROLL
      for (int i = 0; i < N; ++i) v[i] = fp::mul(v[i], scale.gain);
    }
    Pack<uint8_t, N / 2> codes;
    encode(codes, v, scale);
    dst_.store(codes, at);
  }

  FN_HOST_DEVICE void put_scale(const Scale& scale, Row row, int block) const {
    scales_.put(row, block, scales_.hidden_size() / kBlock, Kept(scale.byte));
  }

  static int columns(int hidden_size) { return hidden_size / kBlock; }

 private:
#if FN_NATIVE_FP4 || !FN_FAST
  static constexpr float kUnit = 1.0f;
#else
  static constexpr float kUnit = fast::kUnit;
#endif
  static constexpr float kLess = 1.0f - 0x1p-11f;  // so that what the inverse lacks is positive

  // div(a, 6), as far as a scale can tell. On the device by the inverse, with one correction, which may miss a tie of
  // subnormal quotients: they all make a scale of 0, but with a gain of 2^100 or more.
  FN_HOST_DEVICE static float sixth(float a, float gain) {
#if FN_FAST
    constexpr float kSixth = 1.0f / 6.0f;
    if (Options::kGlobalScale != GlobalScale::kNone && !(gain < 0x1p100f)) return fp::div(a, kLargestE2m1);
    const float near = fp::mul(a, kSixth);
    return fp::fma(fp::fma(near, -kLargestE2m1, a), kSixth, near);
#else
    return fp::div(a, kLargestE2m1);
#endif
  }

  // e2m1 of div(v, scale). On the device by an inverse of it in two parts, which gives the codes of the true quotient
  // (flashnorm/kernels/codec4.py says why).
  template <int N>
  FN_HOST_DEVICE static void encode(Pack<uint8_t, N / 2>& codes, const float (&v)[N], const Scale& scale) {
#if FN_FAST && !FN_NATIVE_FP4
    if (scale.usual) {
      fast::quotients(codes, v, scale.inverse, scale.rest);
      return;
    }
    const float most = fp::mul(scale.value, kLargestE2m1);
    float clamped[N];
    FN_UNROLL
    for (int i = 0; i < N; ++i) {
      const float size = fast::size_of(v[i]), less = size < most ? size : most;
      clamped[i] = float_of(bits_of(less) | (bits_of(v[i]) & 0x80000000u));
    }
    fast::quotients(codes, clamped, scale.inverse, scale.rest);
#else
    float quotients[N];
    FN_UNROLL
    for (int i = 0; i < N; ++i) {
#if FN_FAST
      quotients[i] = fp::fma(v[i], scale.inverse, fp::mul(v[i], scale.rest));
#else
      quotients[i] = fp::div(v[i], scale.value);
#endif
    }
    narrow_e2m1(codes, quotients, v);
#endif
    FN_UNROLL
    for (int i = 0; i < Pack<uint8_t, N / 2>::kWords; ++i) {
      codes.words[i] = scale.zero ? 0u : scale.nan ? 0x77777777u : codes.words[i];
    }
  }
};

}  // namespace flashnorm
