// How the CUDA route launches a backward.
#pragma once

#include "backward_select.h"
#include "runtime.h"

namespace flashnorm {

// The facts of the current device; the first call on a device also loads every kernel of the program there (ffi/launch.h).
template <class Program>
const DeviceFacts& backward_facts(int device) {
  static DeviceFacts known[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) TVM_FFI_THROW(RuntimeError) << "no room for device " << device;
  if (known[device].sm != 0) return known[device];
  DeviceFacts facts;
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&facts.processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&facts.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  facts.sm = 10 * major + minor;
  for_each_backward_kernel<Program>([&](auto kernel) {
    const void* function = reinterpret_cast<const void*>(kernel);
    cudaFuncAttributes loaded;
    check(cudaFuncGetAttributes(&loaded, function), "loading a backward kernel");
    if (loaded.ptxVersion < facts.sm) facts.sm = loaded.ptxVersion;  // PTX has neither clusters nor dependent launches
    const int most = facts.shared_memory - int(loaded.sharedSizeBytes);
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, most), "cudaFuncSetAttribute");
  });
  known[device] = facts;
  return known[device];
}

#ifdef FLASHNORM_TUNING
// Tuning builds only: a plan from outside, and whether rows and sums are read apart.
struct ForcedStreams {
  StreamPlan plan{};
  bool apart = false;
};
inline ForcedStreams& forced_streams() {
  static ForcedStreams forced;
  return forced;
}
inline void force_streams(int threads, int rows, int cluster, int lanes, int groups, int stages, bool apart) {
  forced_streams() = {{threads, rows, cluster, lanes, groups, stages}, apart};
}
#endif

template <class Program>
void launch_backward(const Program& program, const Operands& operands, int64_t workspace, bool enable_pdl) {
  if (operands.device().device_type != kDLCUDA) TVM_FFI_THROW(ValueError) << "the tensors are not on a CUDA device";
  check_workspace(program, operands, workspace);
  const int device = operands.device().device_id;
  const DeviceGuard guard(device);
  const DeviceFacts& facts = backward_facts<Program>(device);
  StreamPlan forced{};
  bool apart = false;
#ifdef FLASHNORM_TUNING
  forced = forced_streams().plan;
  apart = forced_streams().apart;
#endif
  run_backward(program, operands, facts, forced, apart, [&](auto kernel, const auto& grid, const Extent& extent) {
    if (extent.ctas > 0x7FFFFFFFll) TVM_FFI_THROW(ValueError) << "too many rows for one launch";
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(extent.ctas));
    config.blockDim = dim3(extent.threads_x, extent.threads_y);
    config.dynamicSmemBytes = size_t(extent.shared_bytes);
    config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
    cudaLaunchAttribute attributes[2];
    config.attrs = attributes;
    if (extent.cluster > 1) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {unsigned(extent.cluster), 1, 1};
    }
    if (enable_pdl && facts.sm >= 90) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    using Grid = std::decay_t<decltype(grid)>;
    void* arguments[] = {const_cast<Program*>(&program), const_cast<Grid*>(&grid)};
    check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments), "launching a backward kernel");
  });
}

}  // namespace flashnorm

#ifdef FLASHNORM_TUNING
#include <tvm/ffi/function.h>
TVM_FFI_DLL_EXPORT_TYPED_FUNC(force_streams, flashnorm::force_streams)
#endif
