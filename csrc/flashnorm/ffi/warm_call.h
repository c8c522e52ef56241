// One warm call: what it was given, against what an entry was made under.
#pragma once

#include <cfloat>
#include <utility>
#include <vector>

#include "warm_launch.h"

namespace {

constexpr int kMaxOperands = 20;
constexpr int kMaxScalars = 8;
constexpr int kMaxFrom = 8;

using Parameters = std::vector<int>;

struct Slot {                 // an operand
  int param = -1;             // where it comes from; -1: it is never given
  int flag = -1;              // the parameter that asks for it
  bool written = false;
  bool absent = false;        // may be left out
  PyObject* make = nullptr;   // makes it where it is not given
  Parameters from;            // of these
  int number = -1;            // the scalar that a number in its place is
  bool vector = false;        // more than one element
  PyObject* none = nullptr;   // the number that stands for none
  PyObject* split = nullptr;  // says what anything else in its place is
};

struct Scalar {
  int param = -1;
  double least = 0;
  PyObject* none = nullptr;   // the number that stands for none, itself
};

struct Warm {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* recent;
  PyObject* next;  // is asked where this one misses; null: nobody
  int count;
  bool eager;
  int pdl;
  std::vector<Slot>* slots;
  std::vector<Scalar>* scalars;
  Parameters *none, *state, *returns, *flagged;
  std::vector<std::pair<int, PyObject*>>* only;
};

// For the function behind; an interrupt is not.
PyObject* miss() {
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
    PyErr_Clear();
  }
  return Py_NewRef(asked.miss);
}

struct Call {
  const Warm* self;
  PyObject* const* args;
  PyObject* tensors[kMaxOperands] = {};  // None where absent; references of `held` or the caller's
  PyObject* numbers[kMaxScalars] = {};
  PyObject* held[2 * kMaxOperands + 1];
  int holds = 0;

  ~Call() {
    for (int i = 0; i < holds; ++i) Py_DECREF(held[i]);
  }
  PyObject* hold(PyObject* o) { return o ? held[holds++] = o : nullptr; }

  // A number or a tensor of one element, as both.
  bool spread(int i, const Slot& slot) {
    PyObject* given = args[slot.param];
    tensors[i] = Py_None;
    numbers[slot.number] = given;
    if (PyFloat_CheckExact(given)) return true;
    if (given == Py_None && slot.none) {
      numbers[slot.number] = slot.none;
      return true;
    }
    if (is_tensor(given) && slot.vector) {
      tensors[i] = given;
      numbers[slot.number] = asked.one;
      return true;
    }
    PyObject* both = hold(PyObject_CallOneArg(slot.split, given));
    if (!both || !PyTuple_CheckExact(both) || PyTuple_GET_SIZE(both) != 2) return false;
    tensors[i] = PyTuple_GET_ITEM(both, 0);
    numbers[slot.number] = PyTuple_GET_ITEM(both, 1);
    return true;
  }

  // The operands that are there; false: something is no plain tensor.
  bool gather() {
    for (size_t i = 0; i < self->slots->size(); ++i) {
      const Slot& slot = (*self->slots)[i];
      if (slot.number >= 0) {
        if (!spread(int(i), slot)) return false;
      } else {
        tensors[i] = slot.param < 0 ? Py_None : args[slot.param];
      }
      const bool may_lack = slot.absent || slot.make || slot.param < 0 || slot.number >= 0;
      if (tensors[i] == Py_None ? !may_lack : !is_tensor(tensors[i])) return false;
    }
    for (size_t i = 0; i < self->scalars->size(); ++i) {
      if (!numbers[i]) numbers[i] = args[(*self->scalars)[i].param];
    }
    return true;
  }

  // New tensors for what was not given.
  bool make() {
    for (size_t i = 0; i < self->slots->size(); ++i) {
      const Slot& slot = (*self->slots)[i];
      if (!slot.make || tensors[i] != Py_None || (slot.flag >= 0 && args[slot.flag] != Py_True)) continue;
      PyObject* given[kMaxFrom];
      size_t n = 0;
      for (const int param : slot.from) given[n++] = args[param];
      PyObject* made = hold(PyObject_Vectorcall(slot.make, given, n, nullptr));
      if (!made || !is_tensor(made)) return false;
      tensors[i] = made;
    }
    return true;
  }

  bool follows() const {
    for (const Slot& slot : *self->slots) {
      if (slot.param >= 0 && is_tensor(args[slot.param]) && impl_of(args[slot.param])->requires_grad()) return true;
    }
    return false;
  }

