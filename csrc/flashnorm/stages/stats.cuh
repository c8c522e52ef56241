// The statistics, and what is saved of them. The interface is described in stages.cuh.
#pragma once

#include "../fp.cuh"
#include "../vec.cuh"

namespace flashnorm {

// The sums of a row's d = sub(h, mean) and of their squares.
struct Deviations {
  float values;
  float squares;
};

// The sums of one row, as those of several are asked for.
template <class Sums>
struct OneRow {
  Sums& row;

  FN_HOST_DEVICE int hidden_size() const { return row.hidden_size(); }
  FN_HOST_DEVICE void sum(float (&sums)[1]) { sums[0] = row.sum(); }
  FN_HOST_DEVICE void sum_squares(float (&sums)[1]) { sums[0] = row.sum_squares(); }
  FN_HOST_DEVICE void deviations(Deviations (&found)[1], const float (&means)[1]) { found[0] = row.deviations(means[0]); }
};
template <class Stats, class Sums>
FN_HOST_DEVICE typename Stats::State state_of(const Stats& stats, Sums& row) {
  OneRow<Sums> rows{row};
  typename Stats::State states[1];
  stats.compute(states, rows);
  return states[0];
}

// rstd = div(1, sqrt(add(div(sum(h*h), H), eps))); n = mul(h, rstd)
template <class Options>
struct Rms {
  static constexpr int kSums = 1;
  struct State {
    float rstd;
  };

  float eps;

  template <int kRows, class Sums>
  FN_HOST_DEVICE void compute(State (&states)[kRows], Sums& rows) const {
    float squares[kRows];
    rows.sum_squares(squares);
    FN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      // Not `div_by`: its branch changes how the kernel is scheduled, and 8192 x 16384 took 164 us in place of 130.
      const float mean_square = fp::div(squares[r], float(rows.hidden_size()));
      states[r] = {fp::reciprocal(fp::sqrt(fp::add(mean_square, eps)))};
    }
  }
  template <bool kCentred = false, int N>
  FN_HOST_DEVICE static void normalize(float (&v)[N], const State& state) {
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = fp::mul(v[i], state.rstd);
  }
};

// v <- sub(v, mean) for the `count` elements that are there; a missing one stays the +0 that it is.
template <int N>
FN_HOST_DEVICE void centre(float (&v)[N], float mean, int count) {
  FN_UNROLL
  for (int i = 0; i < N; ++i) v[i] = fp::sub(v[i], i < count ? mean : 0.0f);
}

// m1 = div(sum(h), H); d = sub(h, m1); m2 = div(sum(d), H); var = max(0, fma(-m2, m2, div(sum(d*d), H)));
// rstd = div(1, sqrt(add(var, eps))); n = mul(sub(d, m2), rstd)
//
// The second mean is what the rounding of the first has left. The sums of d and of its squares need nothing but
// the first mean, so they are found together.
template <class Options>
struct MeanVar {
  static constexpr int kSums = 2;
  struct State {
    float mean;
    float rest;
    float rstd;
  };

  float eps;

  template <int kRows, class Sums>
  FN_HOST_DEVICE void compute(State (&states)[kRows], Sums& rows) const {
    const int count = rows.hidden_size();
    float means[kRows];
    rows.sum(means);
    FN_UNROLL
    for (int r = 0; r < kRows; ++r) means[r] = fp::div_by(means[r], count);
    Deviations sums[kRows];
    rows.deviations(sums, means);
    FN_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float rest = fp::div_by(sums[r].values, count);
      const float square = fp::fma(-rest, rest, fp::div_by(sums[r].squares, count));
      const float variance = square < 0.0f ? 0.0f : square;  // a NaN stays
      states[r] = {means[r], rest, fp::reciprocal(fp::sqrt(fp::add(variance, eps)))};
    }
  }
  // With `kCentred`, v is the row's d already.
  template <bool kCentred = false, int N>
  FN_HOST_DEVICE static void normalize(float (&v)[N], const State& state) {
    FN_UNROLL
    for (int i = 0; i < N; ++i) {
      const float d = kCentred ? v[i] : fp::sub(v[i], state.mean);
      v[i] = fp::mul(fp::sub(d, state.rest), state.rstd);
    }
  }
};

// Both means of MeanVar, fp32, one each a row.
template <class Options, class Mean, class Rest>
struct SaveMeans {
  PerRowRef<Mean> mean;
  PerRowRef<Rest> rest;

  FN_HOST_DEVICE void enter(Row row, int) {
    mean.enter(row);
    rest.enter(row);
  }
  template <class State>
  FN_HOST_DEVICE void put(const State& state, Row row) const {
    mean[row] = state.mean;
    rest[row] = state.rest;
  }
};

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

}  // namespace flashnorm
