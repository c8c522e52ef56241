// A backward on a CPU: the rows of a partial one after the other, then the partials folded.
//
// A row is gone through twice, for its sums and for its results, and is in a cache by the second time. The rows of a
// partial add to an inner accumulator that stays in the L1 or L2 cache; outer ones are the partial's place in the
// workspace. Threads share partials out among them, and columns when partials are folded: no order hangs on that.
#pragma once

#include "access.h"

#include "../backward/program.cuh"
#include "convert.h"
#include "fp_mode.h"
#include "row_forward.h"
#include "sum.h"
#include "threads.h"

#include <vector>

namespace flashnorm {
namespace cpu {

// One row of a backward. Its elements from `count` on are +0 in every sum.
template <class Program>
class GradientRow {
 public:
  FN_HOST_DEVICE GradientRow(const Program& program, Row row)
      : program_(program), row_(row), state_(program.state(row)) {}

  FN_HOST_DEVICE const RowState& state() const { return state_; }
  FN_HOST_DEVICE Row row() const { return row_; }

  template <class Access>
  FN_HOST_DEVICE void dout(float (&v)[kStep], const At<Access>& at) const {
    Pack<typename Program::Dout, kStep> pack;
    program_.dout.load_once(pack, at);
    widen(v, pack);
  }
  template <class Access>
  FN_HOST_DEVICE void norm(float (&v)[kStep], const At<Access>& at) const {
    Pack<typename Program::X, kStep> pack;
    program_.x.load_once(pack, at);
    widen(v, pack);
    Program::normalize(v, state_);
  }
  template <class Access>
  FN_HOST_DEVICE void weigh(float (&v)[kStep], const At<Access>& at) const {
    typename Elements<typename Program::W, kStep>::Type weights;
    if constexpr (Program::kWeight) program_.weight.load(weights, at);
    Program::weigh(v, weights);
  }
  // gw and xh of a step.
  FN_HOST_DEVICE void pair(float (&gw)[kStep], float (&xh)[kStep], int col, int count) const {
    if (count >= kStep) {
      both(gw, xh, At<Whole>{row_, col, {}});
      return;
    }
    both(gw, xh, At<Ragged>{row_, col, {count}});
    for (int i = count; i < kStep; ++i) gw[i] = xh[i] = 0.0f;
  }

 private:
  template <class Access>
  FN_HOST_DEVICE void both(float (&gw)[kStep], float (&xh)[kStep], const At<Access>& at) const {
    dout(gw, at);
    weigh(gw, at);
    norm(xh, at);
  }

  const Program& program_;
  Row row_;
  RowState state_;
};

// Terms of a row's sums that are in memory already, as canonical_sum asks for them. Beyond the row they are +0.
struct Terms {
  const float* terms;
  FN_HOST_DEVICE void whole(float (&t)[kStep], int col) const { copy_bytes<sizeof(t)>(t, terms + col); }
  FN_HOST_DEVICE void part(float (&t)[kStep], int col, int) const { whole(t, col); }
};

// One place for each element of a round, and a last step.
constexpr int kTerms = kRound + kStep;

// The canonical sum of terms in memory; of a row wider than a round, what each lane's positions have come to.
inline __attribute__((noinline)) float sum_terms(const float* terms, int hidden) {
  if (hidden <= kRound) return canonical_sum<Values>(Terms{terms}, hidden);
  alignas(64) V sums[kMaxBlocks];
  for (int b = 0; b < kMaxBlocks; ++b) {
    sums[b] = fold_block([&](int i) { return load(terms + b * kBlock + i * W); });
  }
  return fold_blocks(sums, kMaxBlocks);
}

// c and b of a row. `terms` has kTerms places for each of its sums.
template <class Program>
__attribute__((noinline)) flashnorm::RowSums means_of(const GradientRow<Program>& row, int hidden, float* terms) {
  for (int base = 0; base < hidden; base += kRound) {
    const int end = hidden - base < kRound ? hidden - base : kRound;
    int i = 0;
    for (; i < end; i += kStep) {
      float gw[kStep], xh[kStep];
      row.pair(gw, xh, base + i, end - i);
      for (int k = 0; k < kStep; k += W) {
        float* product = terms + i + k;
        const V a = load(gw + k), b = load(xh + k);
        store(product, base == 0 ? a * b : fma(a, b, load(product)));
        if constexpr (Program::kLayer) store(product + kTerms, base == 0 ? a : load(product + kTerms) + a);
      }
    }
    // What the last round lacks is +0, and is added.
    for (; base > 0 && i < kRound; i += W) {
      for (int q = 0; q < Program::kRowSums; ++q) store(terms + q * kTerms + i, load(terms + q * kTerms + i) + V{});
    }
  }
  float sums[Program::kRowSums];
  for (int q = 0; q < Program::kRowSums; ++q) sums[q] = sum_terms(terms + q * kTerms, hidden);
  return Program::means_of(sums, hidden);
}

// What a thread works in.
template <class Program>
class Scratch {
 public:
  // `inner`: with room for the accumulators of the sums over rows.
  Scratch(int hidden, bool inner)
      : pitch(hidden + kStep), memory_(kRowTerms + (inner ? Program::kSums * int64_t(pitch) : 0) + 16) {
    terms = memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) % 64 / sizeof(float);
    this->inner = terms + kRowTerms;
  }

