// Runs generated CPU units without TVM-FFI or Python: `run_units CASE EPS SCALE CAP < operands > operands`.
//
// UNITS is a file of generated units, each in a namespace of its own, and of `call(case, scalars, tensors)`. An operand
// is read as int64 words (code, bits, rank, sizes) and its bytes, and written back as bytes alone.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <tvm/ffi/function.h>

#include "flashnorm/cpu/launch.h"

using tvm::ffi::TensorView;

#include UNITS

int main(int, char** argv) {
  std::vector<TensorView> tensors;
  std::vector<std::vector<char>> bytes;
  int64_t head[3];
  while (std::fread(head, sizeof(int64_t), 3, stdin) == 3) {
    std::vector<int64_t> shape(head[2]);
    if (std::fread(shape.data(), sizeof(int64_t), shape.size(), stdin) != shape.size()) return 2;
    const TensorView sized(nullptr, {uint8_t(head[0]), uint8_t(head[1]), 1}, shape);
    bytes.emplace_back(sized.numel() * head[1] / 8);
    if (std::fread(bytes.back().data(), 1, bytes.back().size(), stdin) != bytes.back().size()) return 2;
    tensors.emplace_back(bytes.back().data(), sized.dtype(), shape);
  }
  const double scalars[] = {std::strtod(argv[2], nullptr), std::strtod(argv[3], nullptr), std::strtod(argv[4], nullptr)};
  call(std::atoi(argv[1]), scalars, tensors);
  for (const auto& each : bytes) std::fwrite(each.data(), 1, each.size(), stdout);
  return 0;
}
