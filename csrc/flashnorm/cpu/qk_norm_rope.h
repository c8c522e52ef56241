// Q and K normalised and turned, V copied, on a CPU: one token after the other, head by head.
//
// A head is normalised into a buffer, its pairs are turned from there, and it is stored: what comes between lies in
// the L1 cache. A token's sines and cosines stand ready for every channel, so that both pairings are one loop.
#pragma once

#include "access.h"

#include "../qk/program.cuh"
#include "convert.h"
#include "fp_mode.h"
#include "sum.h"
#include "threads.h"

namespace flashnorm {
namespace cpu {

// Elements of a token as `canonical_sum` asks for them.
template <class X>
struct Elements {
  const X* from;

  FN_HOST_DEVICE void whole(float (&h)[kStep], int col) const {
    Pack<X, kStep> pack;
    detail::load<true>(pack, from + col, Whole{});
    widen(h, pack);
  }
  FN_HOST_DEVICE void part(float (&h)[kStep], int col, int count) const {
    Pack<X, kStep> pack;
    detail::load<true>(pack, from + col, Ragged{count});
    widen(h, pack);
  }
};

// Elements that no head has lie behind every buffer: whole vectors are read and written there too.
constexpr int kBuffer = kMaxHeadDim + kStep;

template <class Program, class OutAccess>
class QkTokens {
  using X = typename Program::X;
  using Out = typename Program::Out;

 public:
  explicit QkTokens(const Program& program) : program_(program), layout_(program_.layout) {
    for (int p = 0; p < layout_.pairs(); ++p) {
      hi_[p] = layout_.frequency[p].hi;
      lo_[p] = layout_.frequency[p].lo;
    }
  }

  void token(Row row) {
    const X* x = program_.x.row(row);
    const bool lost = !find_turns(row);
    part<kQ>(x, row, lost);
    part<kK>(x, row, lost);
    copy(x + layout_.start(kV), row);
  }

 private:
  // visit(col, access) over the elements of a head.
  template <class Visit>
  FN_HOST_DEVICE void steps(const Visit& visit) const {
    int col = 0;
    for (; col + kStep <= layout_.head_dim; col += kStep) visit(col, Whole{});
    if (col < layout_.head_dim) visit(col, Ragged{layout_.head_dim - col});
  }

  // The sines and cosines of a token's channels; false where its position is outside of the table.
  bool find_turns(Row row) {
    const int pairs = layout_.pairs();
    alignas(64) float sin[kBuffer / 2], cos[kBuffer / 2];
    if constexpr (Program::kCached) {
      const int64_t index = int64_t(program_.positions[row]);
      if (!program_.cos_sin.has(index)) return false;
      const float* from = program_.cos_sin.row(index);
      for (int p = 0; p < pairs; ++p) cos[p] = from[p], sin[p] = from[pairs + p];
    } else {
      const GridPlace place = grid_place(layout_, row.number);
      alignas(64) float position[kBuffer / 2];
      for (int p = 0; p < pairs; ++p) position[p] = float(place.position(layout_, p));
      for (int p = 0; p < pairs; ++p) {
        const Turn turn = turn_of(position[p], {hi_[p], lo_[p]});
        sin[p] = turn.sin, cos[p] = turn.cos;
      }
    }
    for (int p = 0; p < pairs; ++p) {
      const int low = Program::Options::kInterleave ? 2 * p : p;
      const int high = Program::Options::kInterleave ? 2 * p + 1 : p + pairs;
      cos_[low] = cos_[high] = cos[p];
      sin_[low] = -sin[p], sin_[high] = sin[p];
    }
    return true;
  }

  template <int kPart>
  FN_HOST_DEVICE void part(const X* x, Row row, bool lost) {
    const X* from = x + layout_.start(kPart);
    float rstd = 0.0f;
    if (Program::Options::kScope == Scope::kHidden && layout_.heads[kPart] > 0) {
      const int width = layout_.width(kPart);
      rstd = program_.rstd(canonical_sum<Squares>(Elements<X>{from}, width), width);
    }
    for (int head = 0; head < layout_.heads[kPart]; ++head, from += layout_.head_dim) {
      if (Program::Options::kScope == Scope::kHead) {
        rstd = program_.rstd(canonical_sum<Squares>(Elements<X>{from}, layout_.head_dim), layout_.head_dim);
      }
      if (lost) {
        for (int col = 0; col < layout_.head_dim; ++col) v_[col] = float_of(kNanWord);
      } else {
        norm<kPart>(from, head, rstd);
        turn();
      }
      put(program_.out[kPart].at(row, head));
    }
  }

