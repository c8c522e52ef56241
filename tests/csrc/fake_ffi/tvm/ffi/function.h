// See container/tensor.h. A unit's entry point is called by `run_units.cpp`, by its C++ name.
#pragma once

#define TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, function)
