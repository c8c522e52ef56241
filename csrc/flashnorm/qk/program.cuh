// Q and K of a token normalised and turned, V copied: what the CUDA and the CPU kernel share.
//
// The program and its arithmetic are those of flashnorm/program/qk.py. A kernel decides how the elements of a token
// are spread over threads, and nothing else.
#pragma once

#include <type_traits>

#include "../codec.cuh"
#include "../codec8.cuh"
#include "../vec.cuh"
#include "turn.cuh"

namespace flashnorm {

// What is normalised together.
enum class Scope { kHidden, kHead, kNone };

constexpr int kMaxHeadDim = 512;
constexpr int kParts = 3;  // Q, K, V
enum Part { kQ, kK, kV };

// What a launch knows of heads, positions and frequencies: bound to the kernel, and handed over by value.
struct QkLayout {
  int heads[kParts];
  int head_dim;
  int rotary_dim;
  int grid[3];      // frames, height, width
  int axis_end[2];  // the first pair that turns with the height, and with the width
  float attention;
  Frequency frequency[kMaxHeadDim / 2];

  FN_HOST_DEVICE int pairs() const { return rotary_dim / 2; }
  FN_HOST_DEVICE int width(int part) const { return heads[part] * head_dim; }
  // Where a part begins in a token.
  FN_HOST_DEVICE int start(int part) const {
    return (part > kQ ? width(kQ) : 0) + (part > kK ? width(kK) : 0);
  }
};

// A token's place in the grid of its sequence.
struct GridPlace {
  int axis[3];

  // What a pair turns by.
  FN_HOST_DEVICE int position(const QkLayout& layout, int pair) const {
    return pair < layout.axis_end[0] ? axis[0] : pair < layout.axis_end[1] ? axis[1] : axis[2];
  }
};

// The same from a token's number.
FN_HOST_DEVICE GridPlace grid_place(const QkLayout& layout, int64_t token) {
  const int plane = layout.grid[1] * layout.grid[2];
  const int i = int(token % (int64_t(layout.grid[0]) * plane));
  return {i / plane, i % plane / layout.grid[2], i % layout.grid[2]};
}

// Heads of every token: a "heads" operand.
template <class T>
struct HeadsRef {
  T* ptr;
  int64_t outer_stride;
  int64_t inner_stride;
  int64_t head_stride;

  FN_HOST_DEVICE T* token(Row row) const { return ptr + row.outer * outer_stride + row.inner * inner_stride; }
  FN_HOST_DEVICE T* at(Row row, int head) const { return token(row) + head * head_stride; }
};

// A gain for every element of every head, or (stride 0) for every one of a head: a "gain" operand.
template <class T>
struct GainRef {
  const T* ptr;
  int64_t head_stride;

  FN_HOST_DEVICE const T* at(int head) const { return ptr + head * head_stride; }
};
template <>
struct GainRef<void> {};

// What a program does not have.
struct Nothing {};

// X: of Q, K and V; QW, KW: of the weights, or void; Index: of positions, or void; Out: of the results.
template <class Options_, class X_, class QW_, class KW_, class Index_, class Out_>
struct QkNormRope {
  using Options = Options_;
  using X = X_;
  using QW = QW_;
  using KW = KW_;
  using Index = Index_;
  using Out = Out_;
  static constexpr bool kCached = !std::is_void_v<Index>;
  static constexpr bool kCoded = sizeof(Out) == 1;
  static constexpr bool kNormed = Options::kScope != Scope::kNone;

  RowRef<const X> x;
  GainRef<QW> q_weight;
  GainRef<KW> k_weight;
  std::conditional_t<kCached, PerRowRef<std::conditional_t<kCached, const Index, const int>>, Nothing> positions;
  std::conditional_t<kCached, PoolRef<const float>, Nothing> cos_sin;
  HeadsRef<Out> out[kParts];
  float eps;
  float q_scale;
  float v_scale;
  QkLayout layout;

  template <int kPart>
  FN_HOST_DEVICE const auto& weight() const {
    if constexpr (kPart == kQ) {
      return q_weight;
    } else {
      return k_weight;
    }
  }

  // rstd of the sum of the squares of `count` elements.
  FN_HOST_DEVICE float rstd(float sum, int count) const {
    return fp::reciprocal(fp::sqrt(fp::add(fp::div(sum, float(count)), eps)));
  }
};

// The weight's element type, or void where there is none or nothing is normalised.
template <class Program, int kPart>
using WeightOf = std::conditional_t<!Program::kNormed, void,
                                    std::conditional_t<kPart == kQ, typename Program::QW, typename Program::KW>>;

// v <- what turns: the norm with its weight, rounded where results have 16 bits. `gain` is not looked at without a
// weight.
template <class Program, int kPart, int N>
FN_HOST_DEVICE void normalize(float (&v)[N], const float (&gain)[N], float rstd) {
  if constexpr (Program::kNormed) {
    FN_UNROLL
    for (int i = 0; i < N; ++i) v[i] = fp::mul(v[i], rstd);
    if constexpr (!std::is_void_v<WeightOf<Program, kPart>>) {
      FN_UNROLL
      for (int i = 0; i < N; ++i) v[i] = fp::mul(v[i], gain[i]);
    }
    if constexpr (!Program::kCoded) round_to<typename Program::X>(v);
  }
}

// What becomes of a channel: its own value and its partner's, and the sine of the pair with its sign for this side of
// it: -mul(b, sin) is mul(b, -sin).
FN_HOST_DEVICE float turned(float own, float partner, float cos, float signed_sin) {
  return fp::fma(own, cos, fp::mul(partner, signed_sin));
}

}  // namespace flashnorm
