// How the CUDA route launches `QkNormRope`.
#pragma once

#include "../qk/plan.h"
#include "runtime.h"

namespace flashnorm {

// The facts of the current device. The first call on a device also loads every kernel of the program there: the
// driver would otherwise load one when it is first launched, which may be inside a graph capture.
template <class Program>
const QkDevice& qk_device(int device) {
  // One benign race: two threads may both ask, and write the same figures.
  static QkDevice known[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) TVM_FFI_THROW(RuntimeError) << "no room for device " << device;
  if (known[device].sm != 0) return known[device];
  QkDevice facts;
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&facts.processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&facts.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  facts.sm = 10 * major + minor;
  QkTilesOf<Program>::each([&](auto tile) {
    const void* function = reinterpret_cast<const void*>(QkKernel<Program>(qk_norm_rope<Program, decltype(tile)>));
    cudaFuncAttributes loaded;
    check(cudaFuncGetAttributes(&loaded, function), "loading a kernel");
    // Code made for an older architecture has no wait of a dependent launch in it, whatever the device could do.
    if (loaded.ptxVersion < facts.sm) facts.sm = loaded.ptxVersion;
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               facts.shared_memory - kQkOwnMemory),
          "cudaFuncSetAttribute");
  });
  known[device] = facts;
  return known[device];
}

template <class Program>
void launch_qk(const Program& program, const QkOperands& operands, bool enable_pdl) {
  if (operands.device().device_type != kDLCUDA) TVM_FFI_THROW(ValueError) << "the tensors are not on a CUDA device";
  const int64_t tokens = operands.tokens();
  if (tokens == 0) return;
  if (tokens > 0x7FFFFFFFll) TVM_FFI_THROW(ValueError) << tokens << " tokens are too many for one launch";
  const int device = operands.device().device_id;
  const DeviceGuard guard(device);
  const QkDevice& facts = qk_device<Program>(device);
  const QkPlan plan = pick_qk<Program>(facts, tokens, program.layout, operands.whole());
  const QkLaunch<Program> launch = qk_launch<Program>(plan, program.layout);

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(tokens));
  config.blockDim = dim3(unsigned(plan.threads));
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
  cudaLaunchAttribute attribute;
  config.attrs = &attribute;
  if (enable_pdl && facts.sm >= 90) {
    config.numAttrs = 1;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  const QkGrid grid(operands.inner(), program.layout);
  void* arguments[] = {const_cast<Program*>(&program), const_cast<QkGrid*>(&grid)};
  check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(launch.kernel), arguments), "launching a kernel");
}

}  // namespace flashnorm
