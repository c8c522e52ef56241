// A row program on a CPU: load, statistics, maps, store, one row after the other.
//
// A row is gone through twice: once for its sums, once for its results. The second pass loads again and
// computes h again instead of keeping it: a row that was just read lies in the L1 or L2 cache, and what
// would be kept would lie there too. So every store, that of a summed residual included, is in the
// second pass, after the loads of the same elements: results may overwrite inputs in place.
#pragma once

#include "access.h"

#include "../stages.cuh"
#include "convert.h"
#include "fp_mode.h"
#include "sum.h"
#include "threads.h"

namespace flashnorm {
namespace cpu {

// A row as its statistics see it.
template <class Load>
class RowSums {
 public:
  FN_HOST_DEVICE RowSums(const Load& load, Row row, int hidden_size)
      : load_(load), row_(row), hidden_size_(hidden_size) {}

  FN_HOST_DEVICE int hidden_size() const { return hidden_size_; }
  FN_HOST_DEVICE float sum() const { return canonical_sum<Values>(*this, hidden_size_); }
  FN_HOST_DEVICE float sum_squares() const { return canonical_sum<Squares>(*this, hidden_size_); }

  // What canonical_sum asks for: h.
  FN_HOST_DEVICE void whole(float (&h)[kStep], int col) const { fetch(h, At<Whole>{row_, col, {}}); }
  FN_HOST_DEVICE void part(float (&h)[kStep], int col, int count) const {
    fetch(h, At<Ragged>{row_, col, {count}});
  }

 private:
  template <class Access>
  FN_HOST_DEVICE void fetch(float (&h)[kStep], const At<Access>& at) const {
    typename Load::template Raw<kStep> raw;
    load_.fetch(raw, at);
    Pack<typename Load::Kept, kStep> kept;
    load_.keep(kept, raw);
    widen(h, kept);
  }

  Load load_;  // a copy, so that the address of the program goes nowhere and its members stay in registers
  Row row_;
  int hidden_size_;
};

// The second pass over some elements. `at` is for loads and for what the load stage saves, `out` for the store.
template <class Program, class State, class Access, class OutAccess>
FN_HOST_DEVICE void finish(const Program& program, const State& state, const At<Access>& at,
                           const At<OutAccess>& out) {
  using Load = decltype(program.load);
  using Maps = decltype(program.maps);
  typename std::decay_t<Load>::template Raw<kStep> raw;
  typename std::decay_t<Maps>::template Raw<kStep> map_raw;
  program.load.fetch(raw, at);
  program.maps.fetch(map_raw, at);
  Pack<typename std::decay_t<Load>::Kept, kStep> kept;
  program.load.keep(kept, raw);
  program.load.save(kept, at);
  float v[kStep];
  widen(v, kept);
  program.stats.normalize(v, state);
  program.maps.apply(v, map_raw);
  program.store.put(v, out);
}

// One row. Where stores are streamed, the rows come from memory as well: `next` is prefetched while this one is
// stored, so that memory is read while it is written. Rows in a cache would only be slowed down by it (13 %).
template <class OutAccess, class Program>
FN_HOST_DEVICE void forward_row(const Program& program, int hidden_size, Row row, Row next) {
  RowSums<std::decay_t<decltype(program.load)>> sums(program.load, row, hidden_size);
  constexpr bool kPrefetch = std::is_same_v<OutAccess, Stream>;
  const auto state = program.stats.compute(sums);
  program.saves.put(state, row);
  int col = 0;
  for (; col + kStep <= hidden_size; col += kStep) {
    if constexpr (kPrefetch) {
      typename std::decay_t<decltype(program.load)>::template Raw<kStep> unused;
      program.load.fetch(unused, At<Touch>{next, col, {}});
    }
    finish(program, state, At<Whole>{row, col, {}}, At<OutAccess>{row, col, {}});
  }
  if (col < hidden_size) {
    const At<Ragged> at{row, col, {hidden_size - col}};
    finish(program, state, at, at);
  }
}

// Rows [begin, end) of a grid with `inner` rows in every outer one.
template <class OutAccess, class Program>
void forward_rows(const Program& shared, int hidden_size, int64_t inner, int64_t begin, int64_t end) {
  const IeeeMode mode;
  const Program program = shared;  // a local copy: no store can change its pointers and strides
  Row row{begin / inner, begin % inner};
  for (int64_t i = begin; i < end; ++i) {
    Row next = row;
    if (i + 1 < end) next = row.inner + 1 < inner ? Row{row.outer, row.inner + 1} : Row{row.outer + 1, 0};
    forward_row<OutAccess>(program, hidden_size, row, next);
    row = next;
  }
  if constexpr (std::is_same_v<OutAccess, Stream>) fence();
}

}  // namespace cpu
}  // namespace flashnorm
