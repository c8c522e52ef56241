// Where an operand lies, and how a pack of it is read and written.
#pragma once

#include "types.cuh"

namespace flashnorm {

// A row's place in the row grid [outer, inner], and its number when the grid is flattened; rows [M, H] are one
// outer row of M.
struct Row {
  int64_t outer;
  int64_t inner;
  int64_t number = 0;
};

// How much of a pack exists, and how it may be touched. A route adds ways of its own: an `Access` is a
// type that `detail::load` and `detail::store` are overloaded for. (The references below look those up
// where they are defined: a header that adds one is included before this one.)
//
// Whole: every element is there, aligned for the widest accesses (16 bytes, or the pack if it is smaller).
struct Whole {};
// Gated: a whole pack or none, for threads that work together and so all come along.
struct Gated {
  bool there;
};
// Ragged: the first `count` elements are there (the rest reads as zero and is never written), of any
// alignment. For the host; a GPU reads such rows in its own way (access.cuh).
struct Ragged {
  int count;
};

// How many of a pack's N elements are there. It may be negative, or more than N.
template <int N>
FN_HOST_DEVICE int count_of(Whole) {
  return N;
}
template <int N>
FN_HOST_DEVICE int count_of(Gated access) {
  return access.there ? N : 0;
}
template <int N>
FN_HOST_DEVICE int count_of(Ragged access) {
  return access.count;
}

// A pack's place: its row, its first column, and its access.
template <class Access>
struct At {
  Row row;
  int col;
  Access access;
};

namespace detail {

#if FN_DEVICE_CODE
// `Bytes` bytes, between memory and the pack's words.
template <int Bytes>
FN_DEVICE void load_piece(uint32_t* to, const char* from) {
  if constexpr (Bytes == 16) {
    const uint4 piece = *reinterpret_cast<const uint4*>(from);
    to[0] = piece.x, to[1] = piece.y, to[2] = piece.z, to[3] = piece.w;
  } else if constexpr (Bytes == 8) {
    const uint2 piece = *reinterpret_cast<const uint2*>(from);
    to[0] = piece.x, to[1] = piece.y;
  } else {
    static_assert(Bytes == 4, "a pack of whole words");
    to[0] = *reinterpret_cast<const uint32_t*>(from);
  }
}

template <int Bytes>
FN_DEVICE void store_piece(char* to, const uint32_t* from) {
  if constexpr (Bytes == 16) {
    *reinterpret_cast<uint4*>(to) = make_uint4(from[0], from[1], from[2], from[3]);
  } else if constexpr (Bytes == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(from[0], from[1]);
  } else {
    static_assert(Bytes == 4, "a pack of whole words");
    *reinterpret_cast<uint32_t*>(to) = from[0];
  }
}
#endif

// Bytes of the widest access to a pack.
template <class T, int N>
constexpr int kWidest = Pack<T, N>::kBytes <= 16 ? Pack<T, N>::kBytes : 16;

// kOnce: no other row of the launch reads this.
template <bool kOnce, class T, int N>
FN_HOST_DEVICE void load(Pack<T, N>& pack, const T* from, Whole) {
#if FN_DEVICE_CODE
  constexpr int kBytes = kWidest<T, N>;
  FN_UNROLL
  for (int i = 0; i < Pack<T, N>::kBytes; i += kBytes) {
    load_piece<kBytes>(pack.words + i / 4, reinterpret_cast<const char*>(from) + i);
  }
#else
  copy_bytes<Pack<T, N>::kBytes>(pack.words, from);
#endif
}

template <class T, int N>
FN_HOST_DEVICE void store(T* to, const Pack<T, N>& pack, Whole) {
#if FN_DEVICE_CODE
  constexpr int kBytes = kWidest<T, N>;
  FN_UNROLL
  for (int i = 0; i < Pack<T, N>::kBytes; i += kBytes) {
    store_piece<kBytes>(reinterpret_cast<char*>(to) + i, pack.words + i / 4);
  }
#else
  copy_bytes<Pack<T, N>::kBytes>(to, pack.words);
#endif
}

template <class T, int N>
FN_HOST_DEVICE void store(T* to, const Pack<T, N>& pack, Gated access) {
  if (access.there) store(to, pack, Whole{});
}

template <bool kOnce, class T, int N>
inline void load(Pack<T, N>& pack, const T* from, Ragged access) {
  clear(pack);
  if (access.count > 0) std::memcpy(pack.words, from, (access.count < N ? access.count : N) * sizeof(T));
}

template <class T, int N>
inline void store(T* to, const Pack<T, N>& pack, Ragged access) {
  if (access.count > 0) std::memcpy(to, pack.words, (access.count < N ? access.count : N) * sizeof(T));
}

// M bytes of two codes each. All of them are there or none: a row is whole groups.
template <int M, class Access>
FN_HOST_DEVICE void store_pairs(uint8_t* to, const Pack<uint8_t, M>& pack, Access access) {
  store(to, pack, access);
}
template <int M>
inline void store_pairs(uint8_t* to, const Pack<uint8_t, M>& pack, Ragged access) {
  store(to, pack, Ragged{access.count / 2});
}

}  // namespace detail

// Rows of elements: a "row" operand, or a "vec" one (strides 0 where it is the same for every row).
template <class T>
struct RowRef {
  T* ptr;
  int64_t outer_stride;
  int64_t inner_stride;

