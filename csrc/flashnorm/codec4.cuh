// From fp32 to 4-bit codes, e2m1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, the sign in the highest bit; two to a byte, the even
// element in the low half.
//
// Nearest even, saturating: an infinity, and whatever is too large, becomes 6 with its sign. A NaN becomes 7. Blackwell
// has an instruction for pairs of floats, in targets that are compiled for one device or family; the arithmetic below
// serves everybody else, and the host.
#pragma once

#include "codec8.cuh"

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
