// Q and K normalised and turned, V copied, on a GPU: one CTA a token.
//
// Q and K of the token wait in shared memory between the two passes, so that NeoX's partners are at hand and a thread
// holds nothing but a group; V goes straight through. The token's sines and cosines are computed once, by the threads
// that each have a pair, while the copies are under way. How many threads there are is the plan's, and no result depends
// on it (reduce.cuh).
#pragma once

#include "qk/place.cuh"
#include "reduce.cuh"

namespace flashnorm {

#if FN_KERNELS

template <class Program, class Tile>
class QkToken : QkPlace<Program, Tile> {
  using Base = QkPlace<Program, Tile>;
  using typename Base::Out;
  using typename Base::Turns;
  using typename Base::X;
  template <int kPart>
  using Cursor = typename Base::template Cursor<kPart>;
  using Base::kBatch;
  using Base::kFlight;
  using Base::kInterleave;
  using Base::kOnce;
  using Base::kScope;
  using Base::kStep;
  using Base::kThreads;
  using Base::kUnit;
  using Base::compute_turns;
  using Base::cos_;
  using Base::element;
  using Base::first_;
  using Base::layout_;
  using Base::lost_;
  using Base::program_;
  using Base::read;
  using Base::read_turns;
  using Base::row_;
  using Base::sin_;
  using Base::stage;
  using Base::thread_;
  using Base::turns_at;
  using Base::x_;

 public:
  FN_DEVICE QkToken(const Program& program, const QkGrid& grid) : Base(program, grid) {}

  FN_DEVICE void run() {
    if constexpr (!Program::kCached) compute_turns();
    wait_for_earlier_kernels();
    let_later_kernels_start();
    stage();
    if constexpr (Program::kCached) read_turns();
    copy();
    await_copies();
    if constexpr (kScope == Scope::kHead) {
      sync_cta();
      const Turns turns = turns_at(first_.channel);
      by_head<kQ>(turns);
      by_head<kK>(turns);
    } else {
      float rstd[2] = {};
      if constexpr (kScope == Scope::kHidden) {
        if constexpr (!Tile::kWhole) sync_cta();  // a group is what other threads have staged
        sum(rstd);  // it waits for all threads
      } else {
        sync_cta();
      }
      const Turns turns = turns_at(first_.channel);
      all_heads<kQ>(rstd[0], turns);
      all_heads<kK>(rstd[1], turns);
    }
  }

 private:
  // V, several groups in flight.
  FN_DEVICE void copy() const {
    const int start = layout_.start(kV), count = layout_.width(kV);
    Cursor<kV> at(*this);
    FN_KEEP_LOOP
    for (int i = thread_ * kUnit; i < count; i += kFlight * kStep) {
      Pack<X, kUnit> pack[kFlight];
      FN_UNROLL
      for (int k = 0; k < kFlight; ++k) {
        if (i + k * kStep < count) read_unit(pack[k], x_ + start + i + k * kStep);
      }
      FN_UNROLL
      for (int k = 0; k < kFlight; ++k) {
        if (i + k * kStep < count) put_v(pack[k], at.out);
        at.next(*this);
      }
    }
  }
  template <int N>
  FN_DEVICE static void read_unit(Pack<X, N>& pack, const X* from) {
    if constexpr (N > 1) {
      detail::load<true>(pack, from, Whole{});
    } else {
      pack.words[0] = from->bits;
    }
  }
  template <int N>
  FN_DEVICE void put_v(const Pack<X, N>& pack, Out* to) const {
    if constexpr (Program::kCoded) {
      float v[N > 1 ? N : 4];
      if constexpr (N > 1) {
        widen(v, pack);
      } else {
        v[0] = v[1] = v[2] = v[3] = widened(X{uint16_t(pack.words[0])});
      }
      put(to, v, program_.v_scale);
    } else if constexpr (N > 1) {
      detail::store(to, pack, Whole{});
    } else {
      to->bits = uint16_t(pack.words[0]);
    }
  }

  // Scaled, cast and stored: a group, or (N = 4) the first of four.
  template <int N>
  FN_DEVICE static void put(Out* to, float (&v)[N], float scale) {
    if constexpr (Program::kCoded) {
      FN_UNROLL
      for (int i = 0; i < N; ++i) v[i] = fp::mul(v[i], scale);
    }
    Pack<Out, N> pack;
    narrow(pack, v);
    if constexpr (N == kGroup) {
      detail::store(to, pack, Whole{});
    } else {
      to->bits = decltype(to->bits)(pack.words[0]);
    }
  }

