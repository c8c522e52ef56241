// A guarded launch (guard.cpp) as an object of Python, and the call of it.
#pragma once

#include "warm_tensors.h"

namespace {

struct Launch {
  PyObject_HEAD
  PyObject* call;        // from Python
  PyObject* guard;       // keeps the function of the handle
  TVMFFIObjectHandle handle;
  long device;           // that must be current where `handle` is called; -1: it does not matter
};

int launch_init(PyObject* object, PyObject* args, PyObject*) {
  auto* self = reinterpret_cast<Launch*>(object);
  PyObject *call, *guard;
  unsigned long long handle;
  if (self->call || !PyArg_ParseTuple(args, "OOKl", &call, &guard, &handle, &self->device)) return -1;
  self->call = Py_NewRef(call);
  self->guard = Py_NewRef(guard);
  self->handle = reinterpret_cast<TVMFFIObjectHandle>(handle);
  return 0;
}

void launch_free(PyObject* object) {
  auto* self = reinterpret_cast<Launch*>(object);
  Py_XDECREF(self->call);
  Py_XDECREF(self->guard);
  Py_TYPE(object)->tp_free(object);
}

PyObject* launch_call(PyObject* object, PyObject* args, PyObject* more) {
  return PyObject_Call(reinterpret_cast<Launch*>(object)->call, args, more);
}

PyTypeObject launch_type = {PyVarObject_HEAD_INIT(nullptr, 0) "flashnorm.Launch", sizeof(Launch)};

// The stream that PyTorch works on now. False: an exception is set.
bool stream_of(const DLDevice& device, void** stream) {
  if (asked.dlpack && asked.dlpack->current_work_stream) {
    if (asked.dlpack->current_work_stream(device.device_type, device.device_id, stream) == 0) return true;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "no current stream");
    return false;
  }
  PyObject* index = PyLong_FromLong(device.device_id);
  PyObject* raw = index ? PyObject_CallOneArg(asked.raw_stream, index) : nullptr;
  Py_XDECREF(index);
  if (!raw) return false;
  *stream = PyLong_AsVoidPtr(raw);
  Py_DECREF(raw);
  return !PyErr_Occurred();
}

// Calls a guard as TVM-FFI does: on the tensors' stream, without the interpreter's lock. 1: launched, 0: it found a
// difference, -1: an exception is set.
int call_guard(const Launch* launch, const TVMFFIAny* packed, int count, const DLTensor* cuda) {
  TVMFFIAny result{};
  void *stream = nullptr, *before = nullptr;
  if (cuda) {
    if (!stream_of(cuda->device, &stream)) return -1;
    if (TVMFFIEnvSetStream(kDLCUDA, cuda->device.device_id, stream, &before) != 0) {
      PyErr_SetString(PyExc_RuntimeError, "the stream cannot be set");
      return -1;
    }
  }
  int code;
  Py_BEGIN_ALLOW_THREADS
  code = TVMFFIFunctionCall(launch->handle, const_cast<TVMFFIAny*>(packed), count, &result);
  Py_END_ALLOW_THREADS
  if (cuda && before != stream) TVMFFIEnvSetStream(kDLCUDA, cuda->device.device_id, before, nullptr);
  if (code == 0) return result.type_index == kTVMFFIBool && result.v_int64 != 0;
  if (!PyErr_Occurred()) Py_XDECREF(PyObject_CallNoArgs(asked.rethrow));
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "the launch failed");
  return -1;
}

// TVM-FFI, called from Python, raises the error of a function that fails: this one keeps the error that was there.
int fail(void*, const TVMFFIAny*, int32_t, TVMFFIAny*) { return -1; }

}  // namespace
