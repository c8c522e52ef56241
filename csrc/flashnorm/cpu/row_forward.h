// A row program on a CPU: load, statistics, maps, store, one row after the other.
//
// A row is gone through several times: for its sums, and then for its results. A later pass loads again and
// computes h again instead of keeping it: a row that was just read lies in the L1 or L2 cache, and what
// would be kept would lie there too. So every store, that of a summed residual included, is in the
// last pass, after the loads of the same elements: results may overwrite inputs in place.
#pragma once

#include "access.h"

#include "../stages.cuh"
#include "convert.h"
#include "fp_mode.h"
#include "sum.h"
#include "threads.h"

namespace flashnorm {
namespace cpu {

#define FN_INLINE __attribute__((always_inline))

// A row as its statistics see it. `Load` is a load stage that knows the row's place.
template <class Load>
class RowSums {
 public:
  FN_HOST_DEVICE RowSums(const Load& load, Row row, int hidden_size)
      : load_(load), row_(row), hidden_size_(hidden_size) {}

  FN_HOST_DEVICE int hidden_size() const { return hidden_size_; }
  FN_HOST_DEVICE float sum() const { return canonical_sum<Values>(*this, hidden_size_); }
  FN_HOST_DEVICE float sum_squares() const { return canonical_sum<Squares>(*this, hidden_size_); }
  FN_HOST_DEVICE Deviations deviations(float mean) const {
    const Centred centred{*this, mean};
    return {canonical_sum<Values>(centred, hidden_size_), canonical_sum<Squares>(centred, hidden_size_)};
  }

  // What canonical_sum asks for: h.
  FN_HOST_DEVICE void whole(float (&h)[kStep], int col) const { fetch(h, At<Whole>{row_, col, {}}, kStep); }
  FN_HOST_DEVICE void part(float (&h)[kStep], int col, int count) const {
    fetch(h, At<Ragged>{row_, col, {count}}, count);
  }

 private:
  // The same of h - mean: what the row lacks is +0 all the same.
  struct Centred {
    const RowSums& row;
    float mean;

    FN_HOST_DEVICE void whole(float (&d)[kStep], int col) const {
      row.whole(d, col);
      FN_UNROLL
      for (int i = 0; i < kStep; ++i) d[i] = fp::sub(d[i], mean);
    }
    FN_HOST_DEVICE void part(float (&d)[kStep], int col, int count) const {
      row.part(d, col, count);
      centre(d, mean, count);
    }
  };

  // Loads that read vectors too are much code, which every pass would have several times: they stay functions.
  template <class Access>
  FN_HOST_DEVICE void fetch(float (&h)[kStep], const At<Access>& at, int count) const {
    if constexpr (VecsOf<Load>::kThere) {
      fetch_apart(h, at, count);
    } else {
      fetch_here(h, at, count);
    }
  }
  template <class Access>
  __attribute__((noinline)) void fetch_apart(float (&h)[kStep], const At<Access>& at, int count) const {
    fetch_here(h, at, count);
  }
  template <class Access>
  FN_HOST_DEVICE void fetch_here(float (&h)[kStep], const At<Access>& at, int count) const {
    typename Load::template Raw<kStep> raw;
    typename VecsOf<Load>::template Vecs<kStep> vecs;
    load_.fetch(raw, at);
    fetch_vecs<Load, kStep>(load_, vecs, at);
    Pack<typename Load::Kept, kStep> kept;
    keep(load_, kept, raw, vecs, count);
    widen(h, kept);
  }

  Load load_;  // a copy, so that the address of the program goes nowhere and its members stay in registers
  Row row_;
  int hidden_size_;
};

// The elements [begin, end) of a row in steps: visit(whole place) for those that are all there, visit(ragged place)
// for the last one.
template <class Visit>
FN_HOST_DEVICE void steps(Row row, int begin, int end, const Visit& visit) {
  int col = begin;
  for (; col + kStep <= end; col += kStep) visit(At<Whole>{row, col, {}});
  if (col < end) visit(At<Ragged>{row, col, {end - col}});
}

// Where a store writes the elements of a step: past the caches, if they are whole and it says so.
template <class OutAccess>
FN_HOST_DEVICE At<OutAccess> out_of(const At<Whole>& at) {
  return {at.row, at.col, {}};
}
template <class OutAccess>
FN_HOST_DEVICE At<Ragged> out_of(const At<Ragged>& at) {
  return at;
}

// A row's results, from its statistics on.
template <class Program, class Load, class State>
class RowResults {
  using Store = std::decay_t<decltype(Program::store)>;
  using Maps = std::decay_t<decltype(Program::maps)>;

