// The warm call as one function of Python: what `flashnorm/core/fastpath.py` writes as text, in C++.
//
// It looks at tensors where PyTorch keeps them and hands the guard (guard.cpp) views of their memory: no DLPack
// object is made and no attribute is asked for. An extension module for this very PyTorch and this very Python; where
// it cannot be built, the text serves. Whatever is unusual is a miss, and for the function behind to say.
#include "warm_call.h"

namespace {

PyObject* warm_call(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  const auto* self = reinterpret_cast<Warm*>(object);
  const auto pass_on = [&] {
    PyObject* missed = miss();
    if (!missed || !self->next) return missed;
    Py_DECREF(missed);
    return PyObject_Vectorcall(self->next, args, flags, names);
  };
  if (names || PyVectorcall_NARGS(flags) != self->count) return pass_on();
  for (const int i : *self->none) {
    if (args[i] != Py_None) return pass_on();
  }
  for (const auto& [i, value] : *self->only) {
    if (!same(args[i], value)) return pass_on();
  }
  PyObject* pdl = args[self->pdl];
  if (pdl != Py_None && !PyBool_Check(pdl)) return pass_on();
  PyObject* x = args[self->slots->front().param];
  if (!is_tensor(x) || !is_ordinary(impl_of(x)) || (self->eager && watched())) return pass_on();

  Call call{self, args};
  if (c10::GradMode::is_enabled() && call.follows()) return pass_on();
  PyObject* elements = PyLong_FromLongLong(impl_of(x)->numel());
  PyObject* entries = elements ? PyDict_GetItemWithError(self->recent, elements) : nullptr;
  Py_XDECREF(elements);
  if (!entries || !PyTuple_CheckExact(entries)) return pass_on();
  if (!call.gather()) return pass_on();
  // The table may be emptied while the kernel runs.
  call.hold(Py_NewRef(entries));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entries); ++i) {
    PyObject* entry = PyTuple_GET_ITEM(entries, i);
    if (!PyTuple_CheckExact(entry) || !call.fits(entry)) continue;
    if (!call.make()) return pass_on();
    const int launched = call.launch(PyTuple_GET_ITEM(entry, PyTuple_GET_SIZE(entry) - 1));
    if (launched < 0) return nullptr;
    if (launched) return call.result();
  }
  return pass_on();
}

// ------------------------------------------------------------------ from the tuples that Python describes it with
PyObject* maybe(PyObject* o) { return o == Py_None ? nullptr : Py_NewRef(o); }

bool integers(PyObject* tuple, Parameters& to) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    to.push_back(int(PyLong_AsLong(PyTuple_GET_ITEM(tuple, i))));
  }
  return !PyErr_Occurred();
}

int warm_init(PyObject* object, PyObject* args, PyObject*) {
  auto* self = reinterpret_cast<Warm*>(object);
  PyObject *recent, *slots, *scalars, *none, *only, *state, *returns, *flagged, *next;
  int eager = 0;
  if (self->slots || !PyArg_ParseTuple(args, "O!ipiO!O!O!O!O!O!O!O", &PyDict_Type, &recent, &self->count, &eager, &self->pdl,
                        &PyTuple_Type, &slots, &PyTuple_Type, &scalars, &PyTuple_Type, &none, &PyTuple_Type, &only,
                        &PyTuple_Type, &state, &PyTuple_Type, &returns, &PyTuple_Type, &flagged, &next)) {
    return -1;
  }
  self->recent = Py_NewRef(recent);
  self->eager = eager != 0;
  self->next = maybe(next);
  self->slots = new std::vector<Slot>;
  self->scalars = new std::vector<Scalar>;
  self->only = new std::vector<std::pair<int, PyObject*>>;
  for (Parameters** list : {&self->none, &self->state, &self->returns, &self->flagged}) *list = new Parameters;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(slots); ++i) {
    Slot slot;
    PyObject *make, *from, *number_for_none, *split;
    int written, absent, vector;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(slots, i), "iippOO!ipOO", &slot.param, &slot.flag, &written, &absent, &make,
                          &PyTuple_Type, &from, &slot.number, &vector, &number_for_none, &split)) {
      return -1;
    }
    slot.written = written, slot.absent = absent, slot.vector = vector;
    slot.make = maybe(make), slot.none = maybe(number_for_none), slot.split = maybe(split);
    if (!integers(from, slot.from)) return -1;
    self->slots->push_back(slot);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(scalars); ++i) {
    Scalar scalar;
    PyObject* number_for_none;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(scalars, i), "idO", &scalar.param, &scalar.least, &number_for_none)) return -1;
    scalar.none = maybe(number_for_none);
    self->scalars->push_back(scalar);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(only); ++i) {
    int param;
    PyObject* value;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(only, i), "iO", &param, &value)) return -1;
    self->only->emplace_back(param, Py_NewRef(value));
  }
  if (!integers(none, *self->none) || !integers(state, *self->state) || !integers(returns, *self->returns) ||
      !integers(flagged, *self->flagged)) {
    return -1;
  }
  bool fits = !self->slots->empty() && self->slots->size() <= kMaxOperands && self->scalars->size() <= kMaxScalars;
  const auto known = [&](int param, int least) { return param >= least && param < self->count; };
  for (const Slot& slot : *self->slots) {
    fits = fits && known(slot.param, -1) && known(slot.flag, -1) && slot.from.size() <= kMaxFrom &&
           (slot.number < 0 || (slot.split && slot.param >= 0 && slot.number < int(self->scalars->size())));
    for (const int param : slot.from) fits = fits && known(param, 0);
  }
  if (!fits || !known(self->slots->front().param, 0) || !known(self->pdl, 0)) {
    PyErr_SetString(PyExc_ValueError, "a warm call that is not laid out as expected");
    return -1;
  }
  self->vectorcall = warm_call;
  return 0;
}

