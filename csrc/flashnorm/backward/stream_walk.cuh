// Where the rows of a stream lie: addresses that go on from row to row, without a product and a division for each.
#pragma once

#include "program.cuh"

namespace flashnorm {

#if FN_KERNELS

// What a thread reads of a row; what is not there is never looked at.
template <class Program>
struct StreamSources {
  const typename Program::Dout* dout;
  const typename Program::X* x;
  const typename Program::G* more;

  template <class Each>
  FN_DEVICE void each(const Program& program, const Each& visit) {
    visit(dout, program.dout);
    visit(x, program.x);
    visit(more, program.g_residual);
  }
};

// The saved statistics of a row. Three addresses are too many registers: those of LayerNorm are found for each row.
template <class Program>
struct StreamWords {
  const float* rstd;

  template <class Each>
  FN_DEVICE void each(const Program& program, const Each& visit) {
    if constexpr (!Program::kLayer) visit(rstd, program.rstd);
  }
};

// What a thread writes of a row.
template <class Program>
struct StreamTargets {
  typename Program::Dx* dx;
  typename Program::Dres* dresidual;

  template <class Each>
  FN_DEVICE void each(const Program& program, const Each& visit) {
    visit(dx, program.dx);
    visit(dresidual, program.dresidual);
  }
};

struct StreamWalk {
  Streams streams;
  int64_t weight_row;
  int64_t first_row;
  int col;  // of the thread

  // To the stream's first row.
  template <class Program, class... Places>
  FN_DEVICE void begin(const Program& program, Places&... places) const {
    (find(program, places, 0), ...);
  }
  // To row i, from the one before; there need be no such row.
  template <class Program, class Places>
  FN_DEVICE void go_on(const Program& program, Places& places, int64_t i) const {
    if (streams.even) {
      places.each(program, [&](auto& at, const auto& ref) {
        if constexpr (!std::is_same_v<std::decay_t<decltype(ref)>, Absent>) at += streams.step(ref);
      });
    } else {
      find(program, places, i);
    }
  }
  template <class Program>
  FN_DEVICE RowState state(const Program& program, const StreamWords<Program>& words, int64_t i) const {
    if constexpr (Program::kLayer) {
      return program.state(row(i));
    } else {
      return {0.0f, 0.0f, *words.rstd};
    }
  }

 private:
  FN_DEVICE Row row(int64_t i) const { return streams.row(weight_row, first_row + i * streams.partials); }
  template <class Program, class Places>
  FN_DEVICE void find(const Program& program, Places& places, int64_t i) const {
    const Row at_row = row(i);
    places.each(program, [&](auto& at, const auto& ref) { place(at, ref, at_row); });
  }
  template <class T>
  FN_DEVICE void place(T*& at, const RowRef<T>& ref, Row row) const {
    at = ref.row(row) + col;
  }
  template <class T>
  FN_DEVICE void place(T*& at, const PerRowRef<T>& ref, Row row) const {
    at = &ref[row];
  }
  template <class T>
  FN_DEVICE void place(T*&, Absent, Row) const {}
};

#endif  // FN_KERNELS

}  // namespace flashnorm
