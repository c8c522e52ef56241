// The maps, from the normalised row to the result. The interface is described in stages.cuh.
#pragma once

#include "../activation.cuh"
#include "../codec.cuh"
#include "../fp.cuh"
#include "../vec.cuh"

namespace flashnorm {

// y = mul(n, g) with g = w, or add(w, offset); `round_norm`: n is rounded to T first.
template <class Options, class W>
struct Affine {
  template <int N>
  struct Raw {
    Pack<W, N> weight;
  };

  RowRef<const W> weight;

  FN_HOST_DEVICE void enter(Row row, int col) { weight.enter(row, col); }
  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>& raw, const At<Access>& at) const {
    weight.load(raw.weight, at);
  }
  template <int N>
  FN_HOST_DEVICE void apply(float (&v)[N], const Raw<N>& raw) const {
    float gain[N];
    widen(gain, raw.weight);
    if constexpr (Options::kRoundNorm) round_to<typename Options::Input>(v);
    FN_UNROLL
    for (int i = 0; i < N; ++i) {
      if constexpr (Options::kOffset != 0.0f) gain[i] = fp::add(gain[i], Options::kOffset);
      v[i] = fp::mul(v[i], gain[i]);
    }
  }
};

// y = fma(n, w, bias)
template <class Options, class W, class B>
struct AffineBias {
  template <int N>
  struct Raw {
    Pack<W, N> weight;
    Pack<B, N> bias;
  };

  RowRef<const W> weight;
  RowRef<const B> bias;

  FN_HOST_DEVICE void enter(Row row, int col) {
    weight.enter(row, col);
    bias.enter(row, col);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>& raw, const At<Access>& at) const {
    weight.load(raw.weight, at);
    bias.load(raw.bias, at);
  }
  template <int N>
  FN_HOST_DEVICE void apply(float (&v)[N], const Raw<N>& raw) const {
    float gain[N], shift[N];
    widen(gain, raw.weight);
    widen(shift, raw.bias);
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = fp::fma(v[i], gain[i], shift[i]);
  }
};

// y = add(n, bias)
template <class Options, class B>
struct Bias {
  template <int N>
  struct Raw {
    Pack<B, N> bias;
  };

  RowRef<const B> bias;

  FN_HOST_DEVICE void enter(Row row, int col) { bias.enter(row, col); }
  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>& raw, const At<Access>& at) const {
    bias.load(raw.bias, at);
  }
  template <int N>
  FN_HOST_DEVICE void apply(float (&v)[N], const Raw<N>& raw) const {
    float shift[N];
    widen(shift, raw.bias);
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = fp::add(v[i], shift[i]);
  }
};

// What a map that reads nothing has to fetch.
struct NoOperands {
  template <int N>
  struct Raw {};

  FN_HOST_DEVICE void enter(Row, int) {}
  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>&, const At<Access>&) const {}
};

// y = rT(y)
template <class Options>
struct Round : NoOperands {
  template <int N>
  FN_HOST_DEVICE void apply(float (&v)[N], const Raw<N>&) const {
    round_to<typename Options::Input>(v);
  }
};

// y = div(y, add(1, exp(-y)))
template <class Options>
struct Silu : NoOperands {
  static constexpr bool kDense = true;

  template <int N>
  FN_HOST_DEVICE void apply(float (&v)[N], const Raw<N>&) const {
    activate<Activation::kSilu, typename Options::Input>(v);
  }
};

}  // namespace flashnorm
