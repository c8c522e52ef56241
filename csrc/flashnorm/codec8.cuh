// Between fp32 and 8-bit codes: e4m3, e5m2 and int8.
//
// `narrow` rounds once to nearest even and saturates: an infinity, and whatever is too large, becomes the largest
// finite code of its sign. A NaN becomes 0x7F, whatever its sign, or 0 as int8. The instructions of sm_89 and newer
// do the same for pairs of floats; the integer arithmetic below serves older devices and the host, whose compiler
// can vectorise it.
#pragma once

#include "codec.cuh"

namespace flashnorm {

// What an 8-bit code is made of, and the largest finite value of its type.
template <class T>
struct Code;
template <>
struct Code<e4m3> {
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr uint32_t kLargestBits = 0x7Eu, kInfinityBits = 0x80u;  // there is no infinity
  static constexpr float kLargest = 448.0f;
};
template <>
struct Code<e5m2> {
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr uint32_t kLargestBits = 0x7Bu, kInfinityBits = 0x7Cu;
  static constexpr float kLargest = 57344.0f;
};
template <>
struct Code<int8_t> {
  static constexpr float kLargest = 127.0f;
};

namespace soft {

template <class T>
struct Float8 {
  static constexpr int kShift = 23 - Code<T>::kMantissa;
  static constexpr uint32_t kRebias = uint32_t(127 - Code<T>::kBias) << 23;
  static constexpr uint32_t kSmallestNormal = uint32_t(128 - Code<T>::kBias) << 23;
  // The power of two whose fp32 steps are the steps of the type's subnormals.
  static constexpr uint32_t kSubnormalSteps = uint32_t(127 + 24 - Code<T>::kBias - Code<T>::kMantissa) << 23;

  FN_HOST_DEVICE static uint32_t narrow(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t sign = (bits >> 24) & 0x80u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t half = (1u << (kShift - 1)) - 1u;
    const uint32_t normal = (magnitude + half + ((magnitude >> kShift) & 1u) - kRebias) >> kShift;
    // One rounding: the addition's. No subnormal fp32 number matters to it.
    const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(kSubnormalSteps)) - kSubnormalSteps;
    uint32_t result = magnitude < kSmallestNormal ? subnormal : normal;
    result = result > Code<T>::kLargestBits ? Code<T>::kLargestBits : result;
    return magnitude > 0x7F800000u ? 0x7Fu : sign | result;
  }

  FN_HOST_DEVICE static float widen(uint32_t code) {
    const uint32_t sign = (code & 0x80u) << 24;
    const uint32_t magnitude = (code & 0x7Fu) << kShift;
    const float subnormal = float_of(magnitude + kSmallestNormal) - float_of(kSmallestNormal);
    uint32_t result = magnitude < 0x00800000u ? bits_of(subnormal) : magnitude + kRebias;
    const uint32_t beyond = (code & 0x7Fu) == Code<T>::kInfinityBits ? 0x7F800000u : 0x7FFFFFFFu;
    result = (code & 0x7Fu) > Code<T>::kLargestBits ? beyond : result;
    return float_of(sign | result);
  }
};

FN_HOST_DEVICE uint32_t narrow_int8(float value) {
  float clamped = value > 127.0f ? 127.0f : value;  // a NaN passes both
  clamped = clamped < -127.0f ? -127.0f : clamped;
  // 1.5 * 2^23: one step is 1, so that the addition rounds and leaves the integer in the low bits.
  const uint32_t rounded = bits_of(clamped + 12582912.0f) & 0xFFu;
  return (bits_of(value) & 0x7FFFFFFFu) > 0x7F800000u ? 0u : rounded;
}

}  // namespace soft

#if FN_DEVICE_CODE
namespace detail {

// Two codes, that of `low` in the low byte.
FN_DEVICE uint32_t narrow_pair(float low, float high, e4m3) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return soft::Float8<e4m3>::narrow(low) | soft::Float8<e4m3>::narrow(high) << 8;
#endif
}

FN_DEVICE uint32_t narrow_pair(float low, float high, e5m2) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return soft::Float8<e5m2>::narrow(low) | soft::Float8<e5m2>::narrow(high) << 8;
#endif
}

// The conversion gives 0 for a NaN, and the ends of its range for what lies beyond.
FN_DEVICE uint32_t narrow_one(float v) { return uint32_t(max(min(__float2int_rn(v), 127), -127)) & 0xFFu; }

FN_DEVICE uint32_t narrow_pair(float low, float high, int8_t) { return narrow_one(low) | narrow_one(high) << 8; }

}  // namespace detail
#endif

namespace detail {

FN_HOST_DEVICE uint8_t soft_code(float v, e4m3) { return uint8_t(soft::Float8<e4m3>::narrow(v)); }
FN_HOST_DEVICE uint8_t soft_code(float v, e5m2) { return uint8_t(soft::Float8<e5m2>::narrow(v)); }
FN_HOST_DEVICE uint8_t soft_code(float v, int8_t) { return uint8_t(soft::narrow_int8(v)); }

template <class T, int N>
FN_HOST_DEVICE void narrow_codes(Pack<T, N>& pack, const float (&v)[N]) {
  static_assert(N % 4 == 0, "codes come in words");
#if FN_DEVICE_CODE
  FN_UNROLL
  for (int i = 0; i < N / 4; ++i) {
    const uint32_t low = narrow_pair(v[4 * i], v[4 * i + 1], T{});
    pack.words[i] = low | narrow_pair(v[4 * i + 2], v[4 * i + 3], T{}) << 16;
  }
#else
  uint8_t codes[N];
  for (int i = 0; i < N; ++i) codes[i] = soft_code(v[i], T{});
  std::memcpy(pack.words, codes, sizeof(codes));
#endif
}

}  // namespace detail

template <int N>
FN_HOST_DEVICE void narrow(Pack<e4m3, N>& pack, const float (&v)[N]) {
  detail::narrow_codes(pack, v);
}

template <int N>
FN_HOST_DEVICE void narrow(Pack<e5m2, N>& pack, const float (&v)[N]) {
  detail::narrow_codes(pack, v);
}

template <int N>
FN_HOST_DEVICE void narrow(Pack<int8_t, N>& pack, const float (&v)[N]) {
  detail::narrow_codes(pack, v);
}

template <int N>
FN_HOST_DEVICE void widen(float (&v)[N], const Pack<int8_t, N>& pack) {
#if FN_DEVICE_CODE
  // A byte with its sign bit turned over, in the low bits of 2^23: an exact subtraction leaves the integer. The
  // instruction for it runs at a quarter of the rate.
  FN_UNROLL
  for (int i = 0; i < N; ++i) {
    const uint32_t biased = __byte_perm(pack.words[i / 4] ^ 0x80808080u, 0x4B000000u, 0x7440 | (i % 4));
    v[i] = __fsub_rn(float_of(biased), 8388736.0f);
  }
#else
  int8_t codes[N];
  std::memcpy(codes, pack.words, sizeof(codes));
  for (int i = 0; i < N; ++i) v[i] = float(codes[i]);
#endif
}

}  // namespace flashnorm
