// Stands in for TVM-FFI's header of this name where a unit is compiled for a processor that TVM-FFI's library is not
// here for: as much of a tensor view as `flashnorm/ffi/operands.h` uses.
#pragma once

#include <cstdint>
#include <vector>

enum { kDLCPU = 1 };
enum { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLFloat8_e4m3fn = 10, kDLFloat8_e5m2 = 12 };

struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct DLDevice {
  int device_type, device_id;
};

namespace tvm {
namespace ffi {

class TensorView {
 public:
  TensorView(void* data, DLDataType dtype, std::vector<int64_t> shape)
      : data_(data), dtype_(dtype), shape_(shape), strides_(shape.size(), 1) {
    for (int i = int(shape.size()) - 2; i >= 0; --i) strides_[i] = strides_[i + 1] * shape[i + 1];
  }

  int ndim() const { return int(shape_.size()); }
  int64_t size(int i) const { return shape_[i]; }
  int64_t stride(int i) const { return strides_[i]; }
  int64_t numel() const {
    int64_t count = 1;
    for (const int64_t n : shape_) count *= n;
    return count;
  }
  DLDevice device() const { return {kDLCPU, 0}; }
  DLDataType dtype() const { return dtype_; }
  void* data_ptr() const { return data_; }
  uint64_t byte_offset() const { return 0; }

 private:
  void* data_;
  DLDataType dtype_;
  std::vector<int64_t> shape_, strides_;
};

}  // namespace ffi
}  // namespace tvm
