// What every launch asks of the CUDA runtime.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "call.h"
#include "facts.h"

namespace flashnorm {

inline void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // not sticky: the next call must not report it again
  throw runtime_error() << what << " failed: " << cudaGetErrorName(code) << ": " << cudaGetErrorString(code);
}

constexpr int kMaxDevices = 64;

// Makes a device current for as long as it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ == device) {
      previous_ = -1;
    } else {
      check(cudaSetDevice(device), "cudaSetDevice");
    }
  }
  ~DeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

// The facts of the current device. The first call on a device also has `load(facts)` load every kernel there: the
// driver would otherwise load one when it is first launched, which may be inside a graph capture.
template <class Load>
const DeviceFacts& facts_of(int device, const Load& load) {
  // One benign race: two threads may both ask, and write the same figures. Each program has a Load of its own.
  static DeviceFacts known[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) throw runtime_error() << "no room for device " << device;
  if (known[device].sm != 0) return known[device];
  DeviceFacts facts;
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&facts.processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&facts.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  facts.sm = 10 * major + minor;
  load(facts);
  known[device] = facts;
  return known[device];
}

// Loads a kernel on the current device; returns the bytes of shared memory that it has of its own.
inline int load_kernel(const void* kernel, DeviceFacts& facts) {
  cudaFuncAttributes loaded;
  check(cudaFuncGetAttributes(&loaded, kernel), "loading a kernel");
  // Code made for an older architecture (PTX that the driver translated) has neither clusters nor the wait of a
  // dependent launch in it, whatever the device could do.
  if (loaded.ptxVersion < facts.sm) facts.sm = loaded.ptxVersion;
  return int(loaded.sharedSizeBytes);
}

// Lets launches of a kernel ask for so much shared memory.
inline void allow_shared(const void* kernel, int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
}

// How a kernel is launched.
struct LaunchShape {
  int64_t ctas;
  dim3 threads;
  int64_t shared_bytes;
  int cluster;
  bool pdl;  // as a programmatic dependent launch
};

// Launches kernel(program, grid) on the device's current stream.
template <class Program, class Grid>
void launch_kernel(void (*kernel)(Program, Grid), const Program& program, const Grid& grid, const LaunchShape& shape,
                   int device) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(shape.ctas));
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = size_t(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(shape.cluster), 1, 1};
  }
  if (shape.pdl) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  void* arguments[] = {const_cast<Program*>(&program), const_cast<Grid*>(&grid)};
  check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments), "launching a kernel");
}

}  // namespace flashnorm
