// From the tensors of a call to the references that stages hold; host code, the same for every C++ route.
//
// Python has validated a call before it comes here, with better texts. What is checked again is what
// memory safety hangs on: element types, shapes, unit stride, devices.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../vec.cuh"
#include "call.h"

namespace flashnorm {

template <int kCode, int kBits>
struct Dtype {
  static constexpr DLDataType value{kCode, kBits, 1};
};

template <class T>
struct ElementType;
template <>
struct ElementType<float> : Dtype<kDLFloat, 32> {};
template <>
struct ElementType<f16> : Dtype<kDLFloat, 16> {};
template <>
struct ElementType<bf16> : Dtype<kDLBfloat, 16> {};
template <>
struct ElementType<e4m3> : Dtype<kDLFloat8_e4m3fn, 8> {};
template <>
struct ElementType<e5m2> : Dtype<kDLFloat8_e5m2, 8> {};
template <>
struct ElementType<int8_t> : Dtype<kDLInt, 8> {};
template <>
struct ElementType<uint8_t> : Dtype<kDLUInt, 8> {};
template <>
struct ElementType<int32_t> : Dtype<kDLInt, 32> {};
template <>
struct ElementType<int64_t> : Dtype<kDLInt, 64> {};

constexpr int64_t kMaxHiddenSize = 262144;

// The operands of one call, in program order. `grid` is the number of a "row" operand, which sets the row grid:
// [M, H] is M rows of one outer row, [A, B, H] is A outer rows of B inner ones.
class Operands {
 public:
  Operands(const TensorView* tensors, int count, int grid) : tensors_(tensors) {
    const TensorView& row = tensors[grid];
    if (row.ndim() != 2 && row.ndim() != 3) {
      throw value_error() << "operand " << grid << " has " << row.ndim()
                          << " dimensions, expected [M, H] or [A, B, H]";
    }
    rank_ = row.ndim() - 1;
    outer_ = rank_ == 2 ? row.size(0) : 1;
    inner_ = row.size(rank_ - 1);
    grid_rows_ = outer_ * inner_;
    const int64_t hidden_size = row.size(rank_);
    if (hidden_size < 1 || hidden_size > kMaxHiddenSize) {
      throw value_error() << "rows of " << hidden_size << " elements, expected 1 to "
                          << kMaxHiddenSize;
    }
    hidden_size_ = int(hidden_size);
    for (int i = 1; i < count; ++i) {
      const DLDevice other = tensors[i].device();
      if (other.device_type != device().device_type || other.device_id != device().device_id) {
        throw value_error() << "operand " << i << " is on another device than operand 0";
      }
    }
    width_ = kGroup;
    while (hidden_size_ % width_ != 0) width_ /= 2;
  }

  int64_t outer() const { return outer_; }
  int64_t inner() const { return inner_; }
  int64_t rows() const { return outer_ * inner_; }
  // Rows that the launch works on: those of the grid, and those that pad a "blocks" operand bound so far.
  int64_t grid_rows() const { return grid_rows_; }
  int hidden_size() const { return hidden_size_; }
  DLDevice device() const { return tensors_[0].device(); }

  // Elements that may be accessed at once in every operand bound so far: 8 (whole groups, in accesses of
  // up to 16 bytes), 4, 2 or 1. It divides H.
  int width() const { return width_; }

  // Whether a row that is written begins where one that is read does.
  bool in_place() const {
    for (int i = 1; i < bound_; ++i) {
      for (int j = 0; j < i; ++j) {
        if (rows_[i].at == rows_[j].at && (rows_[i].written || rows_[j].written)) return true;
      }
    }
    return false;
  }

  // A "row" operand, or a "vec" one: [H], or rows of its own.
  template <class T>
  RowRef<T> row(int index) {
    using Element = std::remove_const_t<T>;
    const TensorView& t = checked<Element>(index);
    const int last = t.ndim() - 1;
    if (last != rank_ && last != 0) shape_error(index);
    if (t.size(last) != hidden_size_ || (hidden_size_ > 1 && t.stride(last) != 1)) shape_error(index);
    RowRef<T> ref{pointer<T>(t), 0, 0};
    if (last == rank_) set_strides(ref, t, index);
    narrow_width(ref.ptr, ref.outer_stride, ref.inner_stride);
    remember(ref.ptr, !std::is_const_v<T>);
    return ref;
  }

  // A "pairs" operand: rows of H / 2 bytes.
  template <class T>
  PairsRef<T> pairs(int index) {
    const TensorView& t = checked<std::remove_const_t<T>>(index);
    const int last = t.ndim() - 1;
    if (last != rank_ || hidden_size_ % kGroup != 0 || t.size(last) != hidden_size_ / 2 || t.stride(last) != 1) {
      shape_error(index);
    }
    PairsRef<T> ref{pointer<T>(t), 0, 0};
    set_strides(ref, t, index);
    narrow_width(ref.ptr, ref.outer_stride, ref.inner_stride);
    return ref;
  }

  // A "per_row" operand: [M] or [A, B].
  template <class T>
  PerRowRef<T> per_row(int index) {
    const TensorView& t = checked<std::remove_const_t<T>>(index);
    if (t.ndim() != rank_) shape_error(index);
    PerRowRef<T> ref{pointer<T>(t), 0, 0};
    set_strides(ref, t, index);
    return ref;
  }

