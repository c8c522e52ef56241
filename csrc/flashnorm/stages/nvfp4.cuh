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
    float inverse;  // div(1, value)
    float gain;
    bool zero, nan;  // all codes are +0, or all 7
  };

  using Operands::Operands;

  FN_HOST_DEVICE Given read() const { return {this->number(1.0f)}; }

  FN_HOST_DEVICE Scale scale(uint32_t amax, Given given) const {
    float wanted = fp::div(float_of(finite(amax)), kLargestE2m1);
    if constexpr (Options::kGlobalScale != GlobalScale::kNone) wanted = fp::mul(given.gain, wanted);
    wanted = wanted > Code<e4m3>::kLargest ? Code<e4m3>::kLargest : wanted;  // a NaN stays
    const float four[4] = {wanted, 0.0f, 0.0f, 0.0f};
    Pack<e4m3, 4> code;
    narrow(code, four);
    Scale result;
    result.byte = code.words[0] & 0xFFu;
    result.value = soft::Float8<e4m3>::widen(result.byte);
    result.inverse = fp::reciprocal(result.value);
    result.gain = given.gain;
    result.zero = amax == 0 || result.byte == 0;
    result.nan = result.byte == 0x7Fu && !result.zero;
    return result;
  }

  template <int N, class Access>
  FN_HOST_DEVICE void put(float (&v)[N], const Scale& scale, const At<Access>& at) const {
    this->put_side(v, at);
    float quotients[N];
    FN_UNROLL
    for (int i = 0; i < N; ++i) {
      if constexpr (Options::kGlobalScale != GlobalScale::kNone) v[i] = fp::mul(v[i], scale.gain);
      quotients[i] = quotient(v[i], scale);
    }
    Pack<uint8_t, N / 2> codes;
    narrow_e2m1(codes, quotients, v);
    FN_UNROLL
    for (int i = 0; i < Pack<uint8_t, N / 2>::kWords; ++i) {
      codes.words[i] = scale.zero ? 0u : scale.nan ? 0x77777777u : codes.words[i];
    }
    dst_.store(codes, at);
  }

  FN_HOST_DEVICE void put_scale(const Scale& scale, Row row, int block) const {
    scales_.put(row, block, scales_.hidden_size() / kBlock, Kept(scale.byte));
  }

  static int columns(int hidden_size) { return hidden_size / kBlock; }

 private:
  // div(v, scale), as far as a code can tell. On the device by the inverse, with one correction: the same quotient where
  // it matters, NaN where it is far beyond the largest code (both become that code).
  FN_HOST_DEVICE static float quotient(float v, const Scale& scale) {
#if FN_DEVICE_CODE
    const float near = fp::mul(v, scale.inverse);
    return fp::fma(fp::fma(-scale.value, near, v), scale.inverse, near);
#else
    return fp::div(v, scale.value);
#endif
  }
};

}  // namespace flashnorm
