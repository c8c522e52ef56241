// See container/tensor.h.
#pragma once

#include <cstdlib>
#include <iostream>

// Says what is wrong and ends the program when the statement does.
struct FatalMessage {
  ~FatalMessage() {
    std::cerr << std::endl;
    std::exit(3);
  }
};

#define TVM_FFI_THROW(kind) (static_cast<const FatalMessage&>(FatalMessage()), std::cerr << #kind ": ")