  // A "pool" operand: [P, H].
  template <class T>
  PoolRef<T> pool(int index) {
    const TensorView& t = checked<std::remove_const_t<T>>(index);
    if (t.ndim() != 2 || t.size(1) != hidden_size_ || (hidden_size_ > 1 && t.stride(1) != 1)) shape_error(index);
    pool_rows_ = t.size(0);
    PoolRef<T> ref{pointer<T>(t), pool_rows_ > 1 ? t.stride(0) : 0, pool_rows_};
    narrow_width(ref.ptr, 0, ref.stride);
    return ref;
  }

  // A "per_pool" operand: [P], with the P of the pool that was bound before.
  template <class T>
  PoolRef<T> per_pool(int index) {
    const TensorView& t = checked<std::remove_const_t<T>>(index);
    if (t.ndim() != 1 || t.size(0) != pool_rows_) shape_error(index);
    return {pointer<T>(t), t.stride(0), pool_rows_};
  }

  // A "blocks" operand: [M', columns], M' at least as many as the grid's rows.
  template <class T>
  BlocksRef<T> blocks(int index, int columns) {
    const TensorView& t = checked<std::remove_const_t<T>>(index);
    if (t.ndim() != 2 || t.size(0) < rows() || t.size(1) != columns) shape_error(index);
    if (t.size(0) > grid_rows_) grid_rows_ = t.size(0);
    return {pointer<T>(t), t.stride(0), t.stride(1), t.size(0), columns, hidden_size_};
  }

  // A "swizzled" operand: [M', columns] bytes, both whole tiles.
  template <class T>
  SwizzledRef<T> swizzled(int index, int columns) {
    const TensorView& t = checked<std::remove_const_t<T>>(index);
    columns = (columns + 3) / 4 * 4;
    if (t.ndim() != 2 || t.size(0) < rows() || t.size(0) % 128 != 0 || t.size(1) != columns || t.stride(1) != 1 ||
        t.stride(0) != columns) {
      shape_error(index);
    }
    if (t.size(0) > grid_rows_) grid_rows_ = t.size(0);
    return {pointer<T>(t), t.size(0), columns, hidden_size_};
  }

  // A "scalar" operand: one element in device memory.
  template <class T>
  T* scalar(int index) {
    const TensorView& t = checked<std::remove_const_t<T>>(index);
    if (t.numel() != 1) shape_error(index);
    return pointer<T>(t);
  }

  // A "workspace" operand: memory in one dimension.
  template <class T>
  T* workspace(int index) {
    const TensorView& t = checked<T>(index);
    if (t.ndim() != 1 || (t.size(0) > 1 && t.stride(0) != 1)) shape_error(index);
    return pointer<T>(t);
  }

  // The tensor of an operand, which has to have this element type.
  template <class Element>
  const TensorView& checked(int index) const {
    const DLDataType found = tensors_[index].dtype(), expected = ElementType<Element>::value;
    if (found.code != expected.code || found.bits != expected.bits || found.lanes != expected.lanes) {
      throw value_error() << "operand " << index << " has element type (" << found.code << ", "
                          << found.bits << "), this kernel was built for (" << expected.code << ", "
                          << expected.bits << ")";
    }
    return tensors_[index];
  }

  template <class T>
  static T* pointer(const TensorView& t) {
    return static_cast<T*>(t.data_ptr());
  }

 private:
  template <class Ref>
  void set_strides(Ref& ref, const TensorView& t, int index) const {
    if (t.size(rank_ - 1) != inner_ || (rank_ == 2 && t.size(0) != outer_)) shape_error(index);
    // The stride of a dimension of one element is never used; dropping it keeps odd values out of the alignment.
    ref.inner_stride = inner_ > 1 ? t.stride(rank_ - 1) : 0;
    ref.outer_stride = rank_ == 2 && outer_ > 1 ? t.stride(0) : 0;
  }

  void remember(const void* at, bool written) {
    if (bound_ < kRemembered) rows_[bound_++] = {at, written};
  }

  template <class T>
  void narrow_width(T* ptr, int64_t outer_stride, int64_t inner_stride) {
    const uint64_t bits = reinterpret_cast<uintptr_t>(ptr) | uint64_t(outer_stride) * sizeof(T) |
                          uint64_t(inner_stride) * sizeof(T);
    for (; width_ > 1; width_ /= 2) {
      const uint64_t bytes = width_ * sizeof(T) < 16 ? width_ * sizeof(T) : 16;
      if (bits % bytes == 0) return;
    }
  }

  [[noreturn]] void shape_error(int index) const {
    const TensorView& t = tensors_[index];
    CallError error = value_error() << "operand " << index << " of shape (";
    for (int i = 0; i < t.ndim(); ++i) error << (i ? ", " : "") << t.size(i);
    throw error << ") does not fit rows of " << hidden_size_ << " elements in a grid of " << outer_ << " x " << inner_
                << ", or its last stride is not 1";
  }

  const TensorView* tensors_;
  int rank_;
  int64_t outer_;
  int64_t inner_;
  int64_t grid_rows_;
  int64_t pool_rows_ = 0;
  int hidden_size_;
  int width_;
  static constexpr int kRemembered = 16;  // more than any program has
  struct {
    const void* at;
    bool written;
  } rows_[kRemembered];
  int bound_ = 0;
};

}  // namespace flashnorm
