// The loads of gated norms and of diffusion transformers. The interface is described in stages.cuh.
#pragma once

#include <tuple>
#include <type_traits>

#include "../activation.cuh"
#include "../codec.cuh"
#include "../fp.cuh"
#include "parts.cuh"

namespace flashnorm {

using Factor = Where;  // the name that generated options have for it

// h = fma(x, mul(g, s), residual) with g = gate or add(gate, gate_bias); without a gate fma(x, s, residual), or
// mul(x, s) without a residual. It is stored in `residual_out`. What is kept is what is normalised, as in AddResidual.
// `More` are the element types of the operands behind x: residual, gate, gate_bias and s, as far as there are such,
// then residual_out.
template <class Options, class X, class... More>
struct GateResidual {
  static constexpr bool kOnDevice = Options::kFactor == Factor::kDevice;
  static constexpr int kGateAt = Options::kResidual, kBiasAt = kGateAt + Options::kGate;
  static constexpr int kFactorAt = kBiasAt + Options::kGateBias, kOutAt = kFactorAt + kOnDevice;
  static_assert(sizeof...(More) == kOutAt + 1, "an element type an operand");
  static_assert(Options::kResidual || !Options::kGate, "a gate goes with a residual");

  template <bool kThere, int kAt>
  using Element = std::conditional_t<kThere, typename Nth<kAt, More...>::Type, Nothing>;
  using R = Element<Options::kResidual, 0>;
  using G = Element<Options::kGate, kGateAt>;
  using B = Element<Options::kGateBias, kBiasAt>;
  using S = Element<kOnDevice, kFactorAt>;
  using Sum = Element<true, kOutAt>;
  static constexpr int kVectorBytes = (Options::kGate ? int(sizeof(G)) : 0) + (Options::kGateBias ? int(sizeof(B)) : 0);

  using Kept = std::conditional_t<Options::kRounded, Sum, float>;
  template <int N>
  struct Raw {
    Pack<X, N> x;
    OptionalPack<R, N> residual;
  };
  template <int N>
  struct GateVecs {
    Pack<G, N> gate;
    OptionalPack<B, N> bias;
  };
  // Not there without a gate: the name is looked up by VecsOf.
  template <int N>
  using Vecs = std::enable_if_t<Options::kGate && N != 0, GateVecs<N>>;

  RowRef<const X> x;
  OptionalRef<R> residual;
  OptionalRef<G> gate;
  OptionalRef<B> gate_bias;
  std::conditional_t<kOnDevice, const S*, Nothing> input_factor;
  RowRef<Sum> residual_out;
  float factor;

  GateResidual() = default;
  template <class... Given>
  GateResidual(RowRef<const X> row, Given... given) : x(row) {
    const auto rest = std::make_tuple(given...);
    if constexpr (Options::kResidual) residual = std::get<0>(rest);
    if constexpr (Options::kGate) gate = std::get<kGateAt>(rest);
    if constexpr (Options::kGateBias) gate_bias = std::get<kBiasAt>(rest);
    if constexpr (kOnDevice) input_factor = std::get<kFactorAt>(rest);
    residual_out = std::get<kOutAt>(rest);
    if constexpr (!kOnDevice) factor = std::get<kOutAt + 1>(rest);
  }

