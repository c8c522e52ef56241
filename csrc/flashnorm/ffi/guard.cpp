// The warm call's guard: compares the tensors of a call with those a plan was made for, and launches.
//
// Python has its own guard (flashnorm/core/guard.py); this one does the same where a host compiler is, for a
// tenth of the time, and hands the kernel its normalised views without making tensors of them.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "call.h"

namespace {

using namespace flashnorm;

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
    if (t.strides == nullptr && t.ndim > 0) return false;
    for (size_t i = 0; i < shape.size(); ++i) {
      if (t.shape[i] != shape[i] || (shape[i] != 1 && t.strides[i] != strides[i])) return false;
    }
    return true;
  }
};

// A reference to a function of TVM-FFI's.
class Function {
 public:
  explicit Function(const TVMFFIAny& any) : handle_(any.v_obj) {
    if (any.type_index != kTVMFFIFunction) throw type_error() << "the first argument has to be a function";
    TVMFFIObjectIncRef(handle_);
  }
  Function(const Function& other) : handle_(other.handle_) { TVMFFIObjectIncRef(handle_); }
  Function& operator=(const Function&) = delete;
  ~Function() { TVMFFIObjectDecRef(handle_); }

  void operator()(TVMFFIAny* arguments, int count) const {
    TVMFFIAny result{};
    if (TVMFFIFunctionCall(handle_, arguments, count, &result) != 0) throw Raised{};
    if (result.type_index >= kTVMFFIStaticObjectBegin) TVMFFIObjectDecRef(result.v_obj);
  }

 private:
  TVMFFIObjectHandle handle_;
};

// Where two operands cross although they share no byte.
struct Crossing {
  bool is = false;
  intptr_t distance = 0;
};

struct Guard {
  Function launch;
  int leading;  // arguments before the operands
  std::vector<int> kept;  // those of them that the kernel takes
  std::vector<std::pair<int, double>> fixed;  // numbers that it does not take, and what they must be
  std::vector<Operand> operands;
  // Distances of pairs whose byte ranges cross although they share no byte: slices of one buffer, side by side.
  // Whoever makes a guard has checked that exactly.
  std::vector<Crossing> known;

  void operator()(const Arguments& given, TVMFFIAny* result) const {
    *result = {};
    result->v_int64 = launched(given);
    result->type_index = kTVMFFIBool;
  }

  // Launches and says true, or finds a difference and says false.
  bool launched(const Arguments& given) const {
    const int count = int(operands.size());
    if (given.count() != leading + count) return false;
    for (const auto& [i, value] : fixed) {
      if (given.get<double>(i) != value) return false;
    }
    DLTensor tensors[kMaxArguments];
    TVMFFIAny passed[kMaxArguments];
    uintptr_t first[kMaxArguments];
    int n = 0;
    for (const int i : kept) passed[n++] = given[i];
    for (int i = 0; i < count; ++i) {
      const Operand& expected = operands[i];
      if (given.is_none(leading + i)) {
        if (expected.present) return false;
        continue;
      }
      const DLTensor* tensor = given.tensor(leading + i);
      if (!expected.present || !tensor || !expected.matches(*tensor)) return false;
      first[i] = address_of(*tensor);
      if (first[i] == 0 || (first[i] & expected.low_mask) != expected.low) return false;
      // Sizes and strides are the guard's own: whoever gave the tensor may change it while the kernel is launched.
      const bool viewed = expected.viewed;
      const std::vector<int64_t>&shape = viewed ? expected.view_shape : expected.shape,
                                &strides = viewed ? expected.view_strides : expected.strides;
      tensors[i] = *tensor;
      tensors[i].ndim = int(shape.size());
      tensors[i].shape = const_cast<int64_t*>(shape.data());
      tensors[i].strides = const_cast<int64_t*>(strides.data());
      if (viewed) tensors[i].dtype = expected.view_dtype;
      passed[n] = {};
      passed[n].type_index = kTVMFFIDLTensorPtr;
      passed[n++].v_ptr = &tensors[i];
    }
    if (overlap(first)) return false;
    launch(passed, n);
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
        const Crossing& crossing = known[i * count + j];
        if (!same && !(crossing.is && crossing.distance == intptr_t(first[i] - first[j]))) return true;
      }
    }
    return false;
  }
};