// They live as long as their operators, which is as long as the process: what they hold is never given back.
PyTypeObject warm_type = {PyVarObject_HEAD_INIT(nullptr, 0) "flashnorm.Warm", sizeof(Warm)};

// setup(tensor, parameter, profiler, forward_ad, forced, raw_stream, rethrow, miss, dlpack, tensors): what is asked once
PyObject* setup(PyObject*, PyObject* args) {
  PyObject *dlpack, *tensors;
  if (!PyArg_ParseTuple(args, "OOO!O!OOOOOO!", &asked.tensor, &asked.parameter, &PyDict_Type, &asked.profiler, &PyDict_Type,
                        &asked.forward_ad, &asked.forced, &asked.raw_stream, &asked.rethrow, &asked.miss, &dlpack,
                        &PyTuple_Type, &tensors)) {
    return nullptr;
  }
  for (PyObject* o : {asked.tensor, asked.parameter, asked.profiler, asked.forward_ad, asked.forced, asked.raw_stream,
                      asked.rethrow, asked.miss}) {
    Py_INCREF(o);
  }
  asked.enabled = PyUnicode_InternFromString("_is_profiler_enabled");
  asked.level = PyUnicode_InternFromString("_current_level");
  asked.one = PyFloat_FromDouble(1.0);
  if (dlpack != Py_None) {
    asked.dlpack = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(dlpack, "dlpack_exchange_api"));
    if (!asked.dlpack) return nullptr;
  }
  if (!asked.enabled || !asked.level || !asked.one || !locate(tensors)) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {{"setup", setup, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "flashnorm_warm", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_flashnorm_warm() {
  launch_type.tp_flags = warm_type.tp_flags = Py_TPFLAGS_DEFAULT;
  launch_type.tp_new = warm_type.tp_new = PyType_GenericNew;
  launch_type.tp_init = launch_init;
  launch_type.tp_dealloc = launch_free;
  launch_type.tp_call = launch_call;
  warm_type.tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
  warm_type.tp_init = warm_init;
  warm_type.tp_call = PyVectorcall_Call;
  warm_type.tp_vectorcall_offset = offsetof(Warm, vectorcall);
  if (PyType_Ready(&launch_type) < 0 || PyType_Ready(&warm_type) < 0) return nullptr;
  PyObject* made = PyModule_Create(&module);
  if (!made) return nullptr;
  // The address of what fails again, for TVM-FFI to make a function of.
  PyObject* address = PyLong_FromVoidPtr(reinterpret_cast<void*>(&fail));
  const bool added = address && PyModule_AddObjectRef(made, "fail", address) == 0 &&
                     PyModule_AddObjectRef(made, "Launch", reinterpret_cast<PyObject*>(&launch_type)) == 0 &&
                     PyModule_AddObjectRef(made, "Warm", reinterpret_cast<PyObject*>(&warm_type)) == 0;
  Py_XDECREF(address);
  return added ? made : nullptr;
}