  int pitch;  // of an accumulator: its last step is whole
  float* terms;
  float* inner;

 private:
  static constexpr int kRowTerms = Program::kRowSums * kTerms;
  std::vector<float> memory_;
};

// The results of a row: its own gradients, and what it adds to the inner accumulators.
template <class OutAccess, class Program>
__attribute__((noinline)) void backward_row(const Program& shared, bool own, int hidden, Row at_row, Row next,
                                            const Scratch<Program>& scratch) {
  const Program program = shared;  // a local copy: no store can change its pointers and strides
  const GradientRow<Program> row(program, at_row);
  flashnorm::RowSums means{};
  if constexpr (Program::kRows) means = means_of(row, hidden, scratch.terms);
  steps(at_row, 0, hidden, [&](const auto& at) __attribute__((always_inline)) {
    using Access = std::decay_t<decltype(at.access)>;
    if constexpr (std::is_same_v<OutAccess, Stream> && std::is_same_v<Access, Whole>) {
      Pack<typename Program::Dout, kStep> dout;
      Pack<typename Program::X, kStep> x;
      program.dout.load(dout, At<Touch>{next, at.col, {}});
      program.x.load(x, At<Touch>{next, at.col, {}});
    }
    float v[kStep], xh[kStep], term[kStep];
    row.dout(v, at);
    row.norm(xh, at);
    FN_UNROLL
    for (int i = 0; i < kStep; ++i) term[i] = xh[i];
    Program::round_norm(term);
    if constexpr (Program::kDw) {
      if (own) {
        FN_UNROLL
        for (int i = 0; i < kStep; ++i) term[i] = fp::mul(v[i], term[i]);
        Pack<typename Program::Dw, kStep> pack;
        narrow(pack, term);
        program.dweight.store(pack, at);
      } else {
        float* sum = scratch.inner + at.col;
        FN_UNROLL
        for (int i = 0; i < kStep; i += W) store(sum + i, fma(load(v + i), load(term + i), load(sum + i)));
      }
    }
    if constexpr (Program::kDb) {
      float* sum = scratch.inner + (Program::kSums - 1) * int64_t(scratch.pitch) + at.col;
      FN_UNROLL
      for (int i = 0; i < kStep; i += W) store(sum + i, load(v + i) + load(sum + i));
    }
    if constexpr (Program::kRows) {
      typename Elements<typename Program::G, kStep>::Type more;
      if constexpr (Program::kJoins) program.g_residual.load_once(more, at);
      row.weigh(v, at);
      Program::differentiate(v, xh, row.state(), means);
      Program::join(v, more);
      const auto put = [&](const auto& to) __attribute__((always_inline)) {
        using T = std::remove_pointer_t<decltype(to.ptr)>;
        Pack<T, kStep> pack;
        narrow(pack, v);
        to.store(pack, out_of<OutAccess>(at));
      };
      if constexpr (Program::kDx) put(program.dx);
      if constexpr (Program::kDres) put(program.dresidual);
    }
  });
}

// Rows [begin, end) of the whole grid, where nothing is summed over rows.
template <class OutAccess, class Program>
void backward_rows(const Program& program, const Streams& streams, int hidden, int64_t begin, int64_t end) {
  const IeeeMode mode;
  const Scratch<Program> scratch(hidden, false);
  const auto place = [&](int64_t i) {
    i = i < end ? i : end - 1;
    return Row{i / streams.inner, i % streams.inner, 0};
  };
  for (int64_t i = begin; i < end; ++i) {
    backward_row<OutAccess>(program, streams.own, hidden, place(i), place(i + 1), scratch);
  }
  if constexpr (std::is_same_v<OutAccess, Stream>) fence();
}

// The partials [begin, end), numbered over those that have rows and then over weight rows.
template <class OutAccess, class Program>
void backward_partials(const Program& program, const Streams& streams, int hidden, int64_t begin, int64_t end) {
  constexpr int kSums = Program::kSums;
  const IeeeMode mode;
  const Scratch<Program> scratch(hidden, true);
  const int64_t pitch = scratch.pitch, used = streams.used();
  for (int64_t stream = begin; stream < end; ++stream) {
    const int64_t r = stream / used, p = stream % used, count = streams.count(p);
    const auto place = [&](int64_t i) {
      return streams.row(r, p + (i < count ? i : count - 1) * streams.partials);
    };
    for (int64_t i = 0; i < count; ++i) {
      if (i % kInnerRows == 0) std::memset(scratch.inner, 0, kSums * pitch * sizeof(float));
      backward_row<OutAccess>(program, false, hidden, place(i), place(i + 1), scratch);
      if (i % kInnerRows != kInnerRows - 1 && i + 1 < count) continue;
      for (int q = 0; q < kSums; ++q) {
        float* outer = program.workspace + ((q * streams.weight_rows + r) * streams.partials + p) * hidden;
        const float* from = scratch.inner + q * pitch;
        const bool first = i < kInnerRows;
        for (int k = 0; k < hidden; ++k) outer[k] = fp::add(first ? 0.0f : outer[k], from[k]);
      }
    }
  }
  if constexpr (std::is_same_v<OutAccess, Stream>) fence();
}

constexpr int kFoldBlock = 256;  // columns that a thread folds at a time

template <class To>
void put_sum(const To& to, int64_t r, int col, int count, const float* from) {
  using T = std::remove_pointer_t<decltype(to.ptr)>;
  for (int k = 0; k < count; k += kStep) {
    const int left = count - k;
    float v[kStep] = {};
    std::memcpy(v, from + k, (left < kStep ? left : kStep) * sizeof(float));
    Pack<T, kStep> pack;
    narrow(pack, v);
    to.store(pack, At<Ragged>{{0, r, 0}, col + k, {left}});
  }
}

// The partials of blocks of columns, folded by halving in place, and cast. A partial without rows would be +0, and a
// sum of partials is never -0: it is left out.
template <class Program>
void fold_partials(const Program& shared, const Streams& streams, int hidden, int64_t begin, int64_t end) {
  const IeeeMode mode;
  const Program program = shared;
  const int blocks = (hidden + kFoldBlock - 1) / kFoldBlock;
  const int64_t used = streams.used();
  for (int64_t i = begin; i < end; ++i) {
    const int64_t r = i / blocks;
    const int col = int(i % blocks) * kFoldBlock;
    const int count = hidden - col < kFoldBlock ? hidden - col : kFoldBlock;
    for (int q = 0; q < Program::kSums; ++q) {
      float* sums = program.workspace + (q * streams.weight_rows + r) * streams.partials * int64_t(hidden) + col;
      for (int64_t step = streams.partials / 2; step >= 1; step /= 2) {
        const int64_t pairs = used - step < step ? used - step : step;
        for (int64_t p = 0; p < pairs; ++p) {
          float* to = sums + p * hidden;
          const float* from = sums + (p + step) * hidden;
#pragma GCC ivdep
          for (int k = 0; k < count; ++k) to[k] = fp::add(to[k], from[k]);
        }
      }
      if (used == 0) std::memset(sums, 0, count * sizeof(float));
      if constexpr (Program::kDw) {
        if (q == 0) put_sum(program.dweight, r, col, count, sums);
      }
      if constexpr (Program::kDb) {
        if (q == Program::kSums - 1) put_sum(program.dbias, r, col, count, sums);
      }
    }
  }
}

}  // namespace cpu
}  // namespace flashnorm
