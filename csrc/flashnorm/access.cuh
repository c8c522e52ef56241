// How the GPU's kernels touch memory, beyond the whole packs of vec.cuh; to be included before it.
//
// These are values of `At::access`, so stages know nothing of them. What a stage would load with `Touch` is
// prefetched, what it loads with `Async` is copied to shared memory, and `Shifted` reads and writes rows of any
// width and alignment.
#pragma once

#include <type_traits>

#include "device.cuh"
#include "types.cuh"

namespace flashnorm {

// Nothing is read: the line comes into L2.
struct Touch {};

// The pack is in shared memory, and is there once `await_copies` returns.
struct Async {};

// The pack's place is aligned for an element, no more. `left` elements of the row begin there, `before`
// come before it. A store is the work of a warp: all its threads call it, neighbours with neighbouring
// packs, and those whose pack lies beyond the row (left <= 0) as well.
struct Shifted {
  int left;
  int before;
};

// Elements of a pack that are there; it may be negative, or more than N.
template <int N>
FN_HOST_DEVICE int count_of(Shifted access) {
  return access.left;
}

#if FN_KERNELS
namespace detail {

// What a pack moves in: 16 bytes at a time, or all of it where it has no more than 8.
template <class T, int N>
using PieceOf = std::conditional_t<Pack<T, N>::kBytes % 16 == 0, uint4, uint2>;

template <bool kOnce, class T, int N>
FN_DEVICE void load(Pack<T, N>&, const T* from, Touch) {
  prefetch(from);
}

template <bool kOnce, class T, int N>
FN_DEVICE void load(Pack<T, N>& pack, const T* from, Async) {
  using Piece = PieceOf<T, N>;
  FN_UNROLL
  for (int i = 0; i < Pack<T, N>::kBytes / int(sizeof(Piece)); ++i) {
    start_copy(reinterpret_cast<Piece*>(pack.words) + i, reinterpret_cast<const Piece*>(from) + i);
  }
}

FN_DEVICE void put_words(uint32_t* to, uint4 v) { to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w; }
FN_DEVICE void put_words(uint32_t* to, uint2 v) { to[0] = v.x, to[1] = v.y; }
FN_DEVICE void get_words(uint4& v, const uint32_t* from) { v = make_uint4(from[0], from[1], from[2], from[3]); }
FN_DEVICE void get_words(uint2& v, const uint32_t* from) { v = make_uint2(from[0], from[1]); }

// ---------------------------------------------------------------- shifted rows
// A pack at an odd place lies in one more aligned piece than it fills: it is read as those pieces, shifted. To
// be written, it is joined to the end of the pack that the thread before holds, and shifted the other way.
// Elements whose piece is not wholly in the row, or whose neighbour is in another warp, move one by one.

template <int kStep, int kCount>
FN_DEVICE void move_down(uint32_t (&words)[kCount], bool moves) {
  FN_UNROLL
  for (int i = 0; i < kCount - kStep; ++i) words[i] = moves ? words[i + kStep] : words[i];
}

// words[i] <- the word at byte 4 * i + `bytes`; `bytes` is 0 to those of a piece. The last kPiece words are used up.
template <int kPiece, int kCount>
FN_DEVICE void shift_down(uint32_t (&words)[kCount], uint32_t bytes) {
  if constexpr (kPiece == 4) move_down<4>(words, bytes & 16);
  move_down<2>(words, bytes & 8);
  move_down<1>(words, bytes & 4);
  FN_UNROLL
  for (int i = 0; i < kCount - kPiece; ++i) {
    words[i] = uint32_t((uint64_t(words[i + 1]) << 32 | words[i]) >> 8 * (bytes % 4));
  }
}

template <class T>
FN_DEVICE void load_element(uint32_t* words, int i, const T* from) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>;
  const int byte = i * int(sizeof(T));
  words[byte / 4] |= uint32_t(*reinterpret_cast<const Bits*>(from + i)) << 8 * (byte % 4);
}

template <class T>
FN_DEVICE void store_element(T* to, int i, const uint32_t* words) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>;
  const int byte = i * int(sizeof(T));
  *reinterpret_cast<Bits*>(to + i) = Bits(words[byte / 4] >> 8 * (byte % 4));
}

