// The stores. The interface is described in stages.cuh.
#pragma once

#include <type_traits>

#include "../codec8.cuh"
#include "../fp.cuh"
#include "../vec.cuh"

namespace flashnorm {

// Which elements a store needs to have seen before it can write one of them: none but the one (`kNoBlock`), the
// whole row (`kWholeRow`), or those of its block of so many.
constexpr int kNoBlock = -1, kWholeRow = 0;

// One rounding to the destination's dtype.
template <class Options, class Dst>
struct Cast {
  static constexpr bool kCodes = false;
  static constexpr int kBlock = kNoBlock;
  struct Given {};
  struct Scale {};

  RowRef<Dst> dst;

  FN_HOST_DEVICE void enter(Row row, int col) { dst.enter(row, col); }
  FN_HOST_DEVICE Given read() const { return {}; }
  FN_HOST_DEVICE Scale scale(Given) const { return {}; }
  template <int N, class Access>
  FN_HOST_DEVICE void put(float (&v)[N], Scale, const At<Access>& at) const {
    Pack<Dst, N> pack;
    narrow(pack, v);
    dst.store(pack, at);
  }
};

// inv = div(1, scale); out = cast(mul(y, inv)). The scale is a value, or an element in device memory.
template <class Options, class Dst, class S = void>
struct QuantTensor {
  static constexpr bool kCodes = true;
  static constexpr int kBlock = kNoBlock;
  struct Given {
    float scale;
  };
  struct Scale {
    float inverse;
  };

  RowRef<Dst> dst;
  std::conditional_t<Options::kOnDevice, const S*, float> given;

  FN_HOST_DEVICE void enter(Row row, int col) { dst.enter(row, col); }
  FN_HOST_DEVICE Given read() const {
    if constexpr (Options::kOnDevice) {
      return {widened(*given)};
    } else {
      return {given};
    }
  }
  FN_HOST_DEVICE Scale scale(Given given) const { return {fp::reciprocal(given.scale)}; }
  template <int N, class Access>
  FN_HOST_DEVICE void put(float (&v)[N], Scale scale, const At<Access>& at) const {
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = fp::mul(v[i], scale.inverse);
    Pack<Dst, N> pack;
    narrow(pack, v);
    dst.store(pack, at);
  }
};

}  // namespace flashnorm
