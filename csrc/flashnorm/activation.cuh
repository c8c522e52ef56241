// Sigmoid and SiLU of N values: an exponential by fp32 operations and a division. For rows of 16 bits the device takes
// the approximations that GPUs have of 2^x and 1/x and corrects them, by the operations of the CuTe route
// (flashnorm/kernels/silu.py says why they are good enough). program/stages.py lists both.
#pragma once

#include "fp.cuh"

namespace flashnorm {

enum class Activation { kSigmoid, kSilu };

namespace activation {

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

template <Activation kActivation, int N>
FN_HOST_DEVICE void apply_exactly(float (&v)[N]) {
  FN_UNROLL
  for (int i = 0; i < N; ++i) {
    const float t = -v[i];
    const float e = exponential(t < -87.0f ? -87.0f : t);
    const float d = fp::add(1.0f, t > 88.5f ? float_of(0x7F800000u) : e);
    const float result = kActivation == Activation::kSilu ? fp::div(v[i], d) : fp::reciprocal(d);
    v[i] = t == t ? result : v[i];
  }
}

#if FN_FAST

// d + w, of two fp32 numbers.
struct Divisor {
  float d, w;
};

// 1 + exp(-y), for -88.5 <= y <= 2^126.
FN_HOST_DEVICE Divisor divisor(float y) {
  const float k = fp::mul(y, -0x1.715476p+0f);
  const float e = fp::approximate_exp2(k);
  const float v = fp::fma(k, 0x1.05c61p-29f, fp::fma(k, -0x1.62e43p-1f, -y));  // what the rounding of k lost
  return {fp::add(e, 1.0f), fp::mul(e, v)};
}

// y / (d + w) for a d whose inverse is a normal number; also of a -0.
FN_HOST_DEVICE float quotient(float y, Divisor by) {
  const float inverse = fp::approximate_reciprocal(by.d);
  const float near = fp::mul(y, inverse);
  return fp::fma(fp::fma(by.w, near, fp::fma(by.d, near, -y)), -inverse, near);
}

// y's part in the quotient: y itself, or 1.
template <Activation kActivation>
FN_HOST_DEVICE float dividend(float y) {
  return kActivation == Activation::kSilu ? y : 1.0f;
}

template <Activation kActivation>
FN_HOST_DEVICE float apply_far(float y) {
  const float n = dividend<kActivation>(y);
  const Divisor by = divisor(y);
  const Divisor less{fp::mul(by.d, 0x1p-64f), fp::mul(by.w, 0x1p-64f)};  // where the inverse of d is subnormal
  const float result = y < -87.0f ? fp::mul(quotient(n, less), 0x1p-64f) : quotient(n, by);
  const float low = y < -88.5f ? fp::mul(n, 0.0f) : result;
  return y > 87.0f ? n : low;
}

template <Activation kActivation, int N>
FN_HOST_DEVICE void apply_nearly(float (&v)[N]) {
  float most = 0.0f;  // of the magnitudes; a NaN goes the near way, through which it stays one
  FN_UNROLL
  for (int i = 0; i < N; ++i) most = fmaxf(most, fabsf(v[i]));
  if (most <= 87.0f) {
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = quotient(dividend<kActivation>(v[i]), divisor(v[i]));
  } else {
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = apply_far<kActivation>(v[i]);
  }
}

#endif

}  // namespace activation

// v <- div(1, add(1, exp(-v))), or div(v, add(1, exp(-v))), for rows of T.
template <Activation kActivation, class T, int N>
FN_HOST_DEVICE void activate(float (&v)[N]) {
#if FN_FAST
  if constexpr (sizeof(T) < sizeof(float)) return activation::apply_nearly<kActivation>(v);
#endif
  activation::apply_exactly<kActivation>(v);
}

}  // namespace flashnorm