// Bytes from the first element to the end of the last.
int64_t extent(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, DLDataType dtype) {
  int64_t last = 0;
  for (size_t d = 0; d < shape.size(); ++d) last += (shape[d] - 1) * strides[d];
  return (last + 1) * ((int64_t(dtype.bits) * dtype.lanes + 7) / 8);
}

// Arguments, one after the other.
class Reader {
 public:
  explicit Reader(const Arguments& given) : given_(given) {}

  template <class T>
  T next() {
    return given_.get<T>(step());
  }
  // A tensor, or null for None.
  const DLTensor* tensor() {
    const int i = step();
    if (given_.is_none(i)) return nullptr;
    given_.get<TensorView>(i);  // raises where it is none
    return given_.tensor(i);
  }
  const TVMFFIAny& any() { return given_[step()]; }
  void end() const {
    if (at_ != given_.count()) throw type_error() << "expected " << at_ << " arguments, got " << given_.count();
  }
  template <class T>
  std::vector<T> several(int count) {
    if (count < 0) throw value_error() << "a count is negative, got " << count;
    std::vector<T> found(count);
    for (T& each : found) each = next<T>();
    return found;
  }

 private:
  int step() {
    if (at_ == given_.count()) throw type_error() << "more than " << at_ << " arguments are needed";
    return at_++;
  }

  const Arguments& given_;
  int at_ = 0;
};

// An operand: None, or a tensor, written, aligned, the operand that it may be or -1, and -1 or a view that the kernel
// takes in its place: rank, shape, strides, whether as bytes, and a tensor of its dtype or None.
Operand operand_of(Reader& reader, uintptr_t& first) {
  Operand operand;
  const DLTensor* t = reader.tensor();
  if (t == nullptr) return operand;
  operand.present = true;
  operand.written = reader.next<bool>();
  operand.low_mask = reader.next<bool>() ? 15 : 0;
  operand.alias = reader.next<int>();
  operand.device = t->device;
  operand.dtype = t->dtype;
  operand.shape.assign(t->shape, t->shape + t->ndim);
  operand.strides.assign(t->strides, t->strides + t->ndim);
  operand.bytes = extent(operand.shape, operand.strides, t->dtype);
  first = address_of(*t);
  operand.low = first & operand.low_mask;
  const int rank = reader.next<int>();
  if (rank < 0) return operand;
  operand.viewed = true;
  operand.view_shape = reader.several<int64_t>(rank);
  operand.view_strides = reader.several<int64_t>(rank);
  const bool as_bytes = reader.next<bool>();
  const DLTensor* like = reader.tensor();
  operand.view_dtype = like ? like->dtype : t->dtype;
  // A view of blocks reaches into their padding.
  operand.bytes = std::max(operand.bytes, extent(operand.view_shape, operand.view_strides, operand.view_dtype));
  if (as_bytes) operand.view_dtype = DLDataType{kDLUInt, 8, 1};
  return operand;
}

// guard(launch, leading, count, kept ..., count, (which, value) ..., count, operands ...)
//     -> callable(*leading, *tensors) -> bool
//   kept: which of the leading arguments are handed on
//   which, value: of those that are numbers and are not
void make_guard(const Arguments& given, TVMFFIAny* result) {
  Reader reader(given);
  Guard guard{Function(reader.any()), reader.next<int>(), {}, {}, {}, {}};
  guard.kept = reader.several<int>(reader.next<int>());
  for (int left = reader.next<int>(); left > 0; --left) {
    const int which = reader.next<int>();
    guard.fixed.emplace_back(which, reader.next<double>());
  }
  const int count = reader.next<int>();
  if (count < 0 || guard.leading + count > kMaxArguments) {
    throw value_error() << "more than " << kMaxArguments << " arguments";
  }
  uintptr_t first[kMaxArguments] = {};
  for (int i = 0; i < count; ++i) guard.operands.push_back(operand_of(reader, first[i]));
  reader.end();
  guard.known.resize(count * count);
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j < count; ++j) {
      const bool both = guard.operands[i].present && guard.operands[j].present;
      if (both && guard.crosses(i, j, first)) guard.known[i * count + j] = {true, intptr_t(first[i] - first[j])};
    }
  }
  give_function(std::move(guard), result);
}

}  // namespace

FLASHNORM_EXPORT_AS(launch, make_guard(given, result))
