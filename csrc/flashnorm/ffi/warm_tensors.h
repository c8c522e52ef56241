// Tensors of Python looked at where PyTorch keeps them, and what PyTorch is asked before a warm call.
//
// Built against the headers of the PyTorch that is there, and for its Python; see warm.cpp.
#pragma once

#include <Python.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/GradMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstddef>

#ifdef Py_GIL_DISABLED
#error "the tables of warm calls are guarded by the interpreter's lock"
#endif

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::ScalarType;
using c10::TensorImpl;

// What an ordinary tensor in memory is made of. Views that are negated or conjugated, subclasses, tensors under a
// transform, sparse and quantised ones all have another key.
const DispatchKeySet kOrdinary = DispatchKeySet(
    {DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
     DispatchKey::ADInplaceOrView, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA});

struct Asked {
  PyObject *tensor = nullptr, *parameter = nullptr;        // the two classes
  PyObject *profiler = nullptr, *forward_ad = nullptr;     // namespaces of modules
  PyObject *enabled = nullptr, *level = nullptr;           // names in them
  PyObject* forced = nullptr;                              // the context variable of the forced route
  PyObject* raw_stream = nullptr;                          // torch._C._cuda_getCurrentRawStream, or None
  PyObject* rethrow = nullptr;                             // raises what TVM-FFI has kept of an error
  PyObject* miss = nullptr;
  PyObject* one = nullptr;                                 // 1.0
  const DLPackExchangeAPI* dlpack = nullptr;
  size_t impl_at = 0;                                      // where a tensor's object has its TensorImpl
};
Asked asked;

bool is_tensor(PyObject* o) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(o));
  return type == asked.tensor || type == asked.parameter;
}

TensorImpl* impl_of(PyObject* tensor) {
  return *reinterpret_cast<TensorImpl**>(reinterpret_cast<char*>(tensor) + asked.impl_at);
}

// PyTorch says where a tensor is; that says where its object keeps it, which differs between releases.
bool locate(PyObject* tensors) {
  size_t found = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
    PyObject* tensor = PyTuple_GET_ITEM(tensors, i);
    PyObject* address = PyObject_GetAttrString(tensor, "_cdata");
    if (!address) return false;
    void* impl = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    if (PyErr_Occurred()) return false;
    size_t here = 0;
    for (size_t at = sizeof(PyObject); at <= sizeof(PyObject) + 2 * sizeof(void*); at += sizeof(void*)) {
      if (at + sizeof(void*) > size_t(Py_TYPE(tensor)->tp_basicsize)) break;
      if (!here && *reinterpret_cast<void**>(reinterpret_cast<char*>(tensor) + at) == impl) here = at;
    }
    if (!here || (found && here != found)) {
      PyErr_SetString(PyExc_ImportError, "a tensor's object is not laid out as expected");
      return false;
    }
    found = here;
  }
  asked.impl_at = found;
  return found != 0;
}

bool dtype_of(ScalarType type, DLDataType& to) {
  const auto is = [&](int code, int bits, int lanes = 1) {
    to = {uint8_t(code), uint8_t(bits), uint16_t(lanes)};
    return true;
  };
  switch (type) {
    case ScalarType::Float: return is(kDLFloat, 32);
    case ScalarType::Half: return is(kDLFloat, 16);
    case ScalarType::BFloat16: return is(kDLBfloat, 16);
    case ScalarType::Float8_e4m3fn: return is(kDLFloat8_e4m3fn, 8);
    case ScalarType::Float8_e5m2: return is(kDLFloat8_e5m2, 8);
    case ScalarType::Float8_e8m0fnu: return is(kDLFloat8_e8m0fnu, 8);
    case ScalarType::Float4_e2m1fn_x2: return is(kDLFloat4_e2m1fn, 4, 2);
    case ScalarType::Byte: return is(kDLUInt, 8);
    case ScalarType::Char: return is(kDLInt, 8);
    case ScalarType::Int: return is(kDLInt, 32);
    case ScalarType::Long: return is(kDLInt, 64);
    default: return false;
  }
}

bool is_ordinary(const TensorImpl* impl) { return (impl->key_set().raw_repr() & ~kOrdinary.raw_repr()) == 0; }

// A tensor as a guard looks at it; false for whatever is no ordinary one.
bool describe(TensorImpl* impl, DLTensor& to) {
  if (!is_ordinary(impl) || !dtype_of(impl->dtype().toScalarType(), to.dtype)) return false;
  const c10::Device device = impl->device();
  try {
    to.data = impl->mutable_data();
  } catch (...) {  // it has none
    return false;
  }
  to.device = {device.is_cuda() ? kDLCUDA : kDLCPU, device.is_cuda() ? device.index() : 0};
  to.ndim = int32_t(impl->dim());
  to.shape = const_cast<int64_t*>(impl->sizes().data());
  to.strides = const_cast<int64_t*>(impl->strides().data());
  to.byte_offset = 0;
  return true;
}

// Whether torch must see the call: modes, a trace, a profiler, forward gradients.
bool watched() {
  if (c10::impl::TorchDispatchModeTLS::stack_len() > 0 || at::impl::PythonTorchFunctionTLS::stack_len() > 0) return true;
  if (c10::impl::tls_local_dispatch_key_set().included_.has(DispatchKey::Tracer)) return true;
  PyObject* enabled = PyDict_GetItemWithError(asked.profiler, asked.enabled);
  PyObject* level = PyDict_GetItemWithError(asked.forward_ad, asked.level);
  if (enabled != Py_False || !level || !PyLong_CheckExact(level)) return true;
  return PyLong_AsLong(level) >= 0;
}

// Whether an option is what it was: the same object, or an equal word, flag or number.
bool same(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  const bool compared = PyUnicode_CheckExact(a) || PyBool_Check(a) || PyLong_CheckExact(a) || PyFloat_CheckExact(a);
  return compared && PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

}  // namespace
