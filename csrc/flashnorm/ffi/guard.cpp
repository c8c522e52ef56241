// The warm call's guard: compares the tensors of a call with those a plan was made for, and launches.
//
// Python has its own guard (flashnorm/core/guard.py); this one does the same where a host compiler is, for a
// tenth of the time, and hands the kernel its normalised views without making tensors of them.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using tvm::ffi::Any;
using tvm::ffi::AnyView;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::PackedArgs;
using tvm::ffi::TensorView;

constexpr int kMaxArguments = 24;

uintptr_t address_of(const DLTensor& t) { return reinterpret_cast<uintptr_t>(t.data) + t.byte_offset; }

// One operand as it was when the plan was made.
struct Operand {
  bool present = false;
  bool written = false;
  uintptr_t low_mask = 0;         // the bits of its address that count
  uintptr_t low = 0;              // and what they were
  int alias = -1;                 // the operand it may be, all of it
  DLDevice device{};
  DLDataType dtype{};
  std::vector<int64_t> shape, strides;
  int64_t bytes = 0;              // from its first to its last byte
  bool viewed = false;            // the kernel takes another shape and strides over the same memory
  std::vector<int64_t> view_shape, view_strides;
  DLDataType view_dtype{};        // and another dtype

  bool matches(const DLTensor& t) const {
    if (t.ndim != int(shape.size()) || t.device.device_type != device.device_type ||
        t.device.device_id != device.device_id || t.dtype.code != dtype.code || t.dtype.bits != dtype.bits ||
        t.dtype.lanes != dtype.lanes) {
      return false;
    }
    for (size_t i = 0; i < shape.size(); ++i) {
      if (t.shape[i] != shape[i] || (shape[i] != 1 && t.strides[i] != strides[i])) return false;
    }
    return true;
  }
};

struct Guard {
  Function launch;
  int leading;  // arguments before the operands
  std::vector<int64_t> kept;  // those of them that the kernel takes
  std::vector<std::pair<int64_t, double>> fixed;  // numbers that it does not take, and what they must be
  std::vector<Operand> operands;
  // Distances of pairs whose byte ranges cross although they share no byte: slices of one buffer, side by side.
  // Whoever makes a guard has checked that exactly.
  std::vector<std::optional<intptr_t>> known;

  // Launches and says true, or finds a difference and says false.
  bool operator()(PackedArgs args) const {
    const int count = int(operands.size());
    if (args.size() != leading + count) return false;
    for (const auto& [i, value] : fixed) {
      if (args[int(i)].cast<double>() != value) return false;
    }
    DLTensor tensors[kMaxArguments];
    AnyView passed[kMaxArguments];
    uintptr_t first[kMaxArguments];
    int n = 0;
    for (const int64_t i : kept) passed[n++] = args[int(i)];
    for (int i = 0; i < count; ++i) {
      const Operand& expected = operands[i];
      const AnyView& given = args[leading + i];
      if (given == nullptr) {
        if (expected.present) return false;
        continue;
      }
      const std::optional<DLTensor*> tensor = given.try_cast<DLTensor*>();
      if (!expected.present || !tensor || !expected.matches(**tensor)) return false;
      first[i] = address_of(**tensor);
      if (first[i] == 0 || (first[i] & expected.low_mask) != expected.low) return false;
      // Sizes and strides are the guard's own: whoever gave the tensor may change it while the kernel is launched.
      const bool viewed = expected.viewed;
      const std::vector<int64_t>&shape = viewed ? expected.view_shape : expected.shape,
                                &strides = viewed ? expected.view_strides : expected.strides;
      tensors[i] = **tensor;
      tensors[i].ndim = int(shape.size());
      tensors[i].shape = const_cast<int64_t*>(shape.data());
      tensors[i].strides = const_cast<int64_t*>(strides.data());
      if (viewed) tensors[i].dtype = expected.view_dtype;
      passed[n++] = &tensors[i];
    }
    if (overlap(first)) return false;
    Any ignored;
    launch.CallPacked(passed, n, &ignored);
    return true;
  }

  bool crosses(int i, int j, const uintptr_t* first) const {
    return first[i] < first[j] + operands[j].bytes && first[j] < first[i] + operands[i].bytes;
  }