  // Whether an entry was made under the same options, and takes these numbers.
  bool fits(PyObject* entry) const {
    const Parameters& state = *self->state;
    const size_t own = state.size() + 1, numbers_too = own + self->scalars->size();
    if (size_t(PyTuple_GET_SIZE(entry)) != numbers_too + 1) return false;
    for (size_t i = 0; i < state.size(); ++i) {
      if (!same(args[state[i]], PyTuple_GET_ITEM(entry, i))) return false;
    }
    PyObject* forced = nullptr;
    if (PyContextVar_Get(asked.forced, Py_None, &forced) < 0) return false;
    const bool as_forced = forced == PyTuple_GET_ITEM(entry, state.size());
    Py_DECREF(forced);
    if (!as_forced) return false;
    for (size_t i = 0; i < self->scalars->size(); ++i) {
      const Scalar& scalar = (*self->scalars)[i];
      PyObject* seen = PyTuple_GET_ITEM(entry, own + i);
      if (numbers[i] == seen) continue;
      // What serves a call without a number may be refused with one, even with an equal one.
      if (seen == scalar.none || !PyFloat_CheckExact(numbers[i])) return false;
      const double value = PyFloat_AS_DOUBLE(numbers[i]);
      if (!(scalar.least <= value && value <= FLT_MAX)) return false;
    }
    return true;
  }

  // 1: launched, 0: something differs, -1: an exception is set.
  int launch(PyObject* by) const {
    const int n = int(self->slots->size()), numbers_n = int(self->scalars->size());
    PyObject* pdl = args[self->pdl] == Py_False ? Py_False : Py_True;
    if (Py_TYPE(by) == &launch_type) {
      const auto* native = reinterpret_cast<Launch*>(by);
      TVMFFIAny packed[kMaxScalars + 1 + kMaxOperands] = {};
      DLTensor views[kMaxOperands];
      const DLTensor* cuda = nullptr;
      for (int i = 0; i < numbers_n; ++i) {
        packed[i].type_index = kTVMFFIFloat;
        packed[i].v_float64 = PyFloat_AsDouble(numbers[i]);
      }
      if (PyErr_Occurred()) return -1;
      packed[numbers_n].type_index = kTVMFFIBool;
      packed[numbers_n].v_int64 = pdl == Py_True;
      for (int i = 0; i < n; ++i) {
        if (tensors[i] == Py_None) continue;  // as zeroed
        if (!describe(impl_of(tensors[i]), views[i])) return 0;
        packed[numbers_n + 1 + i].type_index = kTVMFFIDLTensorPtr;
        packed[numbers_n + 1 + i].v_ptr = &views[i];
        if (!cuda && views[i].device.device_type == kDLCUDA) cuda = &views[i];
      }
      const bool here = native->device < 0 ||
                        c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->getDevice().index() == native->device;
      if (here) return call_guard(native, packed, numbers_n + 1 + n, cuda);
    }
    PyObject* given[kMaxScalars + 1 + kMaxOperands];
    for (int i = 0; i < numbers_n; ++i) given[i] = numbers[i];
    given[numbers_n] = pdl;
    for (int i = 0; i < n; ++i) given[numbers_n + 1 + i] = tensors[i];
    PyObject* launched = PyObject_Vectorcall(by, given, size_t(numbers_n + 1 + n), nullptr);
    if (!launched) return -1;
    const int yes = PyObject_IsTrue(launched);
    Py_DECREF(launched);
    return yes;
  }

  PyObject* result() const {
    for (size_t i = 0; i < self->slots->size(); ++i) {
      const Slot& slot = (*self->slots)[i];
      if (!slot.written || tensors[i] == Py_None) continue;
      TensorImpl* impl = impl_of(tensors[i]);
      if (!impl->is_inference()) impl->bump_version();
    }
    const Parameters& returns = *self->returns;
    if (returns.empty() && self->flagged->empty()) Py_RETURN_NONE;
    PyObject* made;
    if (returns.size() == 1) {
      made = Py_NewRef(tensors[returns[0]]);
    } else if (returns.empty()) {
      made = Py_NewRef(Py_None);
    } else {
      made = PyTuple_New(Py_ssize_t(returns.size()));
      for (size_t i = 0; made && i < returns.size(); ++i) {
        PyTuple_SET_ITEM(made, Py_ssize_t(i), Py_NewRef(tensors[returns[i]]));
      }
    }
    for (const int i : *self->flagged) {
      if (args[(*self->slots)[i].flag] != Py_True || !made) continue;
      PyObject* pair = PyTuple_Pack(2, made, tensors[i]);
      Py_DECREF(made);
      made = pair;
    }
    return made;
  }
};

}  // namespace
