// The stages: what a row kernel does to a row, one struct for each dataclass of flashnorm/program.py.
//
// A stage is named after its dataclass, `Name<Options, Elements...>`: Options carries the dataclass's
// fields as constants (a field `round_norm` is `kRoundNorm`) and, as `Input`, the element type of the
// program's first operand (the T of rT); Elements are the element types of the stage's operands, in
// order. Its members are its operands in that order, then its run-time scalars; it is an aggregate
// that the generated unit fills. A stage knows no thread, no tile and no plan. Arithmetic works on
// `float (&v)[N]` for any N, the same on host and device. A stage with operands has `enter(row, col)`, which
// moves them all to a place (RowRef::enter).
//
//   load    Kept              the element type that holds h exactly between the two passes
//           Raw<N>            what `fetch` reads
//           fetch(raw, at)    issues the reads
//           keep(kept, raw)   h, from what was read
//           save(kept, at)    writes what the stage stores besides (once for every element of the row)
//   stats   State             the row's statistics
//           compute(row)      from the sums `row` offers (row.sum_squares(), row.hidden_size())
//           normalize(v, state)
//   map     Raw<N>, fetch(raw, at), apply(v, raw)
//   store   put(v, at)
//   save    put(state, row)   called once a row
#pragma once

#include <type_traits>

#include "codec.cuh"
#include "fp.cuh"
#include "vec.cuh"

namespace flashnorm {

// ---------------------------------------------------------------- load
// h = f(x)
template <class Options, class X>
struct LoadRow {
  using Kept = X;
  template <int N>
  struct Raw {
    Pack<X, N> x;
  };

  RowRef<const X> x;

  FN_HOST_DEVICE void enter(Row row, int col) { x.enter(row, col); }
  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>& raw, const At<Access>& at) const {
    x.load_once(raw.x, at);
  }
  template <int N>
  FN_HOST_DEVICE void keep(Pack<Kept, N>& kept, const Raw<N>& raw) const {
    kept = raw.x;
  }
  template <int N, class Access>
  FN_HOST_DEVICE void save(const Pack<Kept, N>&, const At<Access>&) const {}
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
  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>& raw, const At<Access>& at) const {
    x.load_once(raw.x, at);
    residual.load_once(raw.residual, at);
  }
  template <int N>
  FN_HOST_DEVICE void keep(Pack<Kept, N>& kept, const Raw<N>& raw) const {
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

// ---------------------------------------------------------------- statistics
// rstd = div(1, sqrt(add(div(sum(h*h), H), eps))); n = mul(h, rstd)
template <class Options>
struct Rms {
  struct State {
    float rstd;
  };

  float eps;

  template <class Sums>
  FN_HOST_DEVICE State compute(Sums& row) const {
    const float mean_square = fp::div(row.sum_squares(), float(row.hidden_size()));
    return {fp::reciprocal(fp::sqrt(fp::add(mean_square, eps)))};
  }
  template <int N>
  FN_HOST_DEVICE static void normalize(float (&v)[N], const State& state) {
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = fp::mul(v[i], state.rstd);
  }
};

// ---------------------------------------------------------------- maps
// y = mul(n, g) with g = w, or add(w, offset); `round_norm`: n is rounded to the input's dtype first.
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

// ---------------------------------------------------------------- store
// One rounding to the destination's dtype.
template <class Options, class Dst>
struct Cast {
  RowRef<Dst> dst;

  FN_HOST_DEVICE void enter(Row row, int col) { dst.enter(row, col); }
  template <int N, class Access>
  FN_HOST_DEVICE void put(float (&v)[N], const At<Access>& at) const {
    Pack<Dst, N> pack;
    narrow(pack, v);
    dst.store(pack, at);
  }
};

// ---------------------------------------------------------------- saves
// rstd, fp32, one a row.
template <class Options, class Dst>
struct SaveRstd {
  PerRowRef<Dst> dst;

  FN_HOST_DEVICE void enter(Row row, int) { dst.enter(row); }
  template <class State>
  FN_HOST_DEVICE void put(const State& state, Row row) const {
    dst[row] = state.rstd;
  }
};

// ---------------------------------------------------------------- several maps, several saves
template <class... Stages>
struct Chain;

template <>
struct Chain<> {
  template <int N>
  struct Raw {};

  FN_HOST_DEVICE void enter(Row, int) {}
  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>&, const At<Access>&) const {}
  template <int N>
  FN_HOST_DEVICE void apply(float (&)[N], const Raw<N>&) const {}
  template <class State>
  FN_HOST_DEVICE void put(const State&, Row) const {}
};

template <class First, class... Rest>
struct Chain<First, Rest...> {
  // Only maps are fetched: a chain of saves has no Raw, so the name is looked up late.
  template <int N, class Stage = First>
  struct RawOf {
    typename Stage::template Raw<N> first;
    typename Chain<Rest...>::template Raw<N> rest;
  };
  template <int N>
  using Raw = RawOf<N>;

  First first;
  Chain<Rest...> rest;

  FN_HOST_DEVICE void enter(Row row, int col) {
    first.enter(row, col);
    rest.enter(row, col);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void fetch(RawOf<N>& raw, const At<Access>& at) const {
    first.fetch(raw.first, at);
    rest.fetch(raw.rest, at);
  }
  template <int N>
  FN_HOST_DEVICE void apply(float (&v)[N], const RawOf<N>& raw) const {
    first.apply(v, raw.first);
    rest.apply(v, raw.rest);
  }
  template <class State>
  FN_HOST_DEVICE void put(const State& state, Row row) const {
    first.put(state, row);
    rest.put(state, row);
  }
};

// ---------------------------------------------------------------- a program
template <class Program>
FN_HOST_DEVICE void enter(Program& program, Row row, int col) {
  program.load.enter(row, col);
  program.maps.enter(row, col);
  program.saves.enter(row, col);
  program.store.enter(row, col);
}

}  // namespace flashnorm
