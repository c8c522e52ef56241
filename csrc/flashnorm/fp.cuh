// fp32 arithmetic, each operation rounded once to nearest even and never merged with another.
//
// A compiler that contracts `a * b + c` changes bits, and the two compilers contract differently. On
// the device the intrinsics below are exempt from contraction; on the host the unit is compiled with
// -ffp-contract=off and says fma where it means one.
#pragma once

#include "types.cuh"

#if !defined(__CUDACC__)
#include <cmath>
#endif

namespace flashnorm {
namespace fp {

FN_HOST_DEVICE float add(float a, float b) {
#if FN_DEVICE_CODE
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

FN_HOST_DEVICE float sub(float a, float b) {
#if FN_DEVICE_CODE
  return __fsub_rn(a, b);
#else
  return a - b;
#endif
}

FN_HOST_DEVICE float mul(float a, float b) {
#if FN_DEVICE_CODE
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

FN_HOST_DEVICE float fma(float a, float b, float c) {
#if FN_DEVICE_CODE
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

FN_HOST_DEVICE float div(float a, float b) {
#if FN_DEVICE_CODE
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

FN_HOST_DEVICE float sqrt(float a) {
#if FN_DEVICE_CODE
  return __fsqrt_rn(a);
#else
  return __builtin_sqrtf(a);
#endif
}

// div(a, n), n >= 1. For a power of two the product with the exact reciprocal is the same number, rounded once.
FN_HOST_DEVICE float div_by(float a, int n) {
#if FN_DEVICE_CODE
  if ((n & (n - 1)) == 0) return mul(a, float_of(0x7F000000u - bits_of(float(n))));  // 2^k: (127 + k) << 23
#endif
  return div(a, float(n));
}

// div(1, a): the device has an instruction sequence of its own for it, with the same bits.
FN_HOST_DEVICE float reciprocal(float a) {
#if FN_DEVICE_CODE
  return __frcp_rn(a);
#else
  return 1.0f / a;
#endif
}

// Near 2^a and 1/a: what is subnormal is 0. The host's are for tests of sequences that put them right.
FN_HOST_DEVICE float approximate_exp2(float a) {
#if FN_DEVICE_CODE
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
#else
  const float result = __builtin_exp2f(a);
  return result < 0x1p-126f ? 0.0f : result;
#endif
}

FN_HOST_DEVICE float approximate_reciprocal(float a) {
#if FN_DEVICE_CODE
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
#else
  return 1.0f / a;
#endif
}

}  // namespace fp
}  // namespace flashnorm
