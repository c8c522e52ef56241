// Where a thread of `qk_norm_rope` stands: its token, its walk over heads, the token's sines and cosines, its elements.
#pragma once

#include "../access.cuh"

#include "../reduce.cuh"
#include "tile.cuh"

namespace flashnorm {

#if FN_KERNELS

// What the threads of a CTA know of their token.
template <class Program, class Tile>
class QkPlace {
 protected:
  using X = typename Program::X;
  using Out = typename Program::Out;
  static constexpr int kThreads = Tile::kThreads;
  static constexpr int kUnit = Tile::kWhole ? kGroup : 1;  // elements that are stored together
  static constexpr int kStep = kThreads * kUnit;           // from one of a thread's units to the next
  static constexpr int kFlight = Tile::kShort ? Tile::kPresent : Tile::kWhole ? 4 : 1;  // that a thread moves at a time
  static constexpr bool kInterleave = Program::Options::kInterleave;
  static constexpr Scope kScope = Program::Options::kScope;
  // Groups of Q or K that a thread finishes together: addresses are constants away from each other, and weights, of
  // which NeoX needs two, are read together where registers are left. Whether a batch is all that a thread has of Q and
  // of K: plans see to it that a lane of a sum has one group, but where there are as many lanes as there can be.
  static constexpr bool kSums = kScope == Scope::kHidden;
  static constexpr int kMost = kInterleave ? 4 : kThreads < 512 ? 2 : 1;
  static constexpr bool kAll = kSums && (Tile::kPresent < kMost || (Tile::kShort && kInterleave));
  static constexpr int kBatch = !Tile::kSteady ? 1 : kAll ? Tile::kPresent : kMost;
  static constexpr bool kOnce = Tile::kSteady && kSums && Tile::kPresent == kBatch &&
                                (Tile::kShort || kThreads * Tile::kLanes < kMaxLanes);

  FN_DEVICE QkPlace(const Program& program, const QkGrid& grid)
      : program_(program), layout_(program.layout), grid_(grid) {
    const uint32_t token = blockIdx.x, outer = grid.inner.quotient(token);
    row_ = {outer, token - outer * grid.inner.divisor, token};
    thread_ = threadIdx.x;
    // Only once: what follows is additions.
    const int head_dim = layout_.head_dim, first = thread_ * kUnit;
    if constexpr (Tile::kSteady) {
      first_ = {first >> grid.head_shift, first & (head_dim - 1)};
    } else {
      first_ = {first / head_dim, first % head_dim};
      step_ = {kStep / head_dim, kStep % head_dim};
    }
    cos_ = reinterpret_cast<float*>(dynamic_shared());
    sin_ = cos_ + table_pairs(layout_);
    staged_ = reinterpret_cast<X*>(sin_ + table_pairs(layout_));
    x_ = program_.x.row(row_);
  }

  // The cosines and sines of a group's pairs; where a group is on one side of them, the sines have its sign.
  struct Turns {
    static constexpr int kCount = kInterleave ? kGroup / 2 : kGroup;
    float cos[kCount];
    float sin[kCount];
  };

  // A place in the heads of a part, where results and weights lie.
  template <int kPart>
  struct Cursor {
    using W = WeightOf<Program, kPart>;
    Walk walk;
    Out* out;
    const W* weight = nullptr;

    // Whole groups lie so near that 32 bits hold it (QkOperands::whole).
    FN_DEVICE static auto offset(int64_t head_stride, const Walk& to) {
      using Int = std::conditional_t<Tile::kWhole, int, int64_t>;
      return to.head * Int(head_stride) + to.channel;
    }
    FN_DEVICE explicit Cursor(const QkPlace& token) { go(token, token.first_); }
    FN_DEVICE void go(const QkPlace& token, const Walk& to) {
      walk = to;
      const auto& heads = token.program_.out[kPart];
      out = heads.token(token.row_) + offset(heads.head_stride, to);
      if constexpr (!std::is_void_v<W>) {
        const auto& gain = token.program_.template weight<kPart>();
        weight = gain.ptr + offset(gain.head_stride, to);
      }
    }
    // To the thread's next unit.
    FN_DEVICE void next(const QkPlace& token) {
      if constexpr (Tile::kSteady) {
        out += token.grid_.out_step[kPart];
        if constexpr (!std::is_void_v<W>) weight += token.grid_.weight_step[kPart];
      } else {
        walk.step(token.step_, token.layout_.head_dim);
        go(token, walk);
      }
    }
  };

