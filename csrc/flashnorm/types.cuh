// The words everything else is written in: qualifiers, narrow types, packs of elements.
//
// The same files serve nvcc and a plain host compiler, so nothing here needs a CUDA header: bfloat16,
// float16 and the two 8-bit floats are types of our own that only carry bits. All arithmetic is fp32 (fp.cuh),
// and the way between the two is codec.cuh and codec8.cuh.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define FN_HOST_DEVICE __host__ __device__ __forceinline__
#define FN_DEVICE __device__ __forceinline__
#else
#define FN_HOST_DEVICE inline __attribute__((always_inline))
#define FN_DEVICE inline
#endif

// True while a body is compiled for the GPU: the one switch between the two bodies of a load, a store or a conversion.
#if defined(__CUDA_ARCH__)
#define FN_DEVICE_CODE 1
#define FN_UNROLL _Pragma("unroll")
#define FN_KEEP_LOOP _Pragma("unroll 1")
#else
#define FN_DEVICE_CODE 0
#define FN_UNROLL
#define FN_KEEP_LOOP
#endif

// Where faster sequences of a GPU stand in for what the host does: tests compile them for the host, too.
#if !defined(FN_FAST)
#define FN_FAST FN_DEVICE_CODE
#endif

namespace flashnorm {

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

// float8_e4m3fn (no infinities, one NaN a sign) and float8_e5m2.
struct e4m3 {
  uint8_t bits;
};

struct e5m2 {
  uint8_t bits;
};

// Elements of the canonical sum's groups: the unit of work everywhere (arithmetic.md, "Rows").
constexpr int kGroup = 8;

// N elements as they lie in memory. Held as 32-bit words, because that is what registers are: an array
// of 16-bit elements makes the device compiler split and merge halves all over.
template <class T, int N>
struct alignas(N * sizeof(T) >= 16 ? 16 : (N * sizeof(T) + 3) / 4 * 4) Pack {
  static constexpr int kBytes = N * int(sizeof(T));
  static constexpr int kWords = (kBytes + 3) / 4;
  uint32_t words[kWords];
};

// Copies of whole vectors on a host: GCC moves what std::memcpy is asked for 16 bytes at a time on some processors,
// and a vector that is loaded from two such stores waits for both to reach the cache.
template <int kBytes>
FN_HOST_DEVICE void copy_bytes(void* to, const void* from) {
#if defined(__CUDACC__)
  std::memcpy(to, from, kBytes);
#else
  if constexpr (kBytes == 32 || kBytes == 64) {
    typedef char Vector __attribute__((vector_size(kBytes), aligned(1), may_alias));
    *static_cast<Vector*>(to) = *static_cast<const Vector*>(from);
  } else {
    std::memcpy(to, from, kBytes);
  }
#endif
}

FN_HOST_DEVICE float float_of(uint32_t bits) {
#if FN_DEVICE_CODE
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

FN_HOST_DEVICE uint32_t bits_of(float value) {
#if FN_DEVICE_CODE
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
#endif
}

template <class T, int N>
FN_HOST_DEVICE void fill(Pack<T, N>& pack, uint32_t word) {
  FN_UNROLL
  for (int i = 0; i < Pack<T, N>::kWords; ++i) pack.words[i] = word;
}

template <class T, int N>
FN_HOST_DEVICE void clear(Pack<T, N>& pack) {
  fill(pack, 0);
}

// A word that is NaN for fp32, and two for float16 and bfloat16.
constexpr uint32_t kNanWord = 0x7FFF7FFFu;

}  // namespace flashnorm