 public:
  FN_HOST_DEVICE RowResults(const Program& program, const Load& load, const State& state, int hidden_size, Row row)
      : program_(program), load_(load), state_(state), hidden_size_(hidden_size), row_(row) {}

  // `ahead(at)` is called before the elements of every whole step are loaded.
  template <class OutAccess, class Ahead>
  FN_HOST_DEVICE void put(typename Store::Given given, const Ahead& ahead) const {
    if constexpr (AgainOf<Store>::kThere) {
      put_again<OutAccess>(ahead);
    } else if constexpr (Store::kBlock == kNoBlock) {
      put_with<OutAccess>(program_.store.scale(given), ahead);
    } else if constexpr (Store::kBlock == kWholeRow) {
      Amax amax;
      steps(row_, 0, hidden_size_, [&](const auto& at) FN_INLINE {
        float y[kStep];
        compute<false>(y, at);
        amax.take(y, count_of<kStep>(at.access));
      });
      const auto scale = program_.store.scale(amax.get(), given);
      program_.store.put_scale(scale, row_, 0);
      put_with<OutAccess>(scale, ahead);
    } else {
      for (int begin = 0; begin < hidden_size_; begin += Store::kBlock) {
        const int left = hidden_size_ - begin;
        put_block<OutAccess>(begin, left < Store::kBlock ? left : Store::kBlock, given, ahead);
      }
    }
  }

 private:
  // The largest |y| of the elements taken, a running maximum for each place in a step.
  class Amax {
   public:
    FN_HOST_DEVICE void take(const float (&y)[kStep], int count) {
      if (count == kStep) {
        FN_UNROLL
        for (int i = 0; i < kStep; ++i) at_[i] = larger(at_[i], magnitude(y[i]));
      } else {
        for (int i = 0; i < count; ++i) at_[i] = larger(at_[i], magnitude(y[i]));
      }
    }
    FN_HOST_DEVICE uint32_t get() const {
      uint32_t all = 0;
      for (int i = 0; i < kStep; ++i) all = larger(all, at_[i]);
      return all;
    }

   private:
    uint32_t at_[kStep] = {};
  };

  // y of a step. The pass that stores results also saves what the load stage stores.
  template <bool kSave, class Access>
  FN_HOST_DEVICE void compute(float (&y)[kStep], const At<Access>& at) const {
    typename Load::template Raw<kStep> raw;
    typename VecsOf<Load>::template Vecs<kStep> vecs;
    typename Maps::template Raw<kStep> map_raw;
    typename Maps::template Rows<kStep> map_rows;
    load_.fetch(raw, at);
    fetch_vecs<Load, kStep>(load_, vecs, at);
    program_.maps.fetch(map_raw, at);
    program_.maps.fetch_rows(map_rows, at);
    Pack<typename Load::Kept, kStep> kept;
    keep(load_, kept, raw, vecs, count_of<kStep>(at.access));
    if (kSave) load_.save(kept, at);
    widen(y, kept);
    program_.stats.normalize(y, state_);
    program_.maps.apply(y, map_raw, map_rows);
  }

  // The row as the store has it again, for its statistics: a step is stored as soon as it is made, and read again in
  // the last pass, from a cache.
  struct Again {
    const RowResults& results;

    FN_HOST_DEVICE int hidden_size() const { return results.hidden_size_; }
    FN_HOST_DEVICE float sum_squares() const { return canonical_sum<Squares>(*this, results.hidden_size_); }
    FN_HOST_DEVICE void whole(float (&r)[kStep], int col) const {
      results.renew(r, At<Whole>{results.row_, col, {}});
    }
    FN_HOST_DEVICE void part(float (&r)[kStep], int col, int count) const {
      results.renew(r, At<Ragged>{results.row_, col, {count}});
    }
  };

  template <class Access>
  FN_HOST_DEVICE void renew(float (&r)[kStep], const At<Access>& at) const {
    Pack<typename AgainOf<Store>::Type, kStep> again;
    compute<true>(r, at);
    clear_missing(r, count_of<kStep>(at.access));
    narrow(again, r);
    program_.store.put_again(again, at);
    widen(r, again);
  }

