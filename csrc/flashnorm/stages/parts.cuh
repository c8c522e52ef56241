// What a stage may have or not: operands, and reads of a further kind.
#pragma once

#include <type_traits>

#include "../vec.cuh"

namespace flashnorm {

// An operand that is not there.
struct Nothing {};

// Where a number is: nowhere, in the launch, or an element in device memory.
enum class Where { kNone, kValue, kDevice };

// The n-th of some types, or void.
template <int kIndex, class... Types>
struct Nth {
  using Type = void;
};
template <int kIndex, class First, class... Rest>
struct Nth<kIndex, First, Rest...> {
  using Type = typename Nth<kIndex - 1, Rest...>::Type;
};
template <class First, class... Rest>
struct Nth<0, First, Rest...> {
  using Type = First;
};

template <class T>
using OptionalRef = std::conditional_t<std::is_same_v<T, Nothing>, Nothing, RowRef<const T>>;
template <class T, int N>
using OptionalPack = std::conditional_t<std::is_same_v<T, Nothing>, Nothing, Pack<T, N>>;

template <int N>
struct NoReads {};

// The vectors that a load stage reads besides its rows.
template <class Load, class = void>
struct VecsOf {
  static constexpr bool kThere = false;
  template <int N>
  using Vecs = NoReads<N>;
};
template <class Load>
struct VecsOf<Load, std::void_t<typename Load::template Vecs<kGroup>>> {
  static constexpr bool kThere = true;
  template <int N>
  using Vecs = typename Load::template Vecs<N>;
};

template <class Load, int N, class Access>
FN_HOST_DEVICE void fetch_vecs(const Load& load, typename VecsOf<Load>::template Vecs<N>& vecs, const At<Access>& at) {
  if constexpr (VecsOf<Load>::kThere) load.fetch_vecs(vecs, at);
}

// Bytes of vectors that a stage reads an element, where what holds them says more: it has room for what is not there.
template <class Stage, class = void>
constexpr int kVectorBytesOf = -1;
template <class Stage>
constexpr int kVectorBytesOf<Stage, std::void_t<decltype(Stage::kVectorBytes)>> = Stage::kVectorBytes;

// Whether those vectors are the same for a row and the one below it, within an outer row.
template <class Load>
bool vecs_same_below(const Load& load) {
  if constexpr (VecsOf<Load>::kThere) {
    return load.vecs_same_below();
  } else {
    return true;
  }
}

// h, from what was read; +0 from the count-th element on.
template <class Load, int N>
FN_HOST_DEVICE void keep(const Load& load, Pack<typename Load::Kept, N>& kept,
                         const typename Load::template Raw<N>& raw,
                         const typename VecsOf<Load>::template Vecs<N>& vecs, int count) {
  if constexpr (VecsOf<Load>::kThere) {
    load.keep(kept, raw, vecs, count);
  } else {
    load.keep(kept, raw, count);
  }
}

// The rows that a map reads besides its vectors.
template <class Map, class = void>
struct RowsOf {
  static constexpr bool kThere = false;
  template <int N>
  using Rows = NoReads<N>;
};
template <class Map>
struct RowsOf<Map, std::void_t<typename Map::template Rows<kGroup>>> {
  static constexpr bool kThere = true;
  template <int N>
  using Rows = typename Map::template Rows<N>;
};

// The element type in which a store has the row again, for statistics of what is stored; void for every other store.
template <class Store, class = void>
struct AgainOf {
  static constexpr bool kThere = false;
  using Type = void;
};
template <class Store>
struct AgainOf<Store, std::void_t<typename Store::Again>> {
  static constexpr bool kThere = true;
  using Type = typename Store::Again;
};

// v <- +0 from the count-th element on.
template <int N>
FN_HOST_DEVICE void clear_missing(float (&v)[N], int count) {
  FN_UNROLL
  for (int i = 0; i < N; ++i) v[i] = i < count ? v[i] : 0.0f;
}

}  // namespace flashnorm
