// The load stages: where h comes from. The interface is described in stages.cuh.
#pragma once

#include <type_traits>

#include "../codec8.cuh"
#include "../fp.cuh"
#include "../vec.cuh"

namespace flashnorm {

// h = f(x)
template <class Options, class X, class... More>
struct LoadRow {
  static_assert(sizeof...(More) == 0, "an index is int32 or int64, an input scale float");

  using Kept = X;
  template <int N>
  struct Raw {
    Pack<X, N> x;
  };

  RowRef<const X> x;

  FN_HOST_DEVICE void enter(Row row, int col) { x.enter(row, col); }
  template <class Access>
  FN_HOST_DEVICE void touch(const At<Access>& at) const {
    Raw<kGroup> unused;
    fetch(unused, at);
  }
  FN_HOST_DEVICE LoadRow locate(Row, bool) const { return *this; }

  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>& raw, const At<Access>& at) const {
    x.load_once(raw.x, at);
  }
  template <int N>
  FN_HOST_DEVICE void keep(Pack<Kept, N>& kept, const Raw<N>& raw, int) const {
    kept = raw.x;
  }
  template <int N, class Access>
  FN_HOST_DEVICE void save(const Pack<Kept, N>&, const At<Access>&) const {}
};

// A row that an index picked, or a row of NaN where it picked none: nothing is read then.
template <class X>
struct PickedRow {
  using Kept = X;
  template <int N>
  struct Raw {
    Pack<X, N> x;
  };

  RowRef<const X> x;
  bool lost;

  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>& raw, const At<Access>& at) const {
    if (lost) return fill(raw.x, kNanWord);
    x.load_once(raw.x, at);
  }
  template <int N>
  FN_HOST_DEVICE void keep(Pack<Kept, N>& kept, const Raw<N>& raw, int) const {
    kept = raw.x;
  }
  template <int N, class Access>
  FN_HOST_DEVICE void save(const Pack<Kept, N>&, const At<Access>&) const {}
};

// h = mul(float(x), scale), x in int8. Where an index picked no row, nothing is read and the scale is NaN.
template <class X>
struct ScaledRow {
  using Kept = float;
  template <int N>
  struct Raw {
    Pack<X, N> x;
  };

  RowRef<const X> x;
  float scale;
  bool lost;

  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>& raw, const At<Access>& at) const {
    if (lost) return clear(raw.x);
    x.load_once(raw.x, at);
  }
  // A missing element is +0, whatever the scale.
  template <int N>
  FN_HOST_DEVICE void keep(Pack<Kept, N>& kept, const Raw<N>& raw, int count) const {
    float v[N];
    widen(v, raw.x);
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = i < count ? fp::mul(v[i], scale) : 0.0f;
    narrow(kept, v);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void save(const Pack<Kept, N>&, const At<Access>&) const {}
};

// LoadRow(scaled)
template <class Options, class X>
struct LoadRow<Options, X, float> {
  RowRef<const X> x;
  PerRowRef<const float> input_scale;

  FN_HOST_DEVICE void enter(Row row, int col) {
    x.enter(row, col);
    input_scale.enter(row);
  }
  template <class Access>
  FN_HOST_DEVICE void touch(const At<Access>& at) const {
    Pack<X, kGroup> unused;
    x.load_once(unused, at);
  }
  FN_HOST_DEVICE ScaledRow<X> locate(Row row, bool there) const {
    return {x, there ? input_scale[row] : 0.0f, false};
  }
};

// LoadRow(indexed). What the index says is not known before the wait for earlier kernels.
template <class Options, class X, class Index>
struct LoadRow<Options, X, Index> {
  PoolRef<const X> x;
  PerRowRef<const Index> row_index;

  FN_HOST_DEVICE void enter(Row row, int col) {
    x.enter(col);
    row_index.enter(row);
  }
  template <class Access>
  FN_HOST_DEVICE void touch(const At<Access>&) const {}
  FN_HOST_DEVICE PickedRow<X> locate(Row row, bool there) const {
    // Row 0 stands in for rows that are not there, and is not read. (A null pointer would cost the device compiler
    // the knowledge that it points to global memory.)
    const int64_t index = there ? int64_t(row_index[row]) : 0;
    const bool lost = there && !x.has(index);
    return {{x.row(lost ? 0 : index), 0, 0}, lost};
  }
};

// LoadRow(indexed, scaled)
template <class Options, class X, class Index>
struct LoadRow<Options, X, Index, float> {
  PoolRef<const X> x;
  PerRowRef<const Index> row_index;
  PoolRef<const float> input_scale;

  FN_HOST_DEVICE void enter(Row row, int col) {
    x.enter(col);
    row_index.enter(row);
  }
  template <class Access>
  FN_HOST_DEVICE void touch(const At<Access>&) const {}
  FN_HOST_DEVICE ScaledRow<X> locate(Row row, bool there) const {
    const int64_t index = there ? int64_t(row_index[row]) : 0;
    const bool lost = there && !x.has(index);
    const float scale = lost ? float_of(kNanWord) : there ? *input_scale.row(index) : 0.0f;
    return {{x.row(lost ? 0 : index), 0, 0}, scale, lost};
  }
};

// s = add(x, residual), stored rounded to the residual's dtype: in the residual itself, or in `dst`.
// What is kept is what is normalised: the stored sum widened again (`rounded`), or the fp32 one.
template <class Options, class X, class R, class Dst = void>
struct AddResidual {
  static constexpr bool kInPlace = std::is_void_v<Dst>;
  static_assert(kInPlace || std::is_same_v<Dst, R>, "the sum is stored in the residual's dtype");

  using Kept = std::conditional_t<Options::kRounded, R, float>;
  template <int N>
  struct Raw {
    Pack<X, N> x;
    Pack<R, N> residual;
  };

  RowRef<const X> x;
  RowRef<std::conditional_t<kInPlace, R, const R>> residual;
  RowRef<R> dst{nullptr, 0, 0};  // unused in place

  FN_HOST_DEVICE void enter(Row row, int col) {
    x.enter(row, col);
    residual.enter(row, col);
    if constexpr (!kInPlace) dst.enter(row, col);
  }
  template <class Access>
  FN_HOST_DEVICE void touch(const At<Access>& at) const {
    Raw<kGroup> unused;
    fetch(unused, at);
  }
  FN_HOST_DEVICE AddResidual locate(Row, bool) const { return *this; }

  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>& raw, const At<Access>& at) const {
    x.load_once(raw.x, at);
    residual.load_once(raw.residual, at);
  }
  template <int N>
  FN_HOST_DEVICE void keep(Pack<Kept, N>& kept, const Raw<N>& raw, int) const {
    float v[N], r[N];
    widen(v, raw.x);
    widen(r, raw.residual);
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = fp::add(v[i], r[i]);
    narrow(kept, v);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void save(const Pack<Kept, N>& kept, const At<Access>& at) const {
    Pack<R, N> sum;
    if constexpr (std::is_same_v<Kept, R>) {
      sum = kept;
    } else {
      float v[N];
      widen(v, kept);
      narrow(sum, v);
    }
    if constexpr (kInPlace) {
      residual.store(sum, at);
    } else {
      dst.store(sum, at);
    }
  }
};

}  // namespace flashnorm
