// The backward of rows of whole aligned groups, in one reading: a stream for each partial.
//
// The threads of a stream take its rows in order, t = p, p + P, ..., and keep what the rows say of the weight in
// registers: accumulators of 16 rows, which join outer ones in shared memory (or in the workspace). Rows come through a
// ring of stages in shared memory, several ahead of their use; a thread reads there only what it put there itself, so
// the one barrier of a row is that of its sums. Streams of a CTA whose partials fold together first are folded there; the
// others go to the workspace (fold.cuh).
#pragma once

#include "../access.cuh"

#include "../reduce.cuh"
#include "program.cuh"
#include "stream_tile.cuh"

namespace flashnorm {

#if FN_KERNELS

// One stream of a backward, as one thread sees it.
template <class Program, class Tile>
class Stream {
  using Dout = typename Program::Dout;
  using X = typename Program::X;
  using G = typename Program::G;
  using Weights = typename Elements<typename Program::W, kGroup>::Type;
  using Reduce = RowReduce<Tile::kThreads, Tile::kCluster, Program::kRowSums, true>;
  static constexpr int kLanes = Tile::kLanes, kGroups = Tile::kGroups, kHeld = Tile::kHeld;
  static constexpr int kSums = Program::kSums, kPiecesOfAll = kStreamPieces<Program>;
  static constexpr bool kHolds = kHoldsWeight<Program, Tile>;

 public:
  FN_DEVICE Stream(const Program& program, const StreamGrid& grid)
      : program_(program),
        grid_(grid),
        threads_(Tile::kThreads > 0 ? Tile::kThreads : int(blockDim.x)),
        slot_(Tile::kRows == 1 ? 0 : int(threadIdx.y)),
        rank_(Tile::kCluster > 1 ? cluster_rank() : 0),
        reduce_(slot_, rank_) {
    const int rows = Tile::kRows > 0 ? Tile::kRows : int(blockDim.y);
    const int bundles = rows / grid.folded;  // of streams that fold together, in this CTA
    const Streams& streams = grid.streams;
    written_ = streams.partials / grid.folded;
    const int64_t used = streams.used() < written_ ? streams.used() : written_;
    const int64_t bundle = int64_t(blockIdx.x) / Tile::kCluster * bundles + slot_ / grid.folded;
    weight_row_ = bundle / used;
    column_ = int(bundle - weight_row_ * used);
    first_row_ = column_ + int64_t(slot_ % grid.folded) * written_;
    const bool there = weight_row_ < streams.weight_rows;
    if (!there) weight_row_ = 0;
    count_ = there ? streams.count(first_row_) : 0;
    // Where several rows share a warp, all of them go on as long as any may.
    turns_ = Tile::kThreads > 0 ? count_ : (streams.rows + streams.partials - 1) / streams.partials;
    col_ = (rank_ * threads_ + int(threadIdx.x)) * kGroup;
    left_ = grid.hidden_size - col_;
    uint4* memory = dynamic_shared();
    const int mine = slot_ * threads_ + int(threadIdx.x), cta = rows * threads_;
    ring_ = memory + mine;
    stride_ = cta;
    outer_ = reinterpret_cast<float4*>(memory + int64_t(grid.stages) * kHeld * kPiecesOfAll * cta) + mine;
  }

  FN_DEVICE void run() {
    clear(inner_);
    if (kHolds) read_weights();
    for (int s = 0; s < grid_.stages; ++s) {
      fetch(s, s);
      end_batch();
    }
    RowState next = state_of(0);
    int stage = 0;
    for (int64_t i = 0; i < turns_; ++i) {
      const RowState state = next;
      if (i + 1 < count_) next = state_of(i + 1);
      await_batches(grid_.stages - 1);
      float sums[Program::kRowSums];
      survey(sums, stage, state, i < count_);
      if (i < count_) finish(stage, state, Program::means_of(sums, grid_.hidden_size), i);
      end_batch();
      if (kSums > 0 && i % kInnerRows == kInnerRows - 1 && i + 1 < count_) flush(i / kInnerRows);
      stage = stage + 1 == grid_.stages ? 0 : stage + 1;
    }
    if (kSums > 0) put();
  }