  template <class OutAccess, class Ahead>
  FN_HOST_DEVICE void put_again(const Ahead& ahead) const {
    const Again sums{*this};
    const auto state = state_of(program_.store.stats(), sums);
    steps(row_, 0, hidden_size_, [&](const auto& at) FN_INLINE {
      ahead(at);
      Pack<typename AgainOf<Store>::Type, kStep> again;
      typename Store::template Raw<kStep> raw;
      float r[kStep];
      program_.store.fetch_again(again, at);
      program_.store.fetch(raw, at);
      widen(r, again);
      program_.store.put(r, raw, state, out_of<OutAccess>(at));
    });
  }

  template <class OutAccess, class Ahead>
  FN_HOST_DEVICE void put_with(const typename Store::Scale& scale, const Ahead& ahead) const {
    steps(row_, 0, hidden_size_, [&](const auto& at) FN_INLINE {
      ahead(at);
      float y[kStep];
      compute<true>(y, at);
      program_.store.put(y, scale, out_of<OutAccess>(at));
    });
  }

  template <class OutAccess, class Ahead>
  FN_HOST_DEVICE void put_block(int begin, int count, typename Store::Given given, const Ahead& ahead) const {
    alignas(64) float block[Store::kBlock / kStep + 1][kStep];
    Amax amax;
    steps(row_, begin, begin + count, [&](const auto& at) FN_INLINE {
      ahead(at);
      float (&y)[kStep] = block[(at.col - begin) / kStep];
      compute<true>(y, at);
      amax.take(y, count_of<kStep>(at.access));
    });
    const auto scale = program_.store.scale(amax.get(), given);
    program_.store.put_scale(scale, row_, begin / Store::kBlock);
    steps(row_, begin, begin + count, [&](const auto& at) FN_INLINE {
      program_.store.put(block[(at.col - begin) / kStep], scale, out_of<OutAccess>(at));
    });
  }

  const Program& program_;
  const Load& load_;
  State state_;
  int hidden_size_;
  Row row_;
};

// One row. Where stores are streamed, the rows come from memory as well: `next` is prefetched while this one is
// stored, so that memory is read while it is written. Rows in a cache would only be slowed down by it (13 %).
template <class OutAccess, class Program, class Given>
FN_HOST_DEVICE void forward_row(const Program& program, Given given, int hidden_size, Row row, Row next) {
  const auto load = program.load.locate(row, true);
  using Load = std::decay_t<decltype(load)>;
  RowSums<Load> sums(load, row, hidden_size);
  const auto state = state_of(program.stats, sums);
  program.saves.put(state, row);
  const RowResults<Program, Load, std::decay_t<decltype(state)>> results(program, load, state, hidden_size, row);
  results.template put<OutAccess>(given, [&](const auto& at) FN_INLINE {
    using Access = std::decay_t<decltype(at.access)>;
    if constexpr (std::is_same_v<OutAccess, Stream> && std::is_same_v<Access, Whole>) {
      program.load.touch(At<Touch>{next, at.col, {}});
    }
  });
}

// Rows [begin, end) of a flattened grid of `rows`, with `inner` rows in every outer one. Rows past the grid are
// those that pad its scales.
template <class OutAccess, class Program>
void forward_rows(const Program& shared, int hidden_size, int64_t rows, int64_t inner, int64_t begin, int64_t end) {
  using Store = std::decay_t<decltype(shared.store)>;
  const IeeeMode mode;
  const Program program = shared;  // a local copy: no store can change its pointers and strides
  const auto given = program.store.read();
  const int64_t last = end < rows ? end : rows;
  Row row{begin < last ? begin / inner : 0, begin < last ? begin % inner : 0, begin};
  for (int64_t i = begin; i < last; ++i) {
    Row next = row;
    if (i + 1 < last) {
      next = row.inner + 1 < inner ? Row{row.outer, row.inner + 1, i + 1} : Row{row.outer + 1, 0, i + 1};
    }
    forward_row<OutAccess>(program, given, hidden_size, row, next);
    row = next;
  }
  if constexpr (Store::kBlock != kNoBlock) {
    for (int64_t i = begin < rows ? rows : begin; i < end; ++i) program.store.pad(Row{0, 0, i}, 0, 1);
  }
  if constexpr (std::is_same_v<OutAccess, Stream>) fence();
}

#undef FN_INLINE

}  // namespace cpu
}  // namespace flashnorm