  // Whether a written operand shares a byte range with another, but with the one it may be.
  bool overlap(const uintptr_t* first) const {
    const int count = int(operands.size());
    for (int i = 0; i < count; ++i) {
      const Operand& a = operands[i];
      if (!a.present || !a.written) continue;
      for (int j = 0; j < count; ++j) {
        const Operand& b = operands[j];
        if (j == i || !b.present || (b.written && j < i)) continue;
        if (!crosses(i, j, first)) continue;
        const bool same = first[i] == first[j] && (a.alias == j || b.alias == i);
        if (!same && known[i * count + j] != intptr_t(first[i] - first[j])) return true;
      }
    }
    return false;
  }
};

std::vector<int64_t> integers(const Array<int64_t>& list) { return {list.begin(), list.end()}; }

// Bytes from the first element to the end of the last.
int64_t extent(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, DLDataType dtype) {
  int64_t last = 0;
  for (size_t d = 0; d < shape.size(); ++d) last += (shape[d] - 1) * strides[d];
  return (last + 1) * ((int64_t(dtype.bits) * dtype.lanes + 7) / 8);
}

// guard(launch, leading, kept, fixed, flags, views, *tensors) -> callable(*leading, *tensors) -> bool
//   kept: which of the leading arguments are handed on
//   fixed: [which, value] of those that are numbers and are not
//   flags: for each tensor [written, aligned, operand it may be or -1]
//   views: for each tensor None, or [shape, strides, whether as bytes, a tensor of its dtype or None] that the kernel takes
void make_guard(PackedArgs args, Any* result) {
  Guard guard{args[0].cast<Function>(), args[1].cast<int>(), integers(args[2].cast<Array<int64_t>>()), {}, {}, {}};
  for (const auto& one : args[3].cast<Array<Array<Any>>>()) {
    guard.fixed.emplace_back(one[0].cast<int64_t>(), one[1].cast<double>());
  }
  const auto flags = args[4].cast<Array<Array<int64_t>>>();
  const auto views = args[5].cast<Array<Any>>();
  constexpr int kOwn = 6;
  const int count = args.size() - kOwn;
  if (guard.leading + count > kMaxArguments) {
    TVM_FFI_THROW(ValueError) << "more than " << std::to_string(kMaxArguments) << " arguments";
  }
  uintptr_t first[kMaxArguments] = {};
  for (int i = 0; i < count; ++i) {
    Operand operand;
    if (args[kOwn + i] != nullptr) {
      const DLTensor& t = *args[kOwn + i].cast<DLTensor*>();
      operand.present = true;
      operand.written = flags[i][0] != 0;
      operand.alias = int(flags[i][2]);
      operand.device = t.device;
      operand.dtype = t.dtype;
      operand.shape.assign(t.shape, t.shape + t.ndim);
      operand.strides.assign(t.strides, t.strides + t.ndim);
      operand.bytes = extent(operand.shape, operand.strides, t.dtype);
      first[i] = address_of(t);
      operand.low_mask = flags[i][1] != 0 ? 15 : 0;
      operand.low = first[i] & operand.low_mask;
      if (views[i] != nullptr) {
        const auto view = views[i].cast<Array<Any>>();
        operand.viewed = true;
        operand.view_shape = integers(view[0].cast<Array<int64_t>>());
        operand.view_strides = integers(view[1].cast<Array<int64_t>>());
        operand.view_dtype = view[3] == nullptr ? t.dtype : view[3].cast<DLTensor*>()->dtype;
        // A view of blocks reaches into their padding.
        const int64_t reach = extent(operand.view_shape, operand.view_strides, operand.view_dtype);
        operand.bytes = std::max(operand.bytes, reach);
        if (view[2].cast<bool>()) operand.view_dtype = DLDataType{kDLUInt, 8, 1};
      }
    }
    guard.operands.push_back(std::move(operand));
  }
  guard.known.resize(count * count);
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j < count; ++j) {
      const bool both = guard.operands[i].present && guard.operands[j].present;
      if (both && guard.crosses(i, j, first)) guard.known[i * count + j] = intptr_t(first[i] - first[j]);
    }
  }
  *result = Function::FromPacked(
      [guard = std::move(guard)](PackedArgs call, Any* out) { *out = guard(call); });
}

}  // namespace

// The packed form of TVM-FFI's export: how many tensors follow depends on the operator.
extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_launch(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  TVM_FFI_SAFE_CALL_BEGIN();
  make_guard(PackedArgs(reinterpret_cast<const AnyView*>(args), count), reinterpret_cast<Any*>(result));
  TVM_FFI_SAFE_CALL_END();
}
