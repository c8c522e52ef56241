// From fp32 to 4-bit codes, e2m1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, the sign in the highest bit; two to a byte, the even
// element in the low half.
//
// Nearest even, saturating: an infinity, and whatever is too large, becomes 6 with its sign. A NaN becomes 7. Blackwell
// has an instruction for pairs of floats, in targets that are compiled for one device or family; the arithmetic below
// serves everybody else, and the host.
#pragma once

#include "codec.cuh"
#include "codec8.cuh"
#include "fp.cuh"

#if FN_DEVICE_CODE && __CUDA_ARCH__ >= 1000 && \
    (defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__))
#define FN_NATIVE_FP4 1
#else
#define FN_NATIVE_FP4 0
#endif

namespace flashnorm {

constexpr float kLargestE2m1 = 6.0f;

namespace soft {

// The code of a magnitude; a NaN counts as too large.
//
// Codes lie 1/2 apart below 2, 1 apart below 4, then 2. The addition of 1.5 * 2^22 of these steps rounds to whole ones
// and leaves their number in the low bits: one rounding.
FN_HOST_DEVICE uint32_t e2m1(float magnitude) {
#if FN_DEVICE_CODE
  const uint32_t bits = bits_of(fminf(magnitude, kLargestE2m1));
#else
  const uint32_t bits = bits_of(magnitude <= kLargestE2m1 ? magnitude : kLargestE2m1);
#endif
  const uint32_t one = 0x3F800000u, exponent = bits & 0x7F800000u;
  const uint32_t above = (exponent > one ? exponent : one) - one;  // 2^23 for every doubling of the step
  const uint32_t magic = above + 0x4AC00000u;                      // 1.5 * 2^22 steps
  return bits_of(float_of(bits) + float_of(magic)) - magic + (above >> 22);
}

}  // namespace soft

#if FN_FAST
// Codes of a group on devices without the conversion, by the arithmetic of the CuTe route (flashnorm/kernels/codec4.py
// says why it is right): magnitudes come in as multiples of 2^-14, at most 7 of them, or with `kSaturate` less than 8.
namespace fast {

constexpr float kUnit = 0x1p-14f;

FN_HOST_DEVICE float size_of(float v) { return float_of(bits_of(v) & 0x7FFFFFFFu); }

// The nearest number of the format.
FN_HOST_DEVICE float rounded(float a) {
  const float b = fp::fma(a, a, 0x1.8p-25f);
  return fp::fma(b, 0x1p33f, fp::fma(b, -0x1p33f, a));
}

// fp16 of the format's numbers times 2^-14, two of them: their codes in bits 9 to 11 of each half.
template <bool kSaturate>
FN_HOST_DEVICE uint32_t halves(float low, float high) {
  const float both[2] = {low, high};
  Pack<f16, 2> pair;
  narrow(pair, both);
#if FN_DEVICE_CODE && __CUDA_ARCH__ >= 800
  if (kSaturate) asm("min.f16x2 %0, %0, %1;" : "+r"(pair.words[0]) : "r"(0x0E000E00u));
#else
  if (kSaturate) {  // positive numbers compare like their bits
    const uint32_t left = pair.words[0] & 0xFFFFu, right = pair.words[0] >> 16;
    pair.words[0] = (left < 0x0E00u ? left : 0x0E00u) | (right < 0x0E00u ? right : 0x0E00u) << 16;
  }
#endif
  return pair.words[0];
}

// The signs of four numbers, each over a byte of its own.
FN_HOST_DEVICE uint32_t signs_of(float a, float b, float c, float d) {
#if FN_DEVICE_CODE
  uint32_t low, high;
  asm("prmt.b32 %0, %1, %2, 0x00fb;" : "=r"(low) : "r"(bits_of(a)), "r"(bits_of(b)));
  asm("prmt.b32 %0, %1, %2, 0x00fb;" : "=r"(high) : "r"(bits_of(c)), "r"(bits_of(d)));
  return __byte_perm(low, high, 0x5410);
#else
  const uint32_t low = (bits_of(a) >> 31) * 0xFFu | (bits_of(b) >> 31) * 0xFF00u;
  return low | (bits_of(c) >> 31) * 0xFF0000u | (bits_of(d) >> 31) * 0xFF000000u;
#endif
}

template <bool kSaturate>
FN_HOST_DEVICE uint32_t codes(const float (&a)[8], const float* signs) {
  uint32_t pair[4];
  FN_UNROLL
  for (int i = 0; i < 4; ++i) pair[i] = halves<kSaturate>(rounded(a[i]), rounded(a[i + 4]));
  const uint32_t even = pair[0] + (pair[1] << 4), odd = pair[2] + (pair[3] << 4);
  const uint32_t word = (even >> 9) + (odd >> 1);
  return word | (signs_of(signs[0], signs[2], signs[4], signs[6]) & 0x08080808u) |
         (signs_of(signs[1], signs[3], signs[5], signs[7]) & 0x80808080u);
}

// Codes of products of less than 8, in units of `kUnit`.
template <bool kSaturate, int N>
FN_HOST_DEVICE void products(Pack<uint8_t, N / 2>& pack, const float (&v)[N], float factor) {
  FN_UNROLL
  for (int i = 0; i < N / 8; ++i) {
    float a[8];
    FN_UNROLL
    for (int j = 0; j < 8; ++j) a[j] = fp::mul(size_of(v[8 * i + j]), factor);
    pack.words[i] = codes<kSaturate>(a, v + 8 * i);
  }
}

// Codes of quotients of at most 7, in units of `kUnit`: v times an inverse in two parts.
template <int N>
FN_HOST_DEVICE void quotients(Pack<uint8_t, N / 2>& pack, const float (&v)[N], float inverse, float rest) {
  FN_UNROLL
  for (int i = 0; i < N / 8; ++i) {
    float a[8];
    FN_UNROLL
    for (int j = 0; j < 8; ++j) {
      const float size = size_of(v[8 * i + j]);
      a[j] = fp::fma(size, inverse, fp::mul(size, rest));
    }
    pack.words[i] = codes<false>(a, v + 8 * i);
  }
}

}  // namespace fast
#endif

// The codes of values whose signs stand in `signs` (their own, where nothing is lost of them).
template <int N>
FN_HOST_DEVICE void narrow_e2m1(Pack<uint8_t, N / 2>& pack, const float (&v)[N], const float (&signs)[N]) {
  static_assert(N % 8 == 0, "codes come in words");
  FN_UNROLL
  for (int i = 0; i < N / 8; ++i) {
    uint32_t word = 0;
    FN_UNROLL
    for (int j = 8; j > 0; j -= 2) {
      const int k = 8 * i + j - 2;
#if FN_NATIVE_FP4
      const float low = float_of((bits_of(v[k]) & 0x7FFFFFFFu) | (bits_of(signs[k]) & 0x80000000u));
      const float high = float_of((bits_of(v[k + 1]) & 0x7FFFFFFFu) | (bits_of(signs[k + 1]) & 0x80000000u));
      uint32_t pair;
      asm("{\n\t.reg .b8 pair, none;\n\tcvt.rn.satfinite.e2m1x2.f32 pair, %2, %1;\n\tmov.b32 %0, {pair, pair, pair, "
          "pair};\n\t}"
          : "=r"(pair)
          : "f"(low), "f"(high));
      word = word << 8 | (pair & 0xFFu);
#else
      const uint32_t low = soft::e2m1(float_of(bits_of(v[k]) & 0x7FFFFFFFu));
      const uint32_t high = soft::e2m1(float_of(bits_of(v[k + 1]) & 0x7FFFFFFFu));
      const uint32_t low_sign = (bits_of(signs[k]) >> 28) & 8u, high_sign = (bits_of(signs[k + 1]) >> 28) & 8u;
#if FN_DEVICE_CODE
      // Every NaN that arithmetic makes there is positive.
      word = (word << 4 | high | high_sign) << 4 | low | low_sign;
#else
      word = (word << 4 | high | (v[k + 1] == v[k + 1] ? high_sign : 0u)) << 4 | low | (v[k] == v[k] ? low_sign : 0u);
#endif
#endif
    }
    pack.words[i] = word;
  }
}

}  // namespace flashnorm
