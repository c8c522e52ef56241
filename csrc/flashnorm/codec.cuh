// Between stored elements and fp32: `widen` is exact, `narrow` rounds once to nearest even.
//
// Each has a device body (pairwise cvt.rn.*x2) and a host body (integer arithmetic, so that a host
// compiler can vectorise it). They give the same bits for every input; only the payload of a NaN is
// left open. The host bodies also serve devices without the instruction (bfloat16 on sm_75).
#pragma once

#include "types.cuh"

namespace flashnorm {

namespace soft {

FN_HOST_DEVICE float widen_bf16(uint32_t bits) { return float_of(bits << 16); }

FN_HOST_DEVICE uint32_t narrow_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : rounded;
}

FN_HOST_DEVICE float widen_f16(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t magnitude = (bits & 0x7FFFu) << 13;
  // 2^-14 + m * 2^-24, minus 2^-14: exact, and no subnormal fp32 takes part (flush-to-zero modes).
  const float subnormal = float_of(magnitude + 0x38800000u) - float_of(0x38800000u);
  const uint32_t normal = magnitude + (magnitude >= 0x0F800000u ? 0x70000000u : 0x38000000u);
  return float_of(sign | (magnitude < 0x00800000u ? bits_of(subnormal) : normal));
}

FN_HOST_DEVICE uint32_t narrow_f16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t normal = (magnitude + 0x0FFFu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  // Below 2^-14 one step is 2^-24, which is one step of an fp32 in [0.5, 1): the addition rounds.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x47800000u ? 0x7C00u : result;
  result = magnitude > 0x7F800000u ? 0x7FFFu : result;
  return sign | result;
}

}  // namespace soft

// ---------------------------------------------------------------- fp32: nothing to do
template <int N>
FN_HOST_DEVICE void widen(float (&v)[N], const Pack<float, N>& pack) {
#if FN_DEVICE_CODE
  FN_UNROLL
  for (int i = 0; i < N; ++i) v[i] = float_of(pack.words[i]);
#else
  copy_bytes<sizeof(v)>(v, pack.words);
#endif
}

template <int N>
FN_HOST_DEVICE void narrow(Pack<float, N>& pack, const float (&v)[N]) {
#if FN_DEVICE_CODE
  FN_UNROLL
  for (int i = 0; i < N; ++i) pack.words[i] = bits_of(v[i]);
#else
  copy_bytes<sizeof(v)>(pack.words, v);
#endif
}

// ---------------------------------------------------------------- bfloat16
template <int N>
FN_HOST_DEVICE void widen(float (&v)[N], const Pack<bf16, N>& pack) {
  static_assert(N % 2 == 0, "16-bit elements come in pairs");
#if FN_DEVICE_CODE
  FN_UNROLL
  for (int i = 0; i < N / 2; ++i) {
    v[2 * i] = float_of(pack.words[i] << 16);
    v[2 * i + 1] = float_of(pack.words[i] & 0xFFFF0000u);
  }
#else
  uint16_t bits[N];
  std::memcpy(bits, pack.words, sizeof(bits));
  for (int i = 0; i < N; ++i) v[i] = soft::widen_bf16(bits[i]);
#endif
}

template <int N>
FN_HOST_DEVICE void narrow(Pack<bf16, N>& pack, const float (&v)[N]) {
  static_assert(N % 2 == 0, "16-bit elements come in pairs");
#if FN_DEVICE_CODE
  FN_UNROLL
  for (int i = 0; i < N / 2; ++i) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pack.words[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));
#else
    pack.words[i] = soft::narrow_bf16(v[2 * i]) | soft::narrow_bf16(v[2 * i + 1]) << 16;
#endif
  }
#else
  uint16_t bits[N];
  for (int i = 0; i < N; ++i) bits[i] = uint16_t(soft::narrow_bf16(v[i]));
  std::memcpy(pack.words, bits, sizeof(bits));
#endif
}

// ---------------------------------------------------------------- float16
template <int N>
FN_HOST_DEVICE void widen(float (&v)[N], const Pack<f16, N>& pack) {
  static_assert(N % 2 == 0, "16-bit elements come in pairs");
#if FN_DEVICE_CODE
  FN_UNROLL
  for (int i = 0; i < N / 2; ++i) {
    asm("{\n\t.reg .f16 lo, hi;\n\tmov.b32 {lo, hi}, %2;\n\tcvt.f32.f16 %0, lo;\n\tcvt.f32.f16 %1, hi;\n\t}"
        : "=f"(v[2 * i]), "=f"(v[2 * i + 1])
        : "r"(pack.words[i]));
  }
#else
  uint16_t bits[N];
  std::memcpy(bits, pack.words, sizeof(bits));
  for (int i = 0; i < N; ++i) v[i] = soft::widen_f16(bits[i]);
#endif
}

template <int N>
FN_HOST_DEVICE void narrow(Pack<f16, N>& pack, const float (&v)[N]) {
  static_assert(N % 2 == 0, "16-bit elements come in pairs");
#if FN_DEVICE_CODE
  FN_UNROLL
  for (int i = 0; i < N / 2; ++i) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pack.words[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));
#else
    asm("{\n\t.reg .f16 lo, hi;\n\tcvt.rn.f16.f32 lo, %1;\n\tcvt.rn.f16.f32 hi, %2;\n\tmov.b32 %0, {lo, hi};\n\t}"
        : "=r"(pack.words[i])
        : "f"(v[2 * i]), "f"(v[2 * i + 1]));
#endif
  }
#else
  uint16_t bits[N];
  for (int i = 0; i < N; ++i) bits[i] = uint16_t(soft::narrow_f16(v[i]));
  std::memcpy(pack.words, bits, sizeof(bits));
#endif
}

// ---------------------------------------------------------------- one element
FN_HOST_DEVICE float widened(float v) { return v; }
FN_HOST_DEVICE float widened(bf16 v) { return soft::widen_bf16(v.bits); }
FN_HOST_DEVICE float widened(f16 v) {
#if FN_DEVICE_CODE
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v.bits));
  return wide;
#else
  return soft::widen_f16(v.bits);
#endif
}

// v <- rT(v), as fp32: the roundings inside a formula.
template <class T, int N>
FN_HOST_DEVICE void round_to(float (&v)[N]) {
  if constexpr (sizeof(T) < 4) {
    Pack<T, N> pack;
    narrow(pack, v);
    widen(v, pack);
  }
}

}  // namespace flashnorm