  // ---------------------------------------------------------------- sums
  FN_DEVICE void sum(float (&rstd)[2]) const {
    float lane[2][Tile::kLanes], sums[2];
    RowReduce<kThreads, 1, 2> reduce(0, 0);
    FN_UNROLL
    for (int part = kQ; part <= kK; ++part) {
      const int start = layout_.start(part), count = layout_.width(part);
      FN_UNROLL
      for (int j = 0; j < Tile::kLanes; ++j) {
        // The lane's groups: one, unless the tile has as many lanes as a sum can have.
        int i = (thread_ + j * kThreads) * kGroup;
        lane[part][j] = 0.0f;
        if (j >= Tile::kPresent || i >= count) continue;
        Lane<Squares> squares;
        float v[kGroup];
        read(v, start + i, count - i);
        squares.first(v);
        if constexpr (Tile::kLanes * kThreads == kMaxLanes && !Tile::kShort) {
          constexpr int kRound = kMaxLanes * kGroup;
          FN_KEEP_LOOP
          for (i += kRound; i < count; i += kRound) {
            read(v, start + i, count - i);
            squares.next(v);
          }
        }
        lane[part][j] = squares.fold(0);
      }
    }
    reduce.template fold<Add>(sums, lane);
    if constexpr (kThreads == 32) sync_cta();  // one warp folds without it
    // Neighbours find one each: two divisions, two roots and two reciprocals take longer than to hand them over.
    const bool odd = thread_ & 1;
    const float own = program_.rstd(odd ? sums[1] : sums[0], odd ? layout_.width(kK) : layout_.width(kQ));
    const float other = shuffle_xor(own, 1);
    rstd[0] = odd ? other : own;
    rstd[1] = odd ? own : other;
  }

  // ---------------------------------------------------------------- results
  template <int kPart>
  FN_DEVICE void all_heads(float rstd, const Turns& turns) const {
    const int start = layout_.start(kPart), count = layout_.width(kPart);
    Cursor<kPart> at(*this);
    FN_KEEP_LOOP
    for (int i = thread_ * kUnit; i < count; i += kBatch * kStep) {
      Gains<kPart> gains[kBatch];
      Cursor<kPart> ahead = at;
      FN_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        if (i + k * kStep < count) load(gains[k], ahead);
        ahead.next(*this);
      }
      FN_UNROLL
      for (int k = 0; k < kBatch; ++k) {
        if (i + k * kStep < count) finish(start + i + k * kStep, at, rstd, turns, gains[k]);
        at.next(*this);
      }
      if constexpr (kOnce) break;
    }
  }

  // The same where every head has a sum of its own: as many threads a head as it has lanes, at most a warp.
  template <int kPart>
  FN_DEVICE void by_head(const Turns& turns) const {
    const int head_dim = layout_.head_dim, heads = layout_.heads[kPart], start = layout_.start(kPart);
    const int lanes = lanes_of(head_dim), team = lanes < 32 ? lanes : 32;
    const int mine = thread_ & (team - 1), teams = kThreads / team;
    Cursor<kPart> at(*this);
    // Whole warps: shuffles need all threads.
    FN_KEEP_LOOP
    for (int first = 0; first < heads; first += teams) {
      const int head = first + thread_ / team;
      const int begin = start + head * head_dim;
      const bool there = head < heads;
      Gains<kPart> gains;
      if (Tile::kSteady && there) load(gains, at);
      float sum = fold_part_of_warp<Add>(there ? lane_sum(begin, mine) : 0.0f, team);
      if (!Tile::kSteady && lanes > 32) {
        sum = fp::add(sum, fold_part_of_warp<Add>(there ? lane_sum(begin, mine + 32) : 0.0f, team));
      }
      if (there) {
        const float rstd = program_.rstd(sum, head_dim);
        if constexpr (Tile::kSteady) {
          finish(begin + at.walk.channel, at, rstd, turns, gains);
        } else {
          FN_KEEP_LOOP
          for (int c = mine * kUnit; c < head_dim; c += team * kUnit) {
            at.go(*this, {head, c});
            load(gains, at);
            finish(begin + c, at, rstd, turns, gains);
          }
        }
      }
      if constexpr (Tile::kSteady) at.next(*this);
    }
  }
  FN_DEVICE float lane_sum(int begin, int lane) const {
    const int left = layout_.head_dim - lane * kGroup;
    if (left <= 0) return 0.0f;
    float v[kGroup];
    read(v, begin + lane * kGroup, left);
    Lane<Squares> squares;
    squares.first(v);
    return squares.fold(0);
  }

