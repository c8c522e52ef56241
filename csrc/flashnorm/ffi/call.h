// Calls from Python over TVM-FFI's C interface: what a function is given, what it returns, how it fails.
//
// TVM-FFI's C++ headers do all of this too, and take 6 s of each CUDA unit's build (1.5 s of a CPU unit's).
#pragma once

#include <tvm/ffi/c_api.h>

#include <cstdio>
#include <exception>
#include <type_traits>
#include <utility>

namespace flashnorm {

// What is thrown where a call cannot be carried out; Python raises it as the class of that name. A text longer than
// there is room for is cut. Numbers are not written by a stream: where a process has two C++ runtimes, a stream that one
// of them made looks its number format up at the other's place, and what was to be an error ends the process (an H200
// with PyTorch 2.11).
class CallError {
 public:
  explicit CallError(const char* kind) : kind_(kind) {}

  CallError& operator<<(const char* part) {
    append("%s", part);
    return *this;
  }
  template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
  CallError& operator<<(T number) {
    append("%lld", static_cast<long long>(number));
    return *this;
  }

  const char* kind() const { return kind_; }
  const char* message() const { return message_; }

 private:
  template <class T>
  void append(const char* format, T part) {
    const int room = int(sizeof(message_)) - used_, added = std::snprintf(message_ + used_, room, format, part);
    used_ += added < room ? added : room - 1;
  }

  const char* kind_;
  char message_[512] = "";
  int used_ = 0;
};

inline CallError value_error() { return CallError("ValueError"); }
inline CallError type_error() { return CallError("TypeError"); }
inline CallError runtime_error() { return CallError("RuntimeError"); }

// Thrown where something called has raised the call's exception already.
struct Raised {};

// A tensor of the caller's, for as long as the call.
class TensorView {
 public:
  explicit TensorView(const DLTensor* tensor) : tensor_(tensor) {}

  int ndim() const { return tensor_->ndim; }
  int64_t size(int i) const { return tensor_->shape[i]; }
  int64_t stride(int i) const { return tensor_->strides[i]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < ndim(); ++i) count *= size(i);
    return count;
  }
  DLDevice device() const { return tensor_->device; }
  DLDataType dtype() const { return tensor_->dtype; }
  void* data_ptr() const { return static_cast<char*>(tensor_->data) + tensor_->byte_offset; }

 private:
  const DLTensor* tensor_;
};

// The arguments of one call.
class Arguments {
 public:
  Arguments(const TVMFFIAny* all, int count) : all_(all), count_(count) {}

  int count() const { return count_; }
  const TVMFFIAny& operator[](int i) const { return all_[i]; }
  bool is_none(int i) const { return all_[i].type_index == kTVMFFINone; }

  // The tensor that argument i is, or null.
  const DLTensor* tensor(int i) const {
    const TVMFFIAny& any = all_[i];
    if (any.type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>(any.v_ptr);
    return any.type_index == kTVMFFITensor ? TVMFFITensorGetDLTensorPtr(any.v_obj) : nullptr;
  }

  // Argument i as a number, a truth value or a tensor.
  template <class T>
  T get(int i) const {
    const TVMFFIAny& any = all_[i];
    const bool whole = any.type_index == kTVMFFIInt || any.type_index == kTVMFFIBool;
    if constexpr (std::is_same_v<T, TensorView>) {
      const DLTensor* found = tensor(i);
      if (found == nullptr) throw wrong(i, "a tensor");
      if (found->strides == nullptr && found->ndim > 0) throw wrong(i, "a tensor with strides");
      return TensorView(found);
    } else if constexpr (std::is_floating_point_v<T>) {
      if (any.type_index == kTVMFFIFloat) return T(any.v_float64);
      if (!whole) throw wrong(i, "a number");
      return T(any.v_int64);
    } else {
      static_assert(std::is_integral_v<T>);
      if (!whole) throw wrong(i, "an integer");
      const T value = static_cast<T>(any.v_int64);
      if (!std::is_same_v<T, bool> && int64_t(value) != any.v_int64) {
        throw value_error() << "argument " << i << " is out of range, got " << any.v_int64;
      }
      return value;
    }
  }

 private:
  CallError wrong(int i, const char* expected) const {
    CallError error = type_error() << "argument " << i << " has to be " << expected << ", got ";
    const int type = all_[i].type_index;
    switch (type) {
      case kTVMFFINone: return error << "None";
      case kTVMFFIInt: return error << "an integer";
      case kTVMFFIBool: return error << "a truth value";
      case kTVMFFIFloat: return error << "a number";
      case kTVMFFIDLTensorPtr:
      case kTVMFFITensor: return error << "a tensor";
      default: return error << "an object of TVM-FFI's type " << type;
    }
  }

  const TVMFFIAny* all_;
  int count_;
};

// Runs `body`; what it throws becomes the exception of the call. Returns what a TVMFFISafeCallType has to.
template <class Body>
int guarded(const Body& body) {
  try {
    body();
    return 0;
  } catch (const Raised&) {
  } catch (const CallError& error) {
    TVMFFIErrorSetRaisedFromCStr(error.kind(), error.message());
  } catch (const std::exception& error) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", error.what());
  }
  return -1;
}