template <bool kOnce, class T, int N>
FN_DEVICE void load(Pack<T, N>& pack, const T* from, Shifted at) {
  using Piece = PieceOf<T, N>;
  constexpr int kBytes = sizeof(Piece), kPieceWords = kBytes / 4, kPiece = kBytes / int(sizeof(T));
  constexpr int kWords = Pack<T, N>::kWords, kPieces = kWords / kPieceWords;
  const uint32_t bytes = uint32_t(reinterpret_cast<uintptr_t>(from)) % kBytes;
  const int skipped = bytes / int(sizeof(T));  // elements of the first piece that are not the pack's
  if (at.before >= skipped && at.left >= N + (skipped > 0 ? kPiece - skipped : 0)) {
    const Piece* pieces = reinterpret_cast<const Piece*>(reinterpret_cast<const char*>(from) - bytes);
    uint32_t words[kWords + kPieceWords] = {};
    FN_UNROLL
    for (int i = 0; i <= kPieces; ++i) {
      if (i < kPieces || skipped > 0) put_words(words + kPieceWords * i, pieces[i]);
    }
    shift_down<kPieceWords>(words, bytes);
    FN_UNROLL
    for (int i = 0; i < kWords; ++i) pack.words[i] = words[i];
  } else {
    clear(pack);
    FN_UNROLL
    for (int i = 0; i < N; ++i) {
      if (i < at.left) load_element(pack.words, i, from);
    }
  }
}

template <class T, int N>
FN_DEVICE void store(T* to, const Pack<T, N>& pack, Shifted at) {
  using Piece = PieceOf<T, N>;
  constexpr int kBytes = sizeof(Piece), kPieceWords = kBytes / 4, kPiece = kBytes / int(sizeof(T));
  constexpr int kWords = Pack<T, N>::kWords, kPieces = kWords / kPieceWords;
  const uint32_t bytes = uint32_t(reinterpret_cast<uintptr_t>(to)) % kBytes;
  const int skipped = bytes / int(sizeof(T));
  const int head = kPiece - skipped;  // elements in the piece that the pack shares with the one before it
  const int own = at.left < 0 ? 0 : at.left < N ? at.left : N;
  const int thread = int(threadIdx.x + threadIdx.y * blockDim.x) % 32;
  const bool follows = threadIdx.x > 0 && thread > 0;
  const bool leads = threadIdx.x + 1 < blockDim.x && thread < 31;

  uint32_t words[kWords + kPieceWords];
  FN_UNROLL
  for (int i = 0; i < kPieceWords; ++i) words[i] = shuffle_up(pack.words[kWords - kPieceWords + i]);
  FN_UNROLL
  for (int i = 0; i < kWords; ++i) words[kPieceWords + i] = pack.words[i];
  shift_down<kPieceWords>(words, kBytes - bytes);

  // Elements [begin, end) are written in pieces, by this thread or by the next.
  const int begin = skipped == 0 || follows ? 0 : head;
  int end = own < head ? 0 : head + (own - head) / kPiece * kPiece;
  Piece* pieces = reinterpret_cast<Piece*>(reinterpret_cast<char*>(to) - bytes);
  FN_UNROLL
  for (int i = 0; i < kPieces; ++i) {
    const int last = head + i * kPiece;  // where piece i ends
    if (begin < last && last <= end) get_words(pieces[i], words + kPieceWords * i);
  }
  if (own == N && leads && at.left - N >= head) end = N;
  FN_UNROLL
  for (int i = 0; i < N; ++i) {
    if (i < own && (i < begin || i >= end)) store_element(to, i, pack.words);
  }
}

// Codes of a whole group, at any byte: they are not worth a warp's work.
template <int M>
FN_DEVICE void store_pairs(uint8_t* to, const Pack<uint8_t, M>& pack, Shifted at) {
  FN_UNROLL
  for (int i = 0; i < M; ++i) {
    if (at.left > 0) to[i] = uint8_t(pack.words[i / 4] >> 8 * (i % 4));
  }
}

}  // namespace detail
#endif  // FN_KERNELS

}  // namespace flashnorm
