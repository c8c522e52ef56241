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
#include "stream_walk.cuh"

namespace flashnorm {

#if FN_KERNELS

// One stream of a backward, as one thread sees it.
template <class Program, class Tile>
class Stream {
  using Dout = typename Program::Dout;
  using X = typename Program::X;
  using G = typename Program::G;
  using Sources = StreamSources<Program>;
  using Weights = typename Elements<typename Program::W, kGroup>::Type;
  using Reduce = RowReduce<Tile::kThreads, Tile::kCluster, Program::kRowSums, true>;
  static constexpr int kLanes = Tile::kLanes, kGroups = Tile::kGroups, kHeld = Tile::kHeld;
  static constexpr int kSums = Program::kSums, kPiecesOfAll = kStreamPieces<Program>;
  static constexpr bool kHolds = kHoldsWeight<Program, Tile>, kKeeps = kKeepsValues<Program, Tile>;

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
    weight_row_ = streams.weight_rows > 1 ? bundle / used : bundle >= used;
    column_ = int(bundle - weight_row_ * used);
    first_row_ = column_ + int64_t(slot_ % grid.folded) * written_;
    const bool there = weight_row_ < streams.weight_rows;
    if (!there) weight_row_ = 0;
    count_ = there ? int(streams.count(first_row_)) : 0;
    // Where several rows share a warp, all of them go on as long as any may.
    turns_ = Tile::kThreads > 0 ? count_ : int(streams.count(0));
    col_ = (rank_ * threads_ + int(threadIdx.x)) * kGroup;
    left_ = grid.hidden_size - col_;
    uint4* memory = dynamic_shared();
    const int mine = slot_ * threads_ + int(threadIdx.x), cta = rows * threads_;
    ring_ = memory + mine;
    stride_ = cta;
    outer_ = reinterpret_cast<float4*>(memory + int64_t(grid.stages) * kHeld * kPiecesOfAll * cta) + mine;
    walk_ = {streams, weight_row_, first_row_, col_};
    walk_.begin(program, from_, words_, to_);
  }

  // Asks for the first rows in L2, before earlier kernels are done.
  FN_DEVICE void touch() const {
    Sources from = from_;
    for (int s = 0; s < grid_.stages && s < count_; ++s) {
      FN_UNROLL
      for (int j = 0; j < kHeld; ++j) {
        if (has(j)) prefetch(from.dout + col(j)), prefetch(from.x + col(j));
      }
      walk_.go_on(program_, from, s + 1);
    }
  }

  FN_DEVICE void run() {
    clear(inner_);
    if (kHolds) read_weights();
    for (int s = 0; s < grid_.stages; ++s) {
      fetch(s, s);
      end_batch();
    }
    RowState next{};
    if (count_ > 0) next = walk_.state(program_, words_, 0);
    int stage = 0;
    for (int i = 0; i < turns_; ++i) {
      const RowState state = next;
      walk_.go_on(program_, words_, i + 1);
      if (i + 1 < count_) next = walk_.state(program_, words_, i + 1);
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

  // ------------------------------------------------------------ the ring
  FN_DEVICE uint4* piece(int stage, int i, int k) const {
    return ring_ + ((stage * kHeld + i) * kPiecesOfAll + k) * stride_;
  }
  template <class T>
  FN_DEVICE void fetch_group(uint4* to, const T* from) const {
    FN_UNROLL
    for (int k = 0; k < kPieces<T>; ++k) start_copy(to + k * stride_, reinterpret_cast<const uint4*>(from) + k);
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
  FN_DEVICE void fetch(int stage, int i) {
    if (i >= count_) return;
    FN_UNROLL
    for (int j = 0; j < kHeld; ++j) {
      if (has(j)) fetch_group(from_, stage, j);
    }
    walk_.go_on(program_, from_, i + 1);
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
          float(&gw)[kGroup] = gw_[kKeeps ? i : 0], (&xh)[kGroup] = xh_[kKeeps ? i : 0], term[kGroup];
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

  FN_DEVICE void finish(int stage, const RowState& state, const RowSums& means, int i) {
    const int later = i + grid_.stages;
    const bool more = later < count_;
    FN_UNROLL
    for (int j = 0; j < kHeld; ++j) {
      if (!has(j)) continue;
      typename Elements<G, kGroup>::Type joined;
      if constexpr (Program::kJoins) get(joined, piece(stage, j, kPieces<Dout> + kPieces<X>));
      float(&v)[kGroup] = gw_[kKeeps ? j : 0], (&xh)[kGroup] = xh_[kKeeps ? j : 0];
      if constexpr (kKeeps) {
        if (more) fetch_group(from_, stage, j);
      } else {
        Pack<std::remove_const_t<Dout>, kGroup> dout;
        Pack<std::remove_const_t<X>, kGroup> x;
        get(dout, piece(stage, j, 0));
        get(x, piece(stage, j, kPieces<Dout>));
        widen(v, dout);
        widen(xh, x);
        if (more) fetch_group(from_, stage, j);
        Program::normalize(xh, state);
        weigh(v, j);
      }
      Program::differentiate(v, xh, state, means);
      Program::join(v, joined);
      store(to_.dx, v, j);
      store(to_.dresidual, v, j);
    }
    walk_.go_on(program_, from_, later + 1);
    walk_.go_on(program_, to_, i + 1);
  }
  template <class T>
  FN_DEVICE void store(T* to, const float (&v)[kGroup], int j) const {
    if constexpr (!std::is_void_v<T>) {
      Pack<T, kGroup> pack;
      narrow(pack, v);
      detail::store(to + col(j), pack, Whole{});
    }
  }

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
      add_half(any ? outer(q, i, half) : float4{0.0f, 0.0f, 0.0f, 0.0f}, v, half);
    }
  }
  FN_DEVICE static void add_half(float4 more, float (&v)[kGroup], int half) {
    v[4 * half] = fp::add(more.x, v[4 * half]);
    v[4 * half + 1] = fp::add(more.y, v[4 * half + 1]);
    v[4 * half + 2] = fp::add(more.z, v[4 * half + 2]);
    v[4 * half + 3] = fp::add(more.w, v[4 * half + 3]);
  }
  FN_DEVICE static float4 half_of(const float (&v)[kGroup], int half) {
    return {v[4 * half], v[4 * half + 1], v[4 * half + 2], v[4 * half + 3]};
  }

  // The outer accumulators take the inner ones, which start again.
  FN_DEVICE void flush(int before) {
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
            for (int half = 0; half < 2; ++half) add_half(hand[(i * 2 + half) * stride_], inner_[q][i], half);
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
  int count_;  // no memory holds so many rows that an int would not
  int turns_;
  int col_;
  int left_;
  StreamWalk walk_;
  Sources from_{};  // of the next row to ask for
  StreamWords<Program> words_{};
  StreamTargets<Program> to_{};
  uint4* ring_;
  int stride_;
  float4* outer_;
  Weights weights_[kHolds ? kHeld : 1];
  float gw_[kKeeps ? kHeld : 1][kGroup], xh_[kKeeps ? kHeld : 1][kGroup];
  float inner_[kSums > 0 ? kSums : 1][kHeld][kGroup];
};

template <class Program, class Tile>
__global__ void __launch_bounds__(Tile::kCta)
    backward_streams(const __grid_constant__ Program program, const __grid_constant__ StreamGrid grid) {
  Stream<Program, Tile> stream(program, grid);
  stream.touch();
  wait_for_earlier_kernels();
  let_later_kernels_start();
  stream.run();
}

#endif  // FN_KERNELS

}  // namespace flashnorm
