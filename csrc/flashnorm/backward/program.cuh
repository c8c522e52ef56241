// What a backward does to a row (arithmetic.md, section 6), one struct for flashnorm/program/backward.py's dataclass.
//
// Arithmetic works on `float (&v)[N]` for any N, the same on host and device. What a program has not is void, and
// costs nothing.
#pragma once

#include <type_traits>

#include "../codec.cuh"
#include "../fp.cuh"
#include "../vec.cuh"

namespace flashnorm {

// In place of an operand that is not there.
struct Absent {};

template <class T>
using RowOrAbsent = std::conditional_t<std::is_void_v<T>, Absent, RowRef<T>>;

// N elements of an operand, or nothing.
template <class T, int N>
struct Elements {
  using Type = Pack<std::remove_const_t<T>, N>;
  static constexpr int kBytes = Type::kBytes;
};
template <int N>
struct Elements<void, N> {
  using Type = Absent;
  static constexpr int kBytes = 0;
};

// The saved statistics of a row.
struct RowState {
  float mean;
  float rest;
  float rstd;
};

// The row's own sums: c, and b.
struct RowSums {
  float product;
  float value;
};

// Options carry the dataclass's fields as constants and T as `Input`; the other parameters are element types.
template <class Options_, class Dout_, class X_, class W_, class G_, class Dx_, class Dres_, class Dw_, class Db_>
struct Backward {
  using Options = Options_;
  using Dout = Dout_;
  using X = X_;
  using W = W_;
  using G = G_;
  using Dx = Dx_;
  using Dres = Dres_;
  using Dw = Dw_;
  using Db = Db_;

  static constexpr bool kLayer = Options::kLayer;
  static constexpr bool kWeight = !std::is_void_v<W>;
  static constexpr bool kJoins = !std::is_void_v<G>;
  static constexpr bool kDx = !std::is_void_v<Dx>, kDres = !std::is_void_v<Dres>;
  static constexpr bool kDw = !std::is_void_v<Dw>, kDb = !std::is_void_v<Db>;
  static constexpr bool kRows = kDx || kDres;       // gradients of rows are written
  static constexpr int kSums = int(kDw) + int(kDb);  // sums over rows
  static constexpr int kRowSums = kLayer ? 2 : 1;    // sums of a row

  RowRef<const Dout> dout;
  RowRef<const X> x;
  RowOrAbsent<std::add_const_t<W>> weight;
  std::conditional_t<kLayer, PerRowRef<const float>, Absent> mean;
  std::conditional_t<kLayer, PerRowRef<const float>, Absent> rest;
  PerRowRef<const float> rstd;
  RowOrAbsent<std::add_const_t<G>> g_residual;
  RowOrAbsent<Dx> dx;
  RowOrAbsent<Dres> dresidual;
  RowOrAbsent<Dw> dweight;
  RowOrAbsent<Db> dbias;
  float* workspace;

  FN_HOST_DEVICE RowState state(Row row) const {
    if constexpr (kLayer) {
      return {mean[row], rest[row], rstd[row]};
    } else {
      return {0.0f, 0.0f, rstd[row]};
    }
  }

  // v = xh, from h.
  template <int N>
  FN_HOST_DEVICE static void normalize(float (&v)[N], const RowState& state) {
    FN_UNROLL
    for (int i = 0; i < N; ++i) {
      if constexpr (kLayer) v[i] = fp::sub(fp::sub(v[i], state.mean), state.rest);
      v[i] = fp::mul(v[i], state.rstd);
    }
  }

  // v = gw, from dout.
  template <int N, class Weights>
  FN_HOST_DEVICE static void weigh(float (&v)[N], const Weights& weights) {
    if constexpr (kWeight) {
      float gain[N];
      widen(gain, weights);
      FN_UNROLL
      for (int i = 0; i < N; ++i) {
        if constexpr (Options::kOffset != 0.0f) gain[i] = fp::add(gain[i], Options::kOffset);
        v[i] = fp::mul(v[i], gain[i]);
      }
    }
  }

  // v = the row's gradient before g_residual, from gw.
  template <int N>
  FN_HOST_DEVICE static void differentiate(float (&v)[N], const float (&xh)[N], const RowState& state,
                                           const RowSums& means) {
    FN_UNROLL
    for (int i = 0; i < N; ++i) {
      if constexpr (kLayer) v[i] = fp::sub(v[i], means.value);
      v[i] = fp::mul(state.rstd, fp::fma(-means.product, xh[i], v[i]));
    }
  }

  template <int N, class More>
  FN_HOST_DEVICE static void join(float (&v)[N], const More& more) {
    if constexpr (kJoins) {
      float g[N];
      widen(g, more);
      FN_UNROLL
      for (int i = 0; i < N; ++i) v[i] = fp::add(v[i], g[i]);
    }
  }