  // Makes the reference one to a place: what lies at `col` of `row` lies at column 0 of row {0, 0} from now on.
  FN_HOST_DEVICE void enter(Row row, int col) { ptr += row.outer * outer_stride + row.inner * inner_stride + col; }

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

// Rows of two elements a byte: a "pairs" operand. Columns are those of elements.
template <class T>
struct PairsRef {
  T* ptr;
  int64_t outer_stride;
  int64_t inner_stride;

  FN_HOST_DEVICE void enter(Row row, int col) { ptr += row.outer * outer_stride + row.inner * inner_stride + col / 2; }

  template <int M, class Access>
  FN_HOST_DEVICE void store(const Pack<T, M>& pack, const At<Access>& at) const {
    T* to = ptr + at.row.outer * outer_stride + at.row.inner * inner_stride + at.col / 2;
    detail::store_pairs(to, pack, at.access);
  }
};

// One value a row: a "per_row" operand.
template <class T>
struct PerRowRef {
  T* ptr;
  int64_t outer_stride;
  int64_t inner_stride;

  FN_HOST_DEVICE void enter(Row row) { ptr += row.outer * outer_stride + row.inner * inner_stride; }

  FN_HOST_DEVICE T& operator[](Row at) const { return ptr[at.outer * outer_stride + at.inner * inner_stride]; }
};

// Rows that an index picks from: a "pool" operand.
template <class T>
struct PoolRef {
  T* ptr;
  int64_t stride;
  int64_t rows;

  FN_HOST_DEVICE void enter(int col) { ptr += col; }

  FN_HOST_DEVICE bool has(int64_t index) const { return uint64_t(index) < uint64_t(rows); }
  FN_HOST_DEVICE T* row(int64_t index) const { return ptr + index * stride; }
};

// B values for each row of the flattened grid: a "blocks" operand, which has `rows` rows. Those past the grid's
// are padding.
template <class T>
struct BlocksRef {
  T* ptr;
  int64_t row_stride;
  int64_t column_stride;
  int64_t rows;
  int columns;
  int hidden_size;  // of the rows that the values are for

  FN_HOST_DEVICE void enter(Row row) { ptr += row.number * row_stride; }

  FN_HOST_DEVICE T& at(Row row, int column) const {
    return ptr[row.number * row_stride + column * column_stride];
  }
};

// The same values in tiles of 128 rows and 4 columns, rows 32 apart beside each other (program/stores.py): a "swizzled"
// operand, which has whole tiles.
template <class T>
struct SwizzledRef {
  T* ptr;
  int64_t rows;
  int columns;
  int hidden_size;

  FN_HOST_DEVICE void enter(Row row) { ptr += start(row.number); }

  FN_HOST_DEVICE T& at(Row row, int column) const { return ptr[start(row.number) + (column / 4 * 512 + column % 4)]; }

 private:
  FN_HOST_DEVICE int64_t start(int64_t row) const {
    const int within = int(row % 128);
    return row / 128 * (128 * int64_t(columns)) + (within % 32 * 16 + within / 32 * 4);
  }
};

}  // namespace flashnorm
