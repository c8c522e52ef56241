// What the CPU's row loop changes in the shared headers; to be included before all others of them.
//
// Two more ways to touch memory, beside those of vec.cuh: prefetching, and storing past the caches. Both
// are values of `At::access`, so stages know nothing of them: what a stage would load with `Touch`
// is prefetched, what it stores with `Stream` goes to memory directly. (The references of vec.cuh look
// `detail::load` and `detail::store` up where they are defined: hence the order of inclusion.)
#pragma once

#include "../types.cuh"
#include "x86.h"

// Stages loop over the elements of a step, which is one vector: such a loop has to be vectorised, not
// unrolled into scalars. (FN_UNROLL asks the device compiler for the opposite.)
#undef FN_UNROLL
#if defined(__clang__)
#define FN_UNROLL _Pragma("clang loop unroll(disable) vectorize(enable)")
#else
#define FN_UNROLL _Pragma("GCC unroll 1")
#endif

namespace flashnorm {
namespace cpu {

// Nothing is read: the line comes into the cache.
struct Touch {};

// Every element is there. The caches are not filled with what nobody reads soon, and no line is read
// only to be overwritten: the traffic of a large store is halved. `fence` ends it.
struct Stream {};

// After streamed stores, before another thread may read them.
FN_HOST_DEVICE void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace cpu

namespace detail {

template <bool kOnce, class T, int N>
FN_HOST_DEVICE void load(Pack<T, N>& pack, const T* from, cpu::Touch) {
  clear(pack);
  __builtin_prefetch(from);
}

template <class T, int N>
FN_HOST_DEVICE void store(T* to, const Pack<T, N>& pack, cpu::Stream) {
#if defined(__x86_64__)
  constexpr int kBytes = Pack<T, N>::kBytes;
  const char* from = reinterpret_cast<const char*>(pack.words);
#if defined(__AVX512F__)
  if constexpr (kBytes == 64) {
    if (reinterpret_cast<uintptr_t>(to) % 64 == 0) {
      return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
    }
  }
#endif
#if defined(__AVX2__)
  if constexpr (kBytes == 32) {
    if (reinterpret_cast<uintptr_t>(to) % 32 == 0) {
      const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), value);
    }
  }
#endif
  if constexpr (kBytes == 16) {
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
      const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      return _mm_stream_si128(reinterpret_cast<__m128i*>(to), value);
    }
  }
#endif
  copy_bytes<Pack<T, N>::kBytes>(to, pack.words);
}

}  // namespace detail
}  // namespace flashnorm