template <class... T, class Function, int... kIndex>
auto call_with(const Function& function, const Arguments& given, std::integer_sequence<int, kIndex...>) {
  if (given.count() != int(sizeof...(T))) {
    throw type_error() << "expected " << sizeof...(T) << " arguments, got " << given.count();
  }
  return function(given.get<T>(kIndex)...);
}

// Calls a function with as many of the arguments as it takes, each as what it takes there.
template <class Result, class... T>
void call(Result (*function)(T...), const Arguments& given, TVMFFIAny* result) {
  *result = {};
  if constexpr (std::is_void_v<Result>) {
    call_with<T...>(function, given, std::make_integer_sequence<int, sizeof...(T)>{});
  } else {
    result->v_int64 = call_with<T...>(function, given, std::make_integer_sequence<int, sizeof...(T)>{});
    result->type_index = std::is_same_v<Result, bool> ? kTVMFFIBool : kTVMFFIInt;
  }
}

// Gives a function whose calls are `held(Arguments, result)`.
template <class Held>
void give_function(Held held, TVMFFIAny* result) {
  const auto run = [](void* self, const TVMFFIAny* all, int32_t count, TVMFFIAny* returned) {
    return guarded([&] { (*static_cast<const Held*>(self))(Arguments(all, count), returned); });
  };
  Held* const kept = new Held(std::move(held));
  TVMFFIObjectHandle made = nullptr;
  if (TVMFFIFunctionCreate(kept, run, [](void* self) { delete static_cast<Held*>(self); }, &made) != 0) {
    delete kept;
    throw Raised{};
  }
  *result = {};
  result->type_index = kTVMFFIFunction;
  result->v_obj = static_cast<TVMFFIObject*>(made);
}

// Gives the function `kFunction` with its first argument bound to `held`.
template <auto kFunction, class Held, class... T>
void give_bound(const Held& held, void (*)(const Held&, T...), TVMFFIAny* result) {
  const auto call = [held](const Arguments& given, TVMFFIAny* returned) {
    *returned = {};
    const auto bound = [&](T... each) { kFunction(held, each...); };
    call_with<T...>(bound, given, std::make_integer_sequence<int, sizeof...(T)>{});
  };
  give_function(call, result);
}

}  // namespace flashnorm

// A symbol that TVM-FFI finds as function `name` of the library; `statement` sees Arguments `given` and `result`.
#define FLASHNORM_EXPORT_AS(name, statement)                                                              \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* all, int32_t count,          \
                                                     TVMFFIAny* result) {                                 \
    return flashnorm::guarded([&] {                                                                       \
      const flashnorm::Arguments given(all, count);                                                       \
      statement;                                                                                          \
    });                                                                                                   \
  }
#define FLASHNORM_EXPORT(name, function) FLASHNORM_EXPORT_AS(name, flashnorm::call(function, given, result))
