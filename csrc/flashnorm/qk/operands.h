// From the tensors of a call to the references of `QkNormRope`; host code, the same for both C++ routes.
//
// Python has validated a call before it comes here, with better texts. What is checked again is what memory safety
// hangs on.
#pragma once

#include <initializer_list>

#include "../ffi/operands.h"
#include "program.cuh"

namespace flashnorm {

// The layout that Python hands over when a kernel is bound: QkLayout.integers, then QkLayout.numbers.
inline QkLayout layout_of(const Arguments& given) {
  constexpr int kIntegers = 10;
  const int numbers = given.count() - kIntegers;
  if (numbers < 1) throw value_error() << kIntegers << " integers and a number at least, got " << given.count();
  QkLayout layout{};
  int at = 0;
  const auto next = [&] { return given.get<int>(at++); };
  for (int& n : layout.heads) n = next();
  layout.head_dim = next();
  layout.rotary_dim = next();
  for (int& n : layout.grid) n = next();
  for (int& n : layout.axis_end) n = next();
  const auto wrong = [&](bool is) {
    if (is) throw value_error() << "a layout that no kernel takes";
  };
  wrong(layout.head_dim < 2 || layout.head_dim > kMaxHeadDim || layout.head_dim % 2 != 0);
  wrong(layout.rotary_dim < 0 || layout.rotary_dim > layout.head_dim || layout.rotary_dim % 2 != 0);
  int64_t width = 0, sequence = 1;
  for (const int n : layout.heads) wrong(n < 0), width += int64_t(n) * layout.head_dim;
  for (const int n : layout.grid) wrong(n < 1), sequence *= n, wrong(sequence > 0x7FFFFFFF);
  wrong(width > kMaxHiddenSize);
  wrong(numbers != 1 && numbers != 1 + layout.rotary_dim);
  const auto number = [&] { return given.get<float>(at++); };
  layout.attention = number();
  for (int p = 0; 2 * p + 1 < numbers; ++p) {
    const float high = number();
    layout.frequency[p] = {high, number()};
  }
  return layout;
}

// The operands of one call. Tokens are [M] or [A, B], as those of the "row" operand x.
class QkOperands {
 public:
  QkOperands(const TensorView* tensors, int count, const QkLayout& layout)
      : tensors_(tensors), rows_(tensors, count, 0), layout_(layout) {
    if (rows_.hidden_size() != layout.start(kV) + layout.width(kV)) refuse(0);
  }

  int64_t tokens() const { return rows_.rows(); }
  int64_t inner() const { return rows_.inner(); }
  DLDevice device() const { return rows_.device(); }
  // Whether groups of 8 elements may be accessed at once in all that was bound, whatever the head.
  bool whole() const { return whole_ && rows_.width() == kGroup; }

  template <class T>
  RowRef<const T> row(int index) {
    return rows_.row<const T>(index);
  }
  template <class T>
  PerRowRef<const T> per_row(int index) {
    return rows_.per_row<const T>(index);
  }

  template <class T>
  GainRef<T> gain(int index, int part) {
    const TensorView& t = rows_.checked<T>(index);
    if (t.ndim() != 2 || t.size(0) != layout_.heads[part] || t.size(1) != layout_.head_dim || t.stride(1) != 1) {
      refuse(index);
    }
    const GainRef<T> ref{Operands::pointer<const T>(t), t.size(0) > 1 ? t.stride(0) : 0};
    align(ref.ptr, {ref.head_stride});
    keep_near(ref.head_stride, layout_.heads[part]);
    return ref;
  }

  template <class T>
  HeadsRef<T> heads(int index, int part) {
    const TensorView& t = rows_.checked<T>(index);
    const int rank = tensors_[0].ndim() - 1, n = layout_.heads[part];
    bool fits = t.ndim() == rank + 2 && t.size(rank) == n && t.size(rank + 1) == layout_.head_dim &&
                t.stride(rank + 1) == 1;
    for (int i = 0; fits && i < rank; ++i) fits = t.size(i) == tensors_[0].size(i);
    if (!fits) refuse(index);
    const HeadsRef<T> ref{Operands::pointer<T>(t), rank == 2 && t.size(0) > 1 ? t.stride(0) : 0,
                          t.size(rank - 1) > 1 ? t.stride(rank - 1) : 0, n > 1 ? t.stride(rank) : 0};
    align(ref.ptr, {ref.outer_stride, ref.inner_stride, ref.head_stride});
    keep_near(ref.head_stride, n);
    return ref;
  }

  PoolRef<const float> table(int index) {
    const TensorView& t = rows_.checked<float>(index);
    if (t.ndim() != 2 || t.size(1) != layout_.rotary_dim || (t.size(1) > 1 && t.stride(1) != 1)) refuse(index);
    return {Operands::pointer<const float>(t), t.size(0) > 1 ? t.stride(0) : 0, t.size(0)};
  }

 private:
  template <class T>
  void align(const T* ptr, std::initializer_list<int64_t> strides) {
    constexpr uint64_t kBytes = kGroup * sizeof(T) < 16 ? kGroup * sizeof(T) : 16;
    whole_ = whole_ && reinterpret_cast<uintptr_t>(ptr) % kBytes == 0;
    for (const int64_t stride : strides) whole_ = whole_ && stride % kGroup == 0;
  }
  // Heads of a token that 32 bits do not reach are no whole groups: the kernels for those have no 64-bit products.
  void keep_near(int64_t head_stride, int heads) {
    whole_ = whole_ && head_stride <= (0x7FFFFFFF - kMaxHeadDim) / (heads > 1 ? heads : 1);
  }
  void refuse(int index) const {
    throw value_error() << "operand " << index << " does not fit the layout that the kernel was bound with";
  }

  const TensorView* tensors_;
  Operands rows_;
  const QkLayout& layout_;
  bool whole_ = true;
};

}  // namespace flashnorm