  // ---------------------------------------------------------------- sines and cosines
  FN_DEVICE void compute_turns() {
    const GridPlace place = grid_.place(uint32_t(row_.number));
    FN_KEEP_LOOP
    for (int p = thread_; p < layout_.pairs(); p += kThreads) {
      const Turn turn = turn_of(float(place.position(layout_, p)), layout_.frequency[p]);
      cos_[p] = turn.cos;
      sin_[p] = turn.sin;
    }
  }
  FN_DEVICE void read_turns() {
    const int64_t index = int64_t(program_.positions[row_]);
    lost_ = !program_.cos_sin.has(index);
    if (lost_) return;
    const float* from = program_.cos_sin.row(index);
    FN_KEEP_LOOP
    for (int p = thread_; p < layout_.pairs(); p += kThreads) {
      cos_[p] = from[p];
      sin_[p] = from[layout_.pairs() + p];
    }
  }

  // Of the group that begins at a channel.
  FN_DEVICE Turns turns_at(int channel) const {
    Turns turns = {};
    if (!Tile::kWhole || channel >= layout_.rotary_dim) return turns;
    const int half = layout_.pairs();
    const bool low = kInterleave || channel < half;
    const int pair = kInterleave ? channel / 2 : low ? channel : channel - half;
    FN_UNROLL
    for (int k = 0; k < Turns::kCount; k += 4) {
      const float4 cos = *reinterpret_cast<const float4*>(cos_ + pair + k);
      const float4 sin = *reinterpret_cast<const float4*>(sin_ + pair + k);
      turns.cos[k] = cos.x, turns.cos[k + 1] = cos.y, turns.cos[k + 2] = cos.z, turns.cos[k + 3] = cos.w;
      turns.sin[k] = sin.x, turns.sin[k + 1] = sin.y, turns.sin[k + 2] = sin.z, turns.sin[k + 3] = sin.w;
    }
    if (!kInterleave && low) {
      FN_UNROLL
      for (int k = 0; k < Turns::kCount; ++k) turns.sin[k] = -turns.sin[k];
    }
    return turns;
  }

  // ---------------------------------------------------------------- elements
  // Q and K come to shared memory; `await_copies` ends it. Each by itself: whole groups are copied by the thread that
  // sums them, which then waits for no other.
  FN_DEVICE void stage() {
    if constexpr (Tile::kStaged) {
      FN_UNROLL
      for (int part = kQ; part <= kK; ++part) {
        const X* from = x_ + layout_.start(part);
        X* to = staged_ + layout_.start(part);
        const int count = layout_.width(part);
        FN_KEEP_LOOP
        for (int i = thread_ * kUnit; i < count; i += kFlight * kStep) {
          FN_UNROLL
          for (int k = 0; k < kFlight; ++k) {
            if (i + k * kStep < count) bring(to + i + k * kStep, from + i + k * kStep);
          }
          if constexpr (kOnce) break;
        }
      }
    }
  }
  FN_DEVICE static void bring(X* to, const X* from) {
    if constexpr (Tile::kWhole) {
      start_copy(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from));
    } else {
      *to = *from;
    }
  }
  FN_DEVICE const X* element(int i) const {
    if constexpr (Tile::kStaged) {
      return staged_ + i;
    } else {
      return x_ + i;
    }
  }
  // The `count` first of 8 elements from the i-th on, and +0 for the rest.
  FN_DEVICE void read(float (&v)[kGroup], int i, int count) const {
    if constexpr (Tile::kWhole) {
      Pack<X, kGroup> pack;
      detail::load<true>(pack, element(i), Whole{});
      widen(v, pack);
    } else {
      FN_UNROLL
      for (int k = 0; k < kGroup; ++k) v[k] = k < count ? widened(*element(i + k)) : 0.0f;
    }
  }

  const Program& program_;
  const QkLayout& layout_;
  const QkGrid& grid_;
  Row row_;
  int thread_;
  Walk first_;      // this thread's first unit of a part
  Walk step_ = {};  // and how far it is to the next one, where groups are not steady
  float* cos_;
  float* sin_;
  X* staged_;
  const X* x_;
  bool lost_ = false;
};

#endif  // FN_KERNELS

}  // namespace flashnorm
