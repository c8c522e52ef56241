// Vectors of fp32 on a CPU, and the one primitive of a canonical sum: folding two vectors into one.
//
// `V` is W floats as a GCC/Clang vector: +, -, * are one correctly rounded instruction each, and one
// source serves AVX-512 (W = 16), AVX2 (8) and everything else (4: NEON, SSE, plain C). Intrinsics
// stand only where the compilers have no portable spelling. Compiled with -ffp-contract=off.
#pragma once

#include "../types.cuh"
#include "x86.h"

#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// FN_CPU_WIDTH may be given, to narrow the vectors: tests compare all widths on one machine.
#if !defined(FN_CPU_WIDTH)
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define FN_CPU_WIDTH 16
#elif defined(__AVX2__) && defined(__FMA__)
#define FN_CPU_WIDTH 8
#else
#define FN_CPU_WIDTH 4
#endif
#endif

namespace flashnorm {
namespace cpu {

constexpr int W = FN_CPU_WIDTH;
static_assert(W == 4 || W == 8 || W == 16, "a group of 8 elements is two vectors, one, or half of one");

typedef float V __attribute__((vector_size(W * 4)));

// Elements that a stage is handed at a time: whole vectors and whole groups.
constexpr int kStep = W > kGroup ? W : kGroup;

FN_HOST_DEVICE V splat(float x) { return x - V{}; }  // not V{} + x, which makes +0 of -0

FN_HOST_DEVICE V load(const float* from) {
  V v;
  copy_bytes<sizeof(v)>(&v, from);
  return v;
}

FN_HOST_DEVICE void store(float* to, V v) { copy_bytes<sizeof(v)>(to, &v); }

// a * b + c, rounded once.
FN_HOST_DEVICE V fma(V a, V b, V c) {
#if FN_CPU_WIDTH == 16 && defined(__AVX512F__)
  return V(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif FN_CPU_WIDTH == 8 && defined(__FMA__)
  return V(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#elif FN_CPU_WIDTH == 4 && defined(__FMA__)
  return V(_mm_fmadd_ps(__m128(a), __m128(b), __m128(c)));
#elif FN_CPU_WIDTH == 4 && defined(__ARM_NEON)
  return V(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
#else
  V r = c;
  for (int i = 0; i < W; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}

// ---------------------------------------------------------------- folding
// The index of an element in its vector has log2(W) bits. Folding on bit j adds the elements that have
// it 0 to those that have it 1, in two vectors a and b at once, and one vector takes all the sums: a
// new bit n tells those of b from those of a. Two shuffles of one instruction and one add, each. Where
// the bits end up was chosen for the shuffles that exist, and is written as b3 b2 b1 b0 -> ....

// -> b3 b2 n b0, b1 is gone.
FN_HOST_DEVICE V fold_bit1(V a, V b) {
#if FN_CPU_WIDTH == 16
  return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
#elif FN_CPU_WIDTH == 8
  return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
         __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
#else
  return __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
#endif
}

// -> b3 b2 n b1, b0 is gone.
FN_HOST_DEVICE V fold_bit0(V a, V b) {
#if FN_CPU_WIDTH == 16
  return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
#elif FN_CPU_WIDTH == 8
  return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
#else
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

// -> n b3 b1 b0 (W = 16), n b1 b0 (8), b2 is gone; at W = 4 bit 2 is the bit that tells a from b.
FN_HOST_DEVICE V fold_bit2(V a, V b) {
#if FN_CPU_WIDTH == 16
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#elif FN_CPU_WIDTH == 8
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
#else
  return a + b;
#endif
}

#if FN_CPU_WIDTH == 16
// -> n b2 b1 b0, b3 is gone.
FN_HOST_DEVICE V fold_bit3(V a, V b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
#endif

}  // namespace cpu
}  // namespace flashnorm
