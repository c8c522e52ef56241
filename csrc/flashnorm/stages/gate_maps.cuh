// The maps of gated norms and of diffusion transformers. The interface is described in stages.cuh.
#pragma once

#include <tuple>
#include <type_traits>

#include "../activation.cuh"
#include "../codec.cuh"
#include "../fp.cuh"
#include "maps.cuh"
#include "parts.cuh"

namespace flashnorm {

enum class Alpha { kVec, kValue };

// y = mul(y, act(gate))
template <class Options, class G>
struct Gate : NoOperands {
  template <int N>
  struct Rows {
    Pack<G, N> gate;
  };

  RowRef<const G> gate;

  FN_HOST_DEVICE Gate(RowRef<const G> row) : gate(row) {}

  FN_HOST_DEVICE void enter(Row row, int col) { gate.enter(row, col); }
  template <int N, class Access>
  FN_HOST_DEVICE void fetch_rows(Rows<N>& rows, const At<Access>& at) const {
    gate.load_once(rows.gate, at);
  }
  template <int N>
  FN_HOST_DEVICE void apply(float (&v)[N], const Raw<N>&, const Rows<N>& rows) const {
    float g[N];
    widen(g, rows.gate);
    activate<Options::kActivation, typename Options::Input>(g);
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = fp::mul(v[i], g[i]);
  }
};

// y = fma(n, add(1, s), t): s = mod_scale or add(mod_scale, mod_scale_bias), t likewise of shift. `More` are the element
// types of the operands in that order, as far as there are such.
template <class Options, class... More>
struct ScaleShift {
  static constexpr int kScaleBiasAt = 1, kShiftAt = 1 + Options::kScaleBias, kShiftBiasAt = kShiftAt + 1;
  static_assert(sizeof...(More) == kShiftBiasAt + Options::kShiftBias, "an element type an operand");
  static constexpr int kVectorBytes = (int(sizeof(More)) + ...);

  template <bool kThere, int kAt>
  using Element = std::conditional_t<kThere, typename Nth<kAt, More...>::Type, Nothing>;
  using S = Element<true, 0>;
  using SB = Element<Options::kScaleBias, kScaleBiasAt>;
  using T = Element<true, kShiftAt>;
  using TB = Element<Options::kShiftBias, kShiftBiasAt>;

  template <int N>
  struct Raw {
    Pack<S, N> scale;
    OptionalPack<SB, N> scale_bias;
    Pack<T, N> shift;
    OptionalPack<TB, N> shift_bias;
  };

  RowRef<const S> scale;
  OptionalRef<SB> scale_bias;
  RowRef<const T> shift;
  OptionalRef<TB> shift_bias;

  template <class... Given>
  ScaleShift(RowRef<const S> first, Given... given) : scale(first) {
    const auto all = std::make_tuple(first, given...);
    if constexpr (Options::kScaleBias) scale_bias = std::get<kScaleBiasAt>(all);
    shift = std::get<kShiftAt>(all);
    if constexpr (Options::kShiftBias) shift_bias = std::get<kShiftBiasAt>(all);
  }

  FN_HOST_DEVICE void enter(Row row, int col) {
    scale.enter(row, col);
    if constexpr (Options::kScaleBias) scale_bias.enter(row, col);
    shift.enter(row, col);
    if constexpr (Options::kShiftBias) shift_bias.enter(row, col);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>& raw, const At<Access>& at) const {
    scale.load(raw.scale, at);
    if constexpr (Options::kScaleBias) scale_bias.load(raw.scale_bias, at);
    shift.load(raw.shift, at);
    if constexpr (Options::kShiftBias) shift_bias.load(raw.shift_bias, at);
  }
  template <int N>
  FN_HOST_DEVICE void apply(float (&v)[N], const Raw<N>& raw) const {
    float gain[N], bias[N];
    biased<Options::kScaleBias>(gain, raw.scale, raw.scale_bias);
    biased<Options::kShiftBias>(bias, raw.shift, raw.shift_bias);
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = fp::fma(v[i], fp::add(1.0f, gain[i]), bias[i]);
  }

 private:
  template <bool kBiased, int N, class Vec, class Bias>
  FN_HOST_DEVICE static void biased(float (&v)[N], const Vec& vec, const Bias& bias) {
    widen(v, vec);
    if constexpr (kBiased) {
      float b[N];
      widen(b, bias);
      FN_UNROLL
      for (int i = 0; i < N; ++i) v[i] = fp::add(v[i], b[i]);
    }
  }
};

// y = fma(beta, n, mul(alpha, residual)); alpha is a vector, or comes with the launch. `More` are the element types of
// [alpha], beta, residual.
template <class Options, class... More>
struct MixResidual {
  static constexpr bool kVec = Options::kAlpha == Alpha::kVec;
  static_assert(sizeof...(More) == 2 + kVec, "an element type an operand");
  using A = typename Nth<0, More...>::Type;
  using B = typename Nth<int(kVec), More...>::Type;
  using R = typename Nth<1 + int(kVec), More...>::Type;

  template <int N>
  struct Raw {
    std::conditional_t<kVec, Pack<A, N>, Nothing> alpha;
    Pack<B, N> beta;
  };
  template <int N>
  struct Rows {
    Pack<R, N> residual;
  };

  std::conditional_t<kVec, RowRef<const A>, float> alpha;
  RowRef<const B> beta;
  RowRef<const R> residual;

  MixResidual(RowRef<const B> second, RowRef<const R> row, float number)
      : alpha(number), beta(second), residual(row) {}
  MixResidual(RowRef<const A> first, RowRef<const B> second, RowRef<const R> row)
      : alpha(first), beta(second), residual(row) {}

  FN_HOST_DEVICE void enter(Row row, int col) {
    if constexpr (kVec) alpha.enter(row, col);
    beta.enter(row, col);
    residual.enter(row, col);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>& raw, const At<Access>& at) const {
    if constexpr (kVec) alpha.load(raw.alpha, at);
    beta.load(raw.beta, at);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void fetch_rows(Rows<N>& rows, const At<Access>& at) const {
    residual.load_once(rows.residual, at);
  }
  template <int N>
  FN_HOST_DEVICE void apply(float (&v)[N], const Raw<N>& raw, const Rows<N>& rows) const {
    float b[N], r[N];
    widen(b, raw.beta);
    widen(r, rows.residual);
    if constexpr (kVec) {
      float a[N];
      widen(a, raw.alpha);
      FN_UNROLL
      for (int i = 0; i < N; ++i) r[i] = fp::mul(a[i], r[i]);
    } else {
      FN_UNROLL
      for (int i = 0; i < N; ++i) r[i] = fp::mul(alpha, r[i]);
    }
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = fp::fma(b[i], v[i], r[i]);
  }
};

}  // namespace flashnorm
