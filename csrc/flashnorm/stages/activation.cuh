// Sigmoid and SiLU of N values: the exponential by the operations that program/stages.py lists.
#pragma once

#include "../fp.cuh"

namespace flashnorm {

enum class Activation { kSigmoid, kSilu };

// exp(t) for -87 <= t <= 88.5.
FN_HOST_DEVICE float exponential(float t) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are a rounded integer
  constexpr float kLog2e = 0x1.715476p+0f, kLog2eRest = 0x1.4ae0cp-26f;
  const float shifted = fp::fma(t, kLog2e, kMagic);
  const float whole = fp::sub(shifted, kMagic);
  const float f = fp::fma(t, kLog2eRest, fp::fma(t, kLog2e, -whole));
  float p = fp::fma(0x1.41fb2ep-13f, f, 0x1.5f3f3p-10f);
  p = fp::fma(p, f, 0x1.3b2d5p-7f);
  p = fp::fma(p, f, 0x1.c6aee6p-5f);
  p = fp::fma(p, f, 0x1.ebfbdcp-3f);
  p = fp::fma(p, f, 0x1.62e43p-1f);
  p = fp::fma(p, f, 1.0f);
  return float_of(bits_of(p) + (bits_of(shifted) << 23));
}

#if FN_DEVICE_CODE
// div(1, d) of a normal number whose reciprocal is one: what `rcp.rn` makes of it, without its question.
FN_DEVICE float usual_reciprocal(float d) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(d));
  return fp::fma(fp::fma(-d, inverse, 1.0f), inverse, inverse);
}
#endif

// v <- div(1, add(1, exp(-v))), or div(v, add(1, exp(-v))).
template <Activation kActivation, int N>
FN_HOST_DEVICE void activate(float (&v)[N]) {
  constexpr bool kSilu = kActivation == Activation::kSilu;
#if FN_DEVICE_CODE
  // Where all are within +-87, and none is a NaN, nothing overflows: no clamps, and a quotient without a branch.
  bool usual = true;
  FN_UNROLL
  for (int i = 0; i < N; ++i) usual = usual && fabsf(v[i]) <= 87.0f;
  if (usual) {
    FN_UNROLL
    for (int i = 0; i < N; ++i) {
      const float d = fp::add(1.0f, exponential(-v[i]));
      const float inverse = usual_reciprocal(d);
      if constexpr (kSilu) {
        const float near = fp::mul(v[i], inverse);
        const float quotient = fp::fma(fp::fma(-d, near, v[i]), inverse, near);
        v[i] = float_of((bits_of(quotient) & 0x7FFFFFFFu) | (bits_of(v[i]) & 0x80000000u));  // also of a -0
      } else {
        v[i] = inverse;
      }
    }
    return;
  }
#endif
  FN_UNROLL
  for (int i = 0; i < N; ++i) {
    const float t = -v[i];
    const float e = exponential(t < -87.0f ? -87.0f : t);
    const float d = fp::add(1.0f, t > 88.5f ? float_of(0x7F800000u) : e);
    v[i] = t == t ? (kSilu ? fp::div(v[i], d) : fp::reciprocal(d)) : v[i];
  }
}

}  // namespace flashnorm