 private:
  FN_DEVICE static int col(int i) { return Tile::kThreads > 0 ? i * Tile::kThreads * Tile::kCluster * kGroup : 0; }
  FN_DEVICE bool has(int i) const { return col(i) < left_; }

  FN_DEVICE Row row(int64_t i) const {
    return grid_.streams.row(weight_row_, first_row_ + i * grid_.streams.partials);
  }
  FN_DEVICE RowState state_of(int64_t i) const {
    if (i >= count_) return {};
    return program_.state(row(i));
  }

  // ------------------------------------------------------------ the ring
  FN_DEVICE uint4* piece(int stage, int i, int k) const {
    return ring_ + ((stage * kHeld + i) * kPiecesOfAll + k) * stride_;
  }
  template <class T>
  FN_DEVICE void fetch_group(uint4* to, const T* from) const {
    FN_UNROLL
    for (int k = 0; k < kPieces<T>; ++k) start_copy(to + k * stride_, reinterpret_cast<const uint4*>(from) + k);
  }
  struct Sources {
    const Dout* dout;
    const X* x;
    const G* more;
  };
  FN_DEVICE Sources sources(int64_t i) const {
    const Row at = row(i);
    Sources from{program_.dout.row(at) + col_, program_.x.row(at) + col_, nullptr};
    if constexpr (Program::kJoins) from.more = program_.g_residual.row(at) + col_;
    return from;
  }
  FN_DEVICE void fetch_group(const Sources& from, int stage, int j) const {
    uint4* to = piece(stage, j, 0);
    fetch_group(to, from.dout + col(j));
    fetch_group(to + kPieces<Dout> * stride_, from.x + col(j));
    if constexpr (Program::kJoins) {
      fetch_group(to + (kPieces<Dout> + kPieces<X>)*stride_, from.more + col(j));
    }
  }
  // Asks for the stream's i-th row.
  FN_DEVICE void fetch(int stage, int64_t i) const {
    if (i >= count_) return;
    const Sources from = sources(i);
    FN_UNROLL
    for (int j = 0; j < kHeld; ++j) {
      if (has(j)) fetch_group(from, stage, j);
    }
  }
  template <class T>
  FN_DEVICE void get(Pack<T, kGroup>& pack, const uint4* from) const {
    FN_UNROLL
    for (int k = 0; k < kPieces<T>; ++k) detail::put_words(pack.words + 4 * k, from[k * stride_]);
  }

  // ------------------------------------------------------------ the weight
  FN_DEVICE void load_weights(Weights& to, int i) const {
    if constexpr (Program::kWeight) {
      program_.weight.load(to, At<Whole>{{0, weight_row_, 0}, col_ + col(i), {}});
    }
  }
  FN_DEVICE void read_weights() {
    FN_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      if (has(i)) load_weights(weights_[i], i);
    }
  }
  FN_DEVICE void weigh(float (&v)[kGroup], int i) const {
    if constexpr (kHolds) {
      Program::weigh(v, weights_[i]);
    } else {
      Weights weights;
      load_weights(weights, i);
      Program::weigh(v, weights);
    }
  }