  template <int kPart>
  FN_HOST_DEVICE void norm(const X* from, int head, float rstd) {
    using W = WeightOf<Program, kPart>;
    steps([&](int col, auto access) __attribute__((always_inline)) {
      float v[kStep], gain[kStep] = {};
      Pack<X, kStep> pack;
      detail::load<true>(pack, from + col, access);
      widen(v, pack);
      if constexpr (!std::is_void_v<W>) {
        Pack<W, kStep> raw;
        detail::load<false>(raw, program_.template weight<kPart>().at(head) + col, access);
        widen(gain, raw);
      }
      normalize<Program, kPart>(v, gain, rstd);
      copy_bytes<sizeof(v)>(v_ + col, v);
    });
  }

  FN_HOST_DEVICE void turn() {
    const int rotary = layout_.rotary_dim, half = rotary / 2;
    alignas(64) float partner[kBuffer];
    alignas(64) float kept[kBuffer];
    if constexpr (Program::Options::kInterleave) {
      for (int i = 0; i < half; ++i) partner[2 * i] = v_[2 * i + 1], partner[2 * i + 1] = v_[2 * i];
    } else {
      std::memcpy(partner, v_ + half, half * sizeof(float));
      std::memcpy(partner + half, v_, half * sizeof(float));
    }
    const bool scaled = layout_.attention != 1.0f;
    // The last vector may reach into channels that do not turn: they stay as they are.
    const int beyond = (rotary + W - 1) / W * W;
    std::memcpy(kept, v_ + rotary, (beyond - rotary) * sizeof(float));
    for (int i = 0; i < rotary; i += W) {
      V v = fma(load(v_ + i), load(cos_ + i), load(partner + i) * load(sin_ + i));
      if (scaled) v = v * splat(layout_.attention);
      store(v_ + i, v);
    }
    std::memcpy(v_ + rotary, kept, (beyond - rotary) * sizeof(float));
  }

  FN_HOST_DEVICE void put(Out* to) {
    steps([&](int col, auto access) __attribute__((always_inline)) {
      float v[kStep];
      copy_bytes<sizeof(v)>(v, v_ + col);
      put_step(to + col, v, program_.q_scale, access);
    });
  }

  template <class Access>
  FN_HOST_DEVICE void put_step(Out* to, float (&v)[kStep], float scale, Access access) const {
    if constexpr (Program::kCoded) {
      FN_UNROLL
      for (int i = 0; i < kStep; ++i) v[i] = fp::mul(v[i], scale);
    }
    Pack<Out, kStep> pack;
    narrow(pack, v);
    put_pack(to, pack, access);
  }
  FN_HOST_DEVICE static void put_pack(Out* to, const Pack<Out, kStep>& pack, Whole) {
    detail::store(to, pack, OutAccess{});
  }
  FN_HOST_DEVICE static void put_pack(Out* to, const Pack<Out, kStep>& pack, Ragged access) {
    detail::store(to, pack, access);
  }

  void copy(const X* from, Row row) const {
    for (int head = 0; head < layout_.heads[kV]; ++head, from += layout_.head_dim) {
      Out* to = program_.out[kV].at(row, head);
      steps([&](int col, auto access) __attribute__((always_inline)) {
        Pack<X, kStep> pack;
        detail::load<true>(pack, from + col, access);
        if constexpr (Program::kCoded) {
          float v[kStep];
          widen(v, pack);
          put_step(to + col, v, program_.v_scale, access);
        } else {
          put_pack(to + col, pack, access);
        }
      });
    }
  }

  const Program program_;  // a copy: no store can change its pointers and strides
  const QkLayout& layout_;
  alignas(64) float hi_[kBuffer / 2];
  alignas(64) float lo_[kBuffer / 2];
  alignas(64) float cos_[kBuffer] = {};
  alignas(64) float sin_[kBuffer] = {};  // with the sign that it has for a channel
  alignas(64) float v_[kBuffer];
};

}  // namespace cpu
}  // namespace flashnorm
