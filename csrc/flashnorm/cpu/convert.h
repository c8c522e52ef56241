// The conversions of codec.cuh and codec8.cuh at vector speed, for the kStep elements that the row loop handles at a time.
//
// Plain overloads: the compiler prefers them to the templates there, so every stage gets them
// unasked, and where there is none for a machine the templates do. Same bits for every input, NaNs
// included (the tests go through all of them).
#pragma once

#include "../codec8.cuh"
#include "simd.h"

namespace flashnorm {
namespace cpu {

constexpr uint32_t kBf16Nan = 0x7FFFu;

#if FN_CPU_WIDTH == 16 && defined(__AVX512F__)
FN_HOST_DEVICE __m256i halves(const uint32_t* words) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
}
FN_HOST_DEVICE void set_halves(uint32_t* words, __m256i value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), value);
}

FN_HOST_DEVICE __m256i round_bf16(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(kBf16Nan)));
}
#endif

}  // namespace cpu

#if FN_CPU_WIDTH == 16 && defined(__AVX512F__)
FN_HOST_DEVICE void widen(float (&v)[16], const Pack<bf16, 16>& pack) {
  const __m512i wide = _mm512_cvtepu16_epi32(cpu::halves(pack.words));
  _mm512_storeu_ps(v, _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
}

FN_HOST_DEVICE void narrow(Pack<bf16, 16>& pack, const float (&from)[16]) {
  const __m512 v = _mm512_loadu_ps(from);
#if defined(__AVX512BF16__)
  // The instruction takes subnormals for zero and leaves a NaN its payload: those go the long way.
  constexpr int kQuietNan = 0x01, kSubnormal = 0x20, kSignallingNan = 0x80;
  if (__builtin_expect(_mm512_fpclass_ps_mask(v, kQuietNan | kSubnormal | kSignallingNan) == 0, 1)) {
    return cpu::set_halves(pack.words, __m256i(_mm512_cvtneps_pbh(v)));
  }
#endif
  cpu::set_halves(pack.words, cpu::round_bf16(v));
}

FN_HOST_DEVICE void widen(float (&v)[16], const Pack<f16, 16>& pack) {
  _mm512_storeu_ps(v, _mm512_cvtph_ps(cpu::halves(pack.words)));
}

FN_HOST_DEVICE void narrow(Pack<f16, 16>& pack, const float (&from)[16]) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  cpu::set_halves(pack.words, _mm512_cvtps_ph(_mm512_loadu_ps(from), kNearest));
}

#elif FN_CPU_WIDTH == 8 && defined(__AVX2__)
FN_HOST_DEVICE void widen(float (&v)[8], const Pack<bf16, 8>& pack) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pack.words)));
  _mm256_storeu_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
}

FN_HOST_DEVICE void narrow(Pack<bf16, 8>& pack, const float (&from)[8]) {
  const __m256 v = _mm256_loadu_ps(from);
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i wide = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(cpu::kBf16Nan), nan);
  const __m128i low = _mm256_castsi256_si128(wide), high = _mm256_extracti128_si256(wide, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(pack.words), _mm_packus_epi32(low, high));
}

#if defined(__F16C__)
FN_HOST_DEVICE void widen(float (&v)[8], const Pack<f16, 8>& pack) {
  _mm256_storeu_ps(v, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pack.words))));
}

FN_HOST_DEVICE void narrow(Pack<f16, 8>& pack, const float (&v)[8]) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(pack.words), _mm256_cvtps_ph(_mm256_loadu_ps(v), kNearest));
}
#endif

#elif FN_CPU_WIDTH == 4 && defined(__aarch64__)
FN_HOST_DEVICE void widen(float (&v)[8], const Pack<bf16, 8>& pack) {
  const uint16x8_t bits = vreinterpretq_u16_u32(vld1q_u32(pack.words));
  vst1q_f32(v, vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)));
  vst1q_f32(v + 4, vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(bits), 16)));
}

namespace cpu {
FN_HOST_DEVICE uint16x4_t round_bf16(float32x4_t v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t sum = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
  return vmovn_u32(vbslq_u32(vceqq_f32(v, v), vshrq_n_u32(sum, 16), vdupq_n_u32(kBf16Nan)));
}
}  // namespace cpu

FN_HOST_DEVICE void narrow(Pack<bf16, 8>& pack, const float (&v)[8]) {
  const uint16x8_t bits = vcombine_u16(cpu::round_bf16(vld1q_f32(v)), cpu::round_bf16(vld1q_f32(v + 4)));
  vst1q_u32(pack.words, vreinterpretq_u32_u16(bits));
}