  // ------------------------------------------------------------ a row
  FN_DEVICE void survey(float (&sums)[Program::kRowSums], int stage, const RowState& state, bool there) {
    float lane[Program::kRowSums][kLanes];
    FN_UNROLL
    for (int j = 0; j < kLanes; ++j) {
      RowLane<Program> sum;
      FN_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        const int i = g * kLanes + j;
        // A tile may have more groups a lane than any row of this width.
        if (g > 0 && col(g * kLanes) >= grid_.hidden_size) continue;
        if (there && has(i)) {
          Pack<std::remove_const_t<Dout>, kGroup> dout;
          Pack<std::remove_const_t<X>, kGroup> x;
          get(dout, piece(stage, i, 0));
          get(x, piece(stage, i, kPieces<Dout>));
          float gw[kGroup], xh[kGroup], term[kGroup];
          widen(gw, dout);
          widen(xh, x);
          Program::normalize(xh, state);
          FN_UNROLL
          for (int k = 0; k < kGroup; ++k) term[k] = xh[k];
          Program::round_norm(term);
          accumulate(i, gw, term);
          if constexpr (Program::kRows) {
            weigh(gw, i);
            g == 0 ? sum.first(gw, xh) : sum.next(gw, xh);
          }
        } else if (g == 0) {
          sum.clear();
        } else {
          sum.missing();
        }
      }
      if constexpr (Program::kRows) {
        FN_UNROLL
        for (int k = 0; k < Program::kRowSums; ++k) lane[k][j] = sum.fold(k);
      }
    }
    if constexpr (Program::kRows) reduce_.template fold<Add>(sums, lane);
  }

  FN_DEVICE void finish(int stage, const RowState& state, const RowSums& means, int64_t i) {
    const int64_t later = i + grid_.stages;
    const bool more = later < count_;
    Sources from{};
    if (more) from = sources(later);
    const Row at = row(i);
    FN_UNROLL
    for (int j = 0; j < kHeld; ++j) {
      if (!has(j)) continue;
      Pack<std::remove_const_t<Dout>, kGroup> dout;
      Pack<std::remove_const_t<X>, kGroup> x;
      typename Elements<G, kGroup>::Type joined;
      get(dout, piece(stage, j, 0));
      get(x, piece(stage, j, kPieces<Dout>));
      if constexpr (Program::kJoins) get(joined, piece(stage, j, kPieces<Dout> + kPieces<X>));
      float v[kGroup], xh[kGroup];
      widen(v, dout);
      widen(xh, x);
      if (more) fetch_group(from, stage, j);
      Program::normalize(xh, state);
      weigh(v, j);
      Program::differentiate(v, xh, state, means);
      Program::join(v, joined);
      store(program_.dx, v, at, j);
      store(program_.dresidual, v, at, j);
    }
  }
  template <class T>
  FN_DEVICE void store(const RowRef<T>& to, const float (&v)[kGroup], Row at, int j) const {
    Pack<T, kGroup> pack;
    narrow(pack, v);
    to.store(pack, At<Whole>{at, col_ + col(j), {}});
  }
  FN_DEVICE void store(Absent, const float (&)[kGroup], Row, int) const {}

  // ------------------------------------------------------------ sums over rows
  FN_DEVICE void accumulate(int i, const float (&dout)[kGroup], const float (&xh)[kGroup]) {
    FN_UNROLL
    for (int k = 0; k < kGroup; ++k) {
      if constexpr (Program::kDw) inner_[0][i][k] = fp::fma(dout[k], xh[k], inner_[0][i][k]);
      if constexpr (Program::kDb) inner_[kSums - 1][i][k] = fp::add(dout[k], inner_[kSums - 1][i][k]);
    }
  }
  FN_DEVICE static void clear(float (&sums)[kSums > 0 ? kSums : 1][kHeld][kGroup]) {
    FN_UNROLL
    for (int q = 0; q < kSums; ++q) {
      FN_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        FN_UNROLL
        for (int k = 0; k < kGroup; ++k) sums[q][i][k] = 0.0f;
      }
    }
  }

  // Where the workspace has partial p's group i of sum q.
  FN_DEVICE float4* partial(int q, int64_t p, int i) const {
    const int64_t at = (q * grid_.streams.weight_rows + weight_row_) * grid_.streams.partials + p;
    return reinterpret_cast<float4*>(program_.workspace + at * grid_.hidden_size + col_ + col(i));
  }
  // The thread's outer accumulators of group i of sum q, half of them; each memory has an access of its own.
  FN_DEVICE float4* shared_outer(int q, int i, int half) const {
    return outer_ + ((q * kHeld + i) * 2 + half) * stride_;
  }
  FN_DEVICE float4 outer(int q, int i, int half) const {
    if (grid_.outer_shared) return *shared_outer(q, i, half);
    return partial(q, first_row_, i)[half];
  }
  FN_DEVICE void set_outer(int q, int i, int half, float4 v) const {
    if (grid_.outer_shared) {
      *shared_outer(q, i, half) = v;
    } else {
      partial(q, first_row_, i)[half] = v;
    }
  }
  FN_DEVICE void join_outer(float (&v)[kGroup], int q, int i, bool any) const {
    FN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float4 before = any ? outer(q, i, half) : float4{0.0f, 0.0f, 0.0f, 0.0f};
      v[4 * half] = fp::add(before.x, v[4 * half]);
      v[4 * half + 1] = fp::add(before.y, v[4 * half + 1]);
      v[4 * half + 2] = fp::add(before.z, v[4 * half + 2]);
      v[4 * half + 3] = fp::add(before.w, v[4 * half + 3]);
    }
  }
  FN_DEVICE static float4 half_of(const float (&v)[kGroup], int half) {
    return {v[4 * half], v[4 * half + 1], v[4 * half + 2], v[4 * half + 3]};
  }

  // The outer accumulators take the inner ones, which start again.
  FN_DEVICE void flush(int64_t before) {
    FN_UNROLL
    for (int q = 0; q < kSums; ++q) {
      FN_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        if (!has(i)) continue;
        join_outer(inner_[q][i], q, i, before > 0);
        FN_UNROLL
        for (int half = 0; half < 2; ++half) set_outer(q, i, half, half_of(inner_[q][i], half));
      }
    }
    clear(inner_);
  }

  // The stream's partial, folded with those of the CTA, goes to the workspace.
  FN_DEVICE void put() {
    FN_UNROLL
    for (int q = 0; q < kSums; ++q) {
      FN_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        if (has(i)) join_outer(inner_[q][i], q, i, count_ > kInnerRows);
      }
    }
    const int turn = slot_ % grid_.folded;
    const int place = slot_ / grid_.folded;  // whose hand-over begins there
    for (int step = grid_.folded / 2; step >= 1; step /= 2) {
      FN_UNROLL
      for (int q = 0; q < kSums; ++q) {
        sync_cta();  // the ring, or what was handed over before, has been read
        // Slot `turn` reads what slot `turn + step` puts beside the bundle's own places.
        float4* hand = reinterpret_cast<float4*>(ring_) - slot_ * threads_ +
                       (place * (grid_.folded / 2) + turn % step) * threads_;
        FN_UNROLL
        for (int i = 0; i < kHeld; ++i) {
          FN_UNROLL
          for (int half = 0; half < 2; ++half) {
            if (turn >= step && turn < 2 * step) hand[(i * 2 + half) * stride_] = half_of(inner_[q][i], half);
          }
        }
        sync_cta();
        if (turn < step) {
          FN_UNROLL
          for (int i = 0; i < kHeld; ++i) {
            FN_UNROLL
            for (int half = 0; half < 2; ++half) {
              const float4 other = hand[(i * 2 + half) * stride_];
              inner_[q][i][4 * half] = fp::add(inner_[q][i][4 * half], other.x);
              inner_[q][i][4 * half + 1] = fp::add(inner_[q][i][4 * half + 1], other.y);
              inner_[q][i][4 * half + 2] = fp::add(inner_[q][i][4 * half + 2], other.z);
              inner_[q][i][4 * half + 3] = fp::add(inner_[q][i][4 * half + 3], other.w);
            }
          }
        }
      }
    }
    if (turn != 0 || count_ == 0) return;
    FN_UNROLL
    for (int q = 0; q < kSums; ++q) {
      FN_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        FN_UNROLL
        for (int half = 0; half < 2; ++half) {
          if (has(i)) partial(q, column_, i)[half] = half_of(inner_[q][i], half);
        }
      }
    }
  }

  const Program& program_;
  const StreamGrid& grid_;
  int threads_;
  int slot_;  // of the stream in its CTA
  int rank_;
  Reduce reduce_;
  int written_;  // partials that go to the workspace, for each weight row
  int64_t weight_row_;
  int column_;  // the first of the partials that fold together here
  int64_t first_row_;
  int64_t count_;
  int64_t turns_;
  int col_;
  int left_;
  uint4* ring_;
  int stride_;
  float4* outer_;
  Weights weights_[kHolds ? kHeld : 1];
  float inner_[kSums > 0 ? kSums : 1][kHeld][kGroup];
};

template <class Program, class Tile>
__global__ void __launch_bounds__(Tile::kCta)
    backward_streams(const __grid_constant__ Program program, const __grid_constant__ StreamGrid grid) {
  Stream<Program, Tile> stream(program, grid);
  wait_for_earlier_kernels();
  let_later_kernels_start();
  stream.run();
}

#endif  // FN_KERNELS

}  // namespace flashnorm
