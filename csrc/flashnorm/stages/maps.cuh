// The maps, from the normalised row to the result. The interface is described in stages.cuh.
#pragma once

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

// y = div(y, add(1, exp(-y))), the exponential by the operations that program/stages.py lists.
template <class Options>
struct Silu : NoOperands {
  template <int N>
  FN_HOST_DEVICE void apply(float (&v)[N], const Raw<N>&) const {
#if FN_DEVICE_CODE
    // Where all are within +-87, and none is a NaN, nothing overflows: no clamps, and a quotient without a branch.
    bool usual = true;
    FN_UNROLL
    for (int i = 0; i < N; ++i) usual = usual && fabsf(v[i]) <= 87.0f;
    if (usual) {
      FN_UNROLL
      for (int i = 0; i < N; ++i) {
        const float d = fp::add(1.0f, exponential(-v[i]));
        float inverse;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(d));
        inverse = fp::fma(fp::fma(-d, inverse, 1.0f), inverse, inverse);
        const float near = fp::mul(v[i], inverse);
        const float quotient = fp::fma(fp::fma(-d, near, v[i]), inverse, near);
        v[i] = float_of((bits_of(quotient) & 0x7FFFFFFFu) | (bits_of(v[i]) & 0x80000000u));  // also of a -0
      }
      return;
    }
#endif
    FN_UNROLL
    for (int i = 0; i < N; ++i) {
      const float t = -v[i];
      const float e = exponential(t < -87.0f ? -87.0f : t);
      const float d = fp::add(1.0f, t > 88.5f ? float_of(0x7F800000u) : e);
      v[i] = t == t ? fp::div(v[i], d) : v[i];
    }
  }

 private:
  // exp(t) for -87 <= t <= 88.5.
  FN_HOST_DEVICE static float exponential(float t) {
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are a rounded integer
    constexpr float kLog2e = 0x1.715476p+0f, kLog2eRest = 0x1.4ae0cp-26f;
    const float shifted = fp::fma(t, kLog2e, kMagic);
    const float whole = fp::sub(shifted, kMagic);
    const float f = fp::fma(t, kLog2eRest, fp::fma(t, kLog2e, -whole));
    float p = fp::fma(0x1.41fb2ep-13f, f, 0x1.5f3f3p-10f);
    p = fp::fma(p, f, 0x1.3b2d5p-7f);
    p = fp::fma(p, f, 0x1.c6aee6p-5f);
    p = fp::fma(p, f, 0x1.ebfbdcp-3f);
    p = fp::fma(p, f, 0x1.62e43p-1f);
    p = fp::fma(p, f, 1.0f);
    return float_of(bits_of(p) + (bits_of(shifted) << 23));
  }
};

}  // namespace flashnorm
