// The stores. The interface is described in stages.cuh.
#pragma once

#include <type_traits>

#include "../codec8.cuh"
#include "../fp.cuh"
#include "../vec.cuh"
#include "stats.cuh"

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

// r = y as `residual_out` has it; z = mul(mul(r, rstd2), add(next_weight, next_center)), one rounding, with rstd2 of r.
template <class Options, class R, class W, class Dst>
struct NextNorm {
  static constexpr bool kCodes = false;
  static constexpr int kBlock = kNoBlock;
  using Again = R;
  struct Given {};
  template <int N>
  struct Raw {
    Pack<W, N> weight;
  };

  RowRef<R> residual_out;
  RowRef<const W> next_weight;
  RowRef<Dst> ffn_input;
  float next_eps;
  float next_center;

  FN_HOST_DEVICE void enter(Row row, int col) {
    residual_out.enter(row, col);
    next_weight.enter(row, col);
    ffn_input.enter(row, col);
  }
  FN_HOST_DEVICE Given read() const { return {}; }

  template <int N, class Access>
  FN_HOST_DEVICE void put_again(const Pack<R, N>& again, const At<Access>& at) const {
    residual_out.store(again, at);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void fetch_again(Pack<R, N>& again, const At<Access>& at) const {
    residual_out.load(again, at);
  }
  FN_HOST_DEVICE Rms<Options> stats() const { return {next_eps}; }

  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>& raw, const At<Access>& at) const {
    next_weight.load(raw.weight, at);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void put(float (&v)[N], const Raw<N>& raw, const typename Rms<Options>::State& state,
                          const At<Access>& at) const {
    float gain[N];
    widen(gain, raw.weight);
    Rms<Options>::normalize(v, state);
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = fp::mul(v[i], fp::add(gain[i], next_center));
    Pack<Dst, N> pack;
    narrow(pack, v);
    ffn_input.store(pack, at);
  }
};

}  // namespace flashnorm
