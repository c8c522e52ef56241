// The stages: what a row kernel does to a row, one struct for each dataclass of flashnorm/program/.
//
// A stage is named after its dataclass, `Name<Options, Elements...>`: Options carries the dataclass's
// fields as constants (a field `round_norm` is `kRoundNorm`; one that says a word, `cap="device"`, is
// `Cap kCap = Cap::kDevice`) and, as `Input`, the T of rT; Elements are the element types of the stage's
// operands, in order. The generated unit makes it from its operands in that order, then its run-time scalars. A
// stage knows no thread, no tile and no plan. Arithmetic works on `float (&v)[N]` for any N, the same on host and
// device. A stage has `enter(row, col)`, which moves its operands to a place (RowRef::enter).
//
//   load    touch(at)         asks for what `fetch` will read, as far as its place is known beforehand
//           locate(row, there)  reads what the row's place hangs on, if the row is there; what it returns has:
//             Kept              the element type that holds h exactly between the passes
//             Raw<N>            what `fetch` reads
//             fetch(raw, at)    issues the reads
//             keep(kept, raw, count)  h, from what was read; +0 from the count-th element on
//             Vecs<N>, fetch_vecs(vecs, at)  vectors that h is made of besides, if any: keep(kept, raw, vecs, count);
//                               vecs_same_below()  whether the row below has the same
//             save(kept, at)    writes what the stage stores besides (once for every element of the row)
//   stats   kSums             the most sums that are asked for at once
//           State             the row's statistics
//           compute(states, rows)  of some rows, from the sums they offer: rows.sum(sums), rows.sum_squares(sums),
//                             rows.deviations(found, means); `state_of(stats, row)` of one that offers its own
//           normalize<kCentred>(v, state)  with `kCentred`, of a row that is held as its differences from the mean
//   map     Raw<N>, fetch(raw, at), apply(v, raw)
//           Rows<N>, fetch_rows(rows, at)  rows that it reads besides vectors, if any: apply(v, raw, rows)
//   store   kCodes            whether it makes 8-bit codes
//           kBlock            the elements that are written with one scale, found from them (stages/store.cuh)
//           read()            what the scale hangs on besides: its Given
//           scale(given)      the Scale; with a kBlock, scale(amax, given)
//           put(v, scale, at)
//           with a kBlock also put_scale(scale, row, block), pad(row, first, step), padded_rows()
//           Again             instead of a scale, of a store that has the row once more: the element type that it is
//                             stored in; put_again(again, at), fetch_again(again, at), stats() of what is stored,
//                             Raw<N>, fetch(raw, at), put(v, raw, state, at)
//   save    put(state, row)   called once a row
#pragma once

#include <type_traits>

#include "stages/blocks.cuh"
#include "stages/gate_loads.cuh"
#include "stages/gate_maps.cuh"
#include "stages/load.cuh"
#include "stages/maps.cuh"
#include "stages/nvfp4.cuh"
#include "stages/parts.cuh"
#include "stages/stats.cuh"
#include "stages/store.cuh"

namespace flashnorm {

// ---------------------------------------------------------------- several maps, several saves
template <class... Stages>
struct Chain;

// Whether a stage says of itself that instructions are its limit, not memory.
template <class Stage, class = void>
constexpr bool kDenseStage = false;
template <class Stage>
constexpr bool kDenseStage<Stage, std::void_t<decltype(Stage::kDense)>> = true;

template <>
struct Chain<> {
  template <int N>
  struct Raw {};
  template <int N>
  struct Rows {};
  static constexpr int raw_bytes() { return 0; }
  static constexpr int row_bytes() { return 0; }
  static constexpr bool dense() { return false; }
  static constexpr int vector_bytes() { return 0; }

  FN_HOST_DEVICE void enter(Row, int) {}
  template <int N, class Access>
  FN_HOST_DEVICE void fetch(Raw<N>&, const At<Access>&) const {}
  template <int N, class Access>
  FN_HOST_DEVICE void fetch_rows(Rows<N>&, const At<Access>&) const {}
  template <int N>
  FN_HOST_DEVICE void apply(float (&)[N], const Raw<N>&, const Rows<N>&) const {}
  template <class State>
  FN_HOST_DEVICE void put(const State&, Row) const {}
};

template <class First, class... Rest>
struct Chain<First, Rest...> {
  // Only maps are fetched: a chain of saves has no Raw, so the name is looked up late.
  template <int N, class Stage = First>
  struct RawOf {
    typename Stage::template Raw<N> first;
    typename Chain<Rest...>::template Raw<N> rest;
  };
  template <int N>
  using Raw = RawOf<N>;
  template <int N>
  struct Rows {
    typename RowsOf<First>::template Rows<N> first;
    typename Chain<Rest...>::template Rows<N> rest;
  };
  static constexpr bool dense() { return kDenseStage<First> || Chain<Rest...>::dense(); }
  // Of an element.
  static constexpr int vector_bytes() {
    const int said = kVectorBytesOf<First>, read = (raw_bytes() - Chain<Rest...>::raw_bytes()) / kGroup;
    return (said >= 0 ? said : read) + Chain<Rest...>::vector_bytes();
  }
  // What a group's Raw and Rows hold, without the padding.
  static constexpr int raw_bytes() {
    using Own = typename First::template Raw<kGroup>;
    return (std::is_empty_v<Own> ? 0 : int(sizeof(Own))) + Chain<Rest...>::raw_bytes();
  }
  static constexpr int row_bytes() {
    using Own = typename RowsOf<First>::template Rows<kGroup>;
    return (RowsOf<First>::kThere ? int(sizeof(Own)) : 0) + Chain<Rest...>::row_bytes();
  }

  First first;
  Chain<Rest...> rest;

  FN_HOST_DEVICE void enter(Row row, int col) {
    first.enter(row, col);
    rest.enter(row, col);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void fetch(RawOf<N>& raw, const At<Access>& at) const {
    first.fetch(raw.first, at);
    rest.fetch(raw.rest, at);
  }
  template <int N, class Access>
  FN_HOST_DEVICE void fetch_rows(Rows<N>& rows, const At<Access>& at) const {
    if constexpr (RowsOf<First>::kThere) first.fetch_rows(rows.first, at);
    rest.fetch_rows(rows.rest, at);
  }
  template <int N>
  FN_HOST_DEVICE void apply(float (&v)[N], const RawOf<N>& raw, const Rows<N>& rows) const {
    if constexpr (RowsOf<First>::kThere) {
      first.apply(v, raw.first, rows.first);
    } else {
      first.apply(v, raw.first);
    }
    rest.apply(v, raw.rest, rows.rest);
  }
  template <class State>
  FN_HOST_DEVICE void put(const State& state, Row row) const {
    first.put(state, row);
    rest.put(state, row);
  }
};

// The element type that the last of some maps has rounded to, or void.
template <class Maps>
struct RoundedBy {
  using Type = void;
};
template <class First, class... Rest>
struct RoundedBy<Chain<First, Rest...>> : RoundedBy<Chain<Rest...>> {};
template <class Options>
struct RoundedBy<Chain<Round<Options>>> {
  using Type = typename Options::Input;
};

// ---------------------------------------------------------------- a program
template <class Program>
FN_HOST_DEVICE void enter(Program& program, Row row, int col) {
  program.load.enter(row, col);
  program.maps.enter(row, col);
  program.saves.enter(row, col);
  program.store.enter(row, col);
}

}  // namespace flashnorm