FN_HOST_DEVICE void widen(float (&v)[8], const Pack<f16, 8>& pack) {
  const float16x8_t half = vreinterpretq_f16_u32(vld1q_u32(pack.words));
  vst1q_f32(v, vcvt_f32_f16(vget_low_f16(half)));
  vst1q_f32(v + 4, vcvt_f32_f16(vget_high_f16(half)));
}

FN_HOST_DEVICE void narrow(Pack<f16, 8>& pack, const float (&v)[8]) {
  const float16x8_t half = vcombine_f16(vcvt_f16_f32(vld1q_f32(v)), vcvt_f16_f32(vld1q_f32(v + 4)));
  vst1q_u32(pack.words, vreinterpretq_u32_f16(half));
}
#endif

// ---------------------------------------------------------------- 8-bit codes
// soft::Float8<T>::narrow and soft::narrow_int8, step by step, on vectors.
namespace cpu {

typedef uint32_t U __attribute__((vector_size(W * 4)));
typedef int32_t I __attribute__((vector_size(W * 4)));
typedef uint8_t Bytes __attribute__((vector_size(W)));
typedef int8_t SignedBytes __attribute__((vector_size(W)));

FN_HOST_DEVICE U splat_bits(uint32_t x) { return x - U{}; }
// a where the mask has ones, else b.
FN_HOST_DEVICE U select(U mask, U a, U b) { return (mask & a) | (~mask & b); }

template <class T>
FN_HOST_DEVICE U codes_of(V v, T) {
  using Float8 = soft::Float8<T>;
  const U bits = U(v), magnitude = bits & 0x7FFFFFFFu, sign = (bits >> 24) & 0x80u;
  const U half = splat_bits((1u << (Float8::kShift - 1)) - 1u);
  const U normal = (magnitude + half + ((magnitude >> Float8::kShift) & 1u) - Float8::kRebias) >> Float8::kShift;
  const U subnormal = U(V(magnitude) + splat(float_of(Float8::kSubnormalSteps))) - Float8::kSubnormalSteps;
  U result = select(U(magnitude < Float8::kSmallestNormal), subnormal, normal);
  result = select(U(result > Code<T>::kLargestBits), splat_bits(Code<T>::kLargestBits), result);
  return select(U(magnitude > 0x7F800000u), splat_bits(0x7Fu), sign | result);
}

FN_HOST_DEVICE U codes_of(V v, int8_t) {
  const V most = splat(127.0f);
  const U above = U(v > most), below = U(v < -most), nan = U(v != v);
  const V clamped = V(select(below, U(-most), select(above, U(most), U(v))));
  return ~nan & U(clamped + splat(12582912.0f)) & 0xFFu;
}

// GCC takes a widening from bytes apart, so it is spelt out where there is an instruction.
FN_HOST_DEVICE V to_floats(SignedBytes codes) {
#if FN_CPU_WIDTH == 16 && defined(__AVX512F__)
  return V(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(__m128i(codes))));
#elif FN_CPU_WIDTH == 8 && defined(__AVX2__)
  return V(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_set1_epi64x(int64_t(codes)))));
#else
  return __builtin_convertvector(__builtin_convertvector(codes, I), V);
#endif
}

template <class T>
FN_HOST_DEVICE void narrow_step(Pack<T, kStep>& pack, const float (&v)[kStep]) {
  Bytes codes[kStep / W];
  for (int i = 0; i < kStep / W; ++i) codes[i] = __builtin_convertvector(codes_of(load(v + i * W), T{}), Bytes);
  std::memcpy(pack.words, codes, sizeof(codes));
}

}  // namespace cpu

FN_HOST_DEVICE void narrow(Pack<e4m3, cpu::kStep>& pack, const float (&v)[cpu::kStep]) { cpu::narrow_step(pack, v); }
FN_HOST_DEVICE void narrow(Pack<e5m2, cpu::kStep>& pack, const float (&v)[cpu::kStep]) { cpu::narrow_step(pack, v); }
FN_HOST_DEVICE void narrow(Pack<int8_t, cpu::kStep>& pack, const float (&v)[cpu::kStep]) {
  cpu::narrow_step(pack, v);
}

FN_HOST_DEVICE void widen(float (&v)[cpu::kStep], const Pack<int8_t, cpu::kStep>& pack) {
  cpu::SignedBytes codes[cpu::kStep / cpu::W];
  std::memcpy(codes, pack.words, sizeof(codes));
  for (int i = 0; i < cpu::kStep / cpu::W; ++i) cpu::store(v + i * cpu::W, cpu::to_floats(codes[i]));
}

}  // namespace flashnorm
