// Where an operand lies, and how a pack of it is read and written.
#pragma once

#include "types.cuh"

namespace flashnorm {

// A row's place in the row grid [outer, inner]; rows [M, H] are one outer row of M.
struct Row {
  int64_t outer;
  int64_t inner;
};

// How much of a pack exists, and how it may be touched.
//
// Whole: every element is there, aligned for the widest accesses (16 bytes, or the pack if it is smaller).
struct Whole {
  template <int N>
  FN_HOST_DEVICE int present() const {
    return N;
  }
};
// Ragged: the first `count` elements are there (the rest reads as zero and is never written), aligned
// to `width` elements (4, 2 or 1; it divides `count`). The host ignores `width`.
struct Ragged {
  int count;
  int width;
  template <int N>
  FN_HOST_DEVICE int present() const {
    return count;
  }
};

// A pack's place: its row, its first column, and its access.
template <class Access>
struct At {
  Row row;
  int col;
  Access access;
};

namespace detail {

#if FN_DEVICE_CODE
// 16 bytes of a row that nobody reads again in this launch.
FN_DEVICE uint4 load_once(const uint4* from) {
#if defined(FLASHNORM_TUNE_LOAD) && FLASHNORM_TUNE_LOAD == 1
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
#elif defined(FLASHNORM_TUNE_LOAD) && FLASHNORM_TUNE_LOAD == 2
  return __ldcs(from);
#else
  return *from;
#endif
}

FN_DEVICE void store_16(uint4* to, uint4 v) {
#if defined(FLASHNORM_TUNE_STORE) && FLASHNORM_TUNE_STORE == 1
  __stcs(to, v);
#else
  *to = v;
#endif
}

// `Bytes` bytes at `from` into the pack's words at byte `offset`, which must be zero so far if Bytes < 4.
template <int Bytes, bool kOnce>
FN_DEVICE void load_piece(uint32_t* words, int offset, const char* from) {
  uint32_t* to = words + offset / 4;
  if constexpr (Bytes == 16) {
    const uint4* at = reinterpret_cast<const uint4*>(from);
    const uint4 piece = kOnce ? load_once(at) : *at;
    to[0] = piece.x, to[1] = piece.y, to[2] = piece.z, to[3] = piece.w;
  } else if constexpr (Bytes == 8) {
    const uint2 piece = *reinterpret_cast<const uint2*>(from);
    to[0] = piece.x, to[1] = piece.y;
  } else if constexpr (Bytes == 4) {
    to[0] = *reinterpret_cast<const uint32_t*>(from);
  } else if constexpr (Bytes == 2) {
    to[0] |= uint32_t(*reinterpret_cast<const uint16_t*>(from)) << 8 * (offset % 4);
  } else {
    to[0] |= uint32_t(*reinterpret_cast<const uint8_t*>(from)) << 8 * (offset % 4);
  }
}

template <int Bytes>
FN_DEVICE void store_piece(char* to, const uint32_t* words, int offset) {
  const uint32_t* from = words + offset / 4;
  if constexpr (Bytes == 16) {
    store_16(reinterpret_cast<uint4*>(to), make_uint4(from[0], from[1], from[2], from[3]));
  } else if constexpr (Bytes == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(from[0], from[1]);
  } else if constexpr (Bytes == 4) {
    *reinterpret_cast<uint32_t*>(to) = from[0];
  } else if constexpr (Bytes == 2) {
    *reinterpret_cast<uint16_t*>(to) = uint16_t(from[0] >> 8 * (offset % 4));
  } else {
    *reinterpret_cast<uint8_t*>(to) = uint8_t(from[0] >> 8 * (offset % 4));
  }
}

// Elements in pieces of `Width`, as far as `count` reaches.
template <int Width, bool kOnce, class T, int N>
FN_DEVICE void load_pieces(Pack<T, N>& pack, const T* from, int count) {
  constexpr int kBytes = Width * int(sizeof(T));
  FN_UNROLL
  for (int i = 0; i < N; i += Width) {
    if (i < count) load_piece<kBytes, kOnce>(pack.words, i * int(sizeof(T)), reinterpret_cast<const char*>(from + i));
  }
}

template <int Width, class T, int N>
FN_DEVICE void store_pieces(T* to, const Pack<T, N>& pack, int count) {
  constexpr int kBytes = Width * int(sizeof(T));
  FN_UNROLL
  for (int i = 0; i < N; i += Width) {
    if (i < count) store_piece<kBytes>(reinterpret_cast<char*>(to + i), pack.words, i * int(sizeof(T)));
  }
}
#endif

// The widest access of one instruction, in elements.
template <class T, int N>
constexpr int kWidest = N * int(sizeof(T)) <= 16 ? N : 16 / int(sizeof(T));

template <bool kOnce, class T, int N>
FN_HOST_DEVICE void load(Pack<T, N>& pack, const T* from, Whole) {
#if FN_DEVICE_CODE
  load_pieces<kWidest<T, N>, kOnce>(pack, from, N);
#else
  std::memcpy(pack.words, from, Pack<T, N>::kBytes);
#endif
}

template <bool kOnce, class T, int N>
FN_HOST_DEVICE void load(Pack<T, N>& pack, const T* from, Ragged access) {
  clear(pack);
#if FN_DEVICE_CODE
  if (access.width >= 4) {
    load_pieces<4, kOnce>(pack, from, access.count);
  } else if (access.width == 2) {
    load_pieces<2, kOnce>(pack, from, access.count);
  } else {
    load_pieces<1, kOnce>(pack, from, access.count);
  }
#else
  if (access.count > 0) std::memcpy(pack.words, from, (access.count < N ? access.count : N) * sizeof(T));
#endif
}

template <class T, int N>
FN_HOST_DEVICE void store(T* to, const Pack<T, N>& pack, Whole) {
#if FN_DEVICE_CODE
  store_pieces<kWidest<T, N>>(to, pack, N);
#else
  std::memcpy(to, pack.words, Pack<T, N>::kBytes);
#endif
}

template <class T, int N>
FN_HOST_DEVICE void store(T* to, const Pack<T, N>& pack, Ragged access) {
#if FN_DEVICE_CODE
  if (access.width >= 4) {
    store_pieces<4>(to, pack, access.count);
  } else if (access.width == 2) {
    store_pieces<2>(to, pack, access.count);
  } else {
    store_pieces<1>(to, pack, access.count);
  }
#else
  if (access.count > 0) std::memcpy(to, pack.words, (access.count < N ? access.count : N) * sizeof(T));
#endif
}

}  // namespace detail

// Rows of elements: a "row" operand, or a "vec" one (strides 0 where it is the same for every row).
template <class T>
struct RowRef {
  T* ptr;
  int64_t outer_stride;
  int64_t inner_stride;

  FN_HOST_DEVICE T* row(Row at) const { return ptr + at.outer * outer_stride + at.inner * inner_stride; }

  template <class U, int N, class Access>
  FN_HOST_DEVICE void load(Pack<U, N>& pack, const At<Access>& at) const {
    detail::load<false>(pack, static_cast<const U*>(row(at.row) + at.col), at.access);
  }
  // The same, of something that no other row of this launch reads: rows, not weights.
  template <class U, int N, class Access>
  FN_HOST_DEVICE void load_once(Pack<U, N>& pack, const At<Access>& at) const {
    detail::load<true>(pack, static_cast<const U*>(row(at.row) + at.col), at.access);
  }
  template <class U, int N, class Access>
  FN_HOST_DEVICE void store(const Pack<U, N>& pack, const At<Access>& at) const {
    detail::store(static_cast<U*>(row(at.row) + at.col), pack, at.access);
  }
};

// One value a row: a "per_row" operand.
template <class T>
struct PerRowRef {
  T* ptr;
  int64_t outer_stride;
  int64_t inner_stride;

  FN_HOST_DEVICE T& operator[](Row at) const { return ptr[at.outer * outer_stride + at.inner * inner_stride]; }
};

}  // namespace flashnorm