  // What dweight takes of xh.
  template <int N>
  FN_HOST_DEVICE static void round_norm(float (&xh)[N]) {
    if constexpr (Options::kRoundNorm) round_to<typename Options::Input>(xh);
  }

  // b and c, from the sums.
  FN_HOST_DEVICE static RowSums means_of(const float (&sums)[kRowSums], int hidden_size) {
    return {fp::div_by(sums[0], hidden_size), kLayer ? fp::div_by(sums[kRowSums - 1], hidden_size) : 0.0f};
  }
};

// ---------------------------------------------------------------- rows that share a weight row
// The specification's figures may be given otherwise, to make a test short: no figure below the order hangs on them.
#if !defined(FN_INNER_ROWS)
#define FN_INNER_ROWS 16
#define FN_PARTIAL_ELEMENTS (int64_t(1) << 20)
#define FN_LEAST_PARTIALS 128
#endif
constexpr int kInnerRows = FN_INNER_ROWS;  // of a partial, after which its inner accumulator joins the outer one
constexpr int64_t kPartialElements = FN_PARTIAL_ELEMENTS;
constexpr int kMostPartials = 8192, kLeastPartials = FN_LEAST_PARTIALS;

// P of arithmetic.md: a power of two that depends on R and H alone.
FN_HOST_DEVICE int partials_of(int64_t weight_rows, int hidden_size) {
  const int64_t count = kPartialElements / (weight_rows * hidden_size);
  int power = 1;
  while (int64_t(power) * 2 <= count && power < kMostPartials) power *= 2;
  const int least = weight_rows == 1 ? kLeastPartials : 1;
  return power < least ? least : power;
}

// How the rows of a launch belong to weight rows and partials.
struct Streams {
  int64_t rows;         // that share a weight row: t < rows
  int64_t weight_rows;  // r < weight_rows
  int64_t inner;        // of the row grid; rows [M, H] are one outer row of M
  int partials;         // P
  int shift;            // its logarithm: a division of 64 bits takes a device half a microsecond
  bool own;             // every row has a weight row of its own: nothing is added
  bool even;            // rows that share a weight row are equally far apart, in every operand

  // Row t of those that share weight row r.
  FN_HOST_DEVICE Row row(int64_t r, int64_t t) const {
    if (weight_rows > 1) return {t, r, 0};
    if (t < inner) return {0, t, 0};
    const int64_t outer = rows <= 0xFFFFFFFFll ? uint32_t(t) / uint32_t(inner) : t / inner;
    return {outer, t - outer * inner, 0};
  }
  // How many rows partial p has.
  FN_HOST_DEVICE int64_t count(int64_t p) const { return p < rows ? (rows - p + partials - 1) >> shift : 0; }
  // From a row to the next one of its partial, where they are evenly spaced: in elements of an operand.
  template <class Ref>
  FN_HOST_DEVICE int64_t step(const Ref& ref) const {
    return partials * (weight_rows > 1 ? ref.outer_stride : ref.inner_stride);
  }
  // Partials that have any rows.
  FN_HOST_DEVICE int64_t used() const { return rows < partials ? rows : partials; }
};

// One lane's sums of a row (reduce.cuh): of gw * xh, and of gw. What the row has not of them is +0, and is added.
template <class Program>
struct RowLane {
  static constexpr int kSums = Program::kRowSums;
  float at[kSums][kGroup];

  FN_HOST_DEVICE void clear() {
    FN_UNROLL
    for (int k = 0; k < kSums; ++k) {
      FN_UNROLL
      for (int i = 0; i < kGroup; ++i) at[k][i] = 0.0f;
    }
  }
  FN_HOST_DEVICE void first(const float (&gw)[kGroup], const float (&xh)[kGroup]) {
    FN_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      at[0][i] = fp::mul(gw[i], xh[i]);
      if constexpr (kSums > 1) at[1][i] = gw[i];
    }
  }
  FN_HOST_DEVICE void next(const float (&gw)[kGroup], const float (&xh)[kGroup]) {
    FN_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      at[0][i] = fp::fma(gw[i], xh[i], at[0][i]);
      if constexpr (kSums > 1) at[1][i] = fp::add(at[1][i], gw[i]);
    }
  }
  FN_HOST_DEVICE void missing() {
    FN_UNROLL
    for (int k = 0; k < kSums; ++k) {
      FN_UNROLL
      for (int i = 0; i < kGroup; ++i) at[k][i] = fp::add(at[k][i], 0.0f);
    }
  }
  FN_HOST_DEVICE float fold(int sum) const {
    const float (&p)[kGroup] = at[sum];
    const float even = fp::add(fp::add(p[0], p[4]), fp::add(p[2], p[6]));
    const float odd = fp::add(fp::add(p[1], p[5]), fp::add(p[3], p[7]));
    return fp::add(even, odd);
  }
};

}  // namespace flashnorm
