// Runs generated CPU units without TVM-FFI's library or Python: `run_units CASE EPS SCALE CAP < operands > operands`.
//
// UNITS is a file of generated units and of `kCases`: what each exports, and which of the scalars it takes. An operand
// is read as int64 words (code, bits, rank, sizes) and its bytes, and written back as bytes alone.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <vector>

#include "flashnorm/cpu/launch.h"

struct Case {
  TVMFFISafeCallType launch;
  std::vector<int> scalars;
};

#include UNITS

// What of TVM-FFI's library a unit calls.
extern "C" void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message) {
  std::fprintf(stderr, "%s: %s\n", kind, message);
}

struct Tensor {
  std::vector<int64_t> shape, strides;
  std::vector<char> bytes;
  DLTensor view{};

  Tensor(DLDataType dtype, std::vector<int64_t> sizes) : shape(sizes), strides(sizes.size()) {
    int64_t count = 1;
    for (int i = int(sizes.size()) - 1; i >= 0; --i) strides[i] = count, count *= sizes[i];
    bytes.resize(count * dtype.bits / 8);
    view = {bytes.data(), {kDLCPU, 0}, int(sizes.size()), dtype, shape.data(), strides.data(), 0};
  }
};

int main(int, char** argv) {
  const Case& chosen = kCases[std::atoi(argv[1])];
  std::vector<TVMFFIAny> arguments;
  const auto argument = [&](int type) -> TVMFFIAny& {
    arguments.push_back({});
    arguments.back().type_index = type;
    return arguments.back();
  };
  for (const int scalar : chosen.scalars) argument(kTVMFFIFloat).v_float64 = std::strtod(argv[2 + scalar], nullptr);
  argument(kTVMFFIBool).v_int64 = 0;  // enable_pdl
  std::deque<Tensor> tensors;
  int64_t head[3];
  while (std::fread(head, sizeof(int64_t), 3, stdin) == 3) {
    std::vector<int64_t> shape(head[2]);
    if (std::fread(shape.data(), sizeof(int64_t), shape.size(), stdin) != shape.size()) return 2;
    Tensor& t = tensors.emplace_back(DLDataType{uint8_t(head[0]), uint8_t(head[1]), 1}, shape);
    if (std::fread(t.bytes.data(), 1, t.bytes.size(), stdin) != t.bytes.size()) return 2;
    argument(kTVMFFIDLTensorPtr).v_ptr = &t.view;
  }
  TVMFFIAny result{};
  if (chosen.launch(nullptr, arguments.data(), int(arguments.size()), &result) != 0) return 3;
  for (const Tensor& t : tensors) std::fwrite(t.bytes.data(), 1, t.bytes.size(), stdout);
  return 0;
}