  // The weights of a group, and of NeoX's the ones of the group that it turns with.
  template <int kPart>
  struct Gains {
    static constexpr bool kThere = Tile::kWhole && !std::is_void_v<WeightOf<Program, kPart>>;
    using W = std::conditional_t<kThere, WeightOf<Program, kPart>, X>;
    Pack<W, kGroup> own;
    Pack<W, kGroup> other;
  };
  template <int kPart>
  FN_DEVICE void load(Gains<kPart>& gains, const Cursor<kPart>& at) const {
    if constexpr (Gains<kPart>::kThere) {
      detail::load<false>(gains.own, at.weight, Whole{});
      const int channel = at.walk.channel;
      if (!kInterleave && channel < layout_.rotary_dim) {
        detail::load<false>(gains.other, at.weight + away(channel), Whole{});
      }
    }
  }

  // What comes of the unit of elements that begins at the i-th of the token.
  template <int kPart>
  FN_DEVICE void finish(int i, const Cursor<kPart>& at, float rstd, const Turns& held,
                        const Gains<kPart>& gains) const {
    const int channel = at.walk.channel;
    if constexpr (Tile::kWhole) {
      float v[kGroup];
      value<kPart>(v, i, gains.own, rstd);
      if (channel < layout_.rotary_dim) {
        const Turns turns = Tile::kSteady ? held : turns_at(channel);
        if constexpr (kInterleave) {
          FN_UNROLL
          for (int k = 0; k < kGroup / 2; ++k) {
            const float a = v[2 * k], b = v[2 * k + 1];
            v[2 * k] = turned(a, b, turns.cos[k], -turns.sin[k]);
            v[2 * k + 1] = turned(b, a, turns.cos[k], turns.sin[k]);
          }
        } else {
          float other[kGroup];
          value<kPart>(other, i + away(channel), gains.other, rstd);
          FN_UNROLL
          for (int k = 0; k < kGroup; ++k) v[k] = turned(v[k], other[k], turns.cos[k], turns.sin[k]);
        }
        scale_turned(v);
      }
      if (Program::kCached && lost_) lose(v);
      put(at.out, v, program_.q_scale);
    } else {
      float v[2], out[4];
      const bool turns = channel < layout_.rotary_dim;
      const int partner = turns ? away(channel) : 0;
      value_pair<kPart>(v, i, at, partner, rstd);
      out[0] = v[0];
      if (turns) {
        const int pair = kInterleave ? channel / 2 : partner > 0 ? channel : channel + partner;
        const float sin = sin_[pair];
        out[0] = turned(v[0], v[1], cos_[pair], partner > 0 ? -sin : sin);
        if (layout_.attention != 1.0f) out[0] = fp::mul(out[0], layout_.attention);
      }
      out[1] = out[2] = out[3] = out[0];
      if (Program::kCached && lost_) lose(out);
      put(at.out, out, program_.q_scale);
    }
  }

  template <int N>
  FN_DEVICE static void lose(float (&v)[N]) {
    FN_UNROLL
    for (int k = 0; k < N; ++k) v[k] = float_of(kNanWord);
  }

  // How far it is from a channel to the one that it turns with.
  FN_DEVICE int away(int channel) const {
    const int half = layout_.pairs();
    if (kInterleave) return channel % 2 == 0 ? 1 : -1;
    return channel < half ? half : -half;
  }

  // v, before it turns, of the group that begins at the i-th element of the token.
  template <int kPart, class W>
  FN_DEVICE void value(float (&v)[kGroup], int i, const Pack<W, kGroup>& weight, float rstd) const {
    float gain[kGroup] = {};
    if constexpr (Gains<kPart>::kThere) widen(gain, weight);
    read(v, i, kGroup);
    normalize<Program, kPart>(v, gain, rstd);
  }
  // v of a channel and of its partner.
  template <int kPart>
  FN_DEVICE void value_pair(float (&v)[2], int i, const Cursor<kPart>& at, int away, float rstd) const {
    using W = WeightOf<Program, kPart>;
    float gain[2] = {};
    if constexpr (!std::is_void_v<W>) {
      gain[0] = widened(at.weight[0]);
      gain[1] = widened(at.weight[away]);
    }
    v[0] = widened(*element(i));
    v[1] = widened(*element(i + away));
    normalize<Program, kPart>(v, gain, rstd);
  }

  FN_DEVICE void scale_turned(float (&v)[kGroup]) const {
    if (layout_.attention == 1.0f) return;
    FN_UNROLL
    for (int k = 0; k < kGroup; ++k) v[k] = fp::mul(v[k], layout_.attention);
  }
};

template <class Program, class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    qk_norm_rope(const __grid_constant__ Program program, const __grid_constant__ QkGrid grid) {
  QkToken<Program, Tile>(program, grid).run();
}

#endif  // FN_KERNELS

}  // namespace flashnorm