  FN_HOST_DEVICE void enter(Row row, int col) {
    x.enter(row, col);
    if constexpr (Options::kResidual) residual.enter(row, col);
    if constexpr (Options::kGate) gate.enter(row, col);
    if constexpr (Options::kGateBias) gate_bias.enter(row, col);
    residual_out.enter(row, col);
  }
  template <class Access>
  FN_HOST_DEVICE void touch(const At<Access>& at) const {
    Raw<kGroup> raw;
    fetch(raw, at);
    if constexpr (Options::kGate) {
      GateVecs<kGroup> vecs;
      fetch_vecs(vecs, at);
    }
  }
  FN_HOST_DEVICE GateResidual locate(Row, bool) const {
    GateResidual located = *this;
    if constexpr (kOnDevice) located.factor = widened(*input_factor);
    return located;
  }

  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>& raw, const At<Access>& at) const {
    x.load_once(raw.x, at);
    if constexpr (Options::kResidual) residual.load_once(raw.residual, at);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void fetch_vecs(GateVecs<N>& vecs, const At<Access>& at) const {
    gate.load(vecs.gate, at);
    if constexpr (Options::kGateBias) gate_bias.load(vecs.bias, at);
  }
  bool vecs_same_below() const {
    if constexpr (Options::kGateBias) {
      if (gate_bias.inner_stride != 0) return false;
    }
    return gate.inner_stride == 0;
  }
  template <int N>
  FN_HOST_DEVICE void keep(Pack<Kept, N>& kept, const Raw<N>& raw, const GateVecs<N>& vecs, int count) const {
    float gain[N];
    widen(gain, vecs.gate);
    if constexpr (Options::kGateBias) {
      float bias[N];
      widen(bias, vecs.bias);
      FN_UNROLL
      for (int i = 0; i < N; ++i) gain[i] = fp::add(gain[i], bias[i]);
    }
    FN_UNROLL
    for (int i = 0; i < N; ++i) gain[i] = fp::mul(gain[i], factor);
    join(kept, raw, gain, count);
  }
  template <int N>
  FN_HOST_DEVICE void keep(Pack<Kept, N>& kept, const Raw<N>& raw, int count) const {
    float gain[N];
    FN_UNROLL
    for (int i = 0; i < N; ++i) gain[i] = factor;
    join(kept, raw, gain, count);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void save(const Pack<Kept, N>& kept, const At<Access>& at) const {
    if constexpr (Options::kRounded) {
      residual_out.store(kept, at);
    } else {
      float v[N];
      Pack<Sum, N> sum;
      widen(v, kept);
      narrow(sum, v);
      residual_out.store(sum, at);
    }
  }

 private:
  template <int N>
  FN_HOST_DEVICE static void join(Pack<Kept, N>& kept, const Raw<N>& raw, const float (&gain)[N], int count) {
    float v[N];
    widen(v, raw.x);
    if constexpr (Options::kResidual) {
      float r[N];
      widen(r, raw.residual);
      FN_UNROLL
      for (int i = 0; i < N; ++i) v[i] = fp::fma(v[i], gain[i], r[i]);
    } else {
      FN_UNROLL
      for (int i = 0; i < N; ++i) v[i] = fp::mul(v[i], gain[i]);
    }
    clear_missing(v, count);  // a gain may be infinite
    narrow(kept, v);
  }
};

// h = mul(f(x), add(w, center))
template <class Options, class X, class W>
struct LoadGained {
  using Kept = float;
  template <int N>
  struct Raw {
    Pack<X, N> x;
  };
  template <int N>
  struct Vecs {
    Pack<W, N> gain;
  };

  RowRef<const X> x;
  RowRef<const W> gain;
  float center;

  FN_HOST_DEVICE void enter(Row row, int col) {
    x.enter(row, col);
    gain.enter(row, col);
  }
  template <class Access>
  FN_HOST_DEVICE void touch(const At<Access>& at) const {
    Raw<kGroup> raw;
    Vecs<kGroup> vecs;
    fetch(raw, at);
    fetch_vecs(vecs, at);
  }
  FN_HOST_DEVICE LoadGained locate(Row, bool) const { return *this; }

  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>& raw, const At<Access>& at) const {
    x.load_once(raw.x, at);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void fetch_vecs(Vecs<N>& vecs, const At<Access>& at) const {
    gain.load(vecs.gain, at);
  }
  bool vecs_same_below() const { return gain.inner_stride == 0; }
  template <int N>
  FN_HOST_DEVICE void keep(Pack<Kept, N>& kept, const Raw<N>& raw, const Vecs<N>& vecs, int count) const {
    float v[N], w[N];
    widen(v, raw.x);
    widen(w, vecs.gain);
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = fp::mul(v[i], fp::add(w[i], center));
    clear_missing(v, count);
    narrow(kept, v);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void save(const Pack<Kept, N>&, const At<Access>&) const {}
};

// h = mul(f(x), act(gate)). What a row lacks is +0 under any gate.
template <class Options, class X, class G>
struct LoadGated {
  using Kept = float;
  template <int N>
  struct Raw {
    Pack<X, N> x;
    Pack<G, N> gate;
  };

  RowRef<const X> x;
  RowRef<const G> gate;

  FN_HOST_DEVICE void enter(Row row, int col) {
    x.enter(row, col);
    gate.enter(row, col);
  }
  template <class Access>
  FN_HOST_DEVICE void touch(const At<Access>& at) const {
    Raw<kGroup> raw;
    fetch(raw, at);
  }
  FN_HOST_DEVICE LoadGated locate(Row, bool) const { return *this; }

  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>& raw, const At<Access>& at) const {
    x.load_once(raw.x, at);
    gate.load_once(raw.gate, at);
  }
  template <int N>
  FN_HOST_DEVICE void keep(Pack<Kept, N>& kept, const Raw<N>& raw, int) const {
    float v[N], g[N];
    widen(g, raw.gate);
    activate<Options::kActivation, typename Options::Input>(g);
    widen(v, raw.x);
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = fp::mul(v[i], g[i]);
    narrow(kept, v);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void save(const Pack<Kept, N>&, const At<Access>&) const {}
};

}  // namespace flashnorm
