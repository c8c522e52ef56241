// How the CUDA route launches a program: which kernel, how many threads, and the launch itself.
#pragma once

#include "calls.h"
#include "select.h"

namespace flashnorm {

// The facts of the current device. The first call on a device also loads every kernel of the program there:
// the driver would otherwise load one when it is first launched, which may be inside a graph capture.
template <class Program>
const DeviceFacts& device_facts(int device) {
  // One benign race: two threads may both ask, and write the same figures.
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
  for_each_kernel<Program>([&](RowKernel<Program> kernel, auto tile) {
    const void* function = reinterpret_cast<const void*>(kernel);
    cudaFuncAttributes loaded;
    check(cudaFuncGetAttributes(&loaded, function), "loading a row kernel");
    // Code made for an older architecture (PTX that the driver translated) has neither clusters nor the wait
    // of a dependent launch in it, whatever the device could do.
    if (loaded.ptxVersion < facts.sm) facts.sm = loaded.ptxVersion;
    if (tile.kLanes == 0) {
      check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 facts.shared_memory - kOwnSharedMemory),
            "cudaFuncSetAttribute");
    }
  });
  known[device] = facts;
  return known[device];
}

#ifdef FLASHNORM_TUNING
// Tuning builds only (benchmarks/tune_cuda.py): a plan from outside instead of `pick`'s, and what there is to choose.
inline Plan& forced_plan() {
  static Plan plan{};
  return plan;
}
inline void force_plan(int threads, int rows, int cluster, int lanes, int groups, bool prefetch) {
  forced_plan() = {threads, rows, cluster, lanes, groups, prefetch};
}

// threads, cluster, lanes, groups, whether it is for rows that are not whole aligned groups, and which programs have it
// (0: all, 1: heavy ones, 2: those of several sums), of every tile.
inline std::string tiles() {
  std::string text;
  const auto describe = [&](auto tile, int programs) {
    const bool shifted = std::is_same_v<typename decltype(tile)::Access, Shifted>;
    const int numbers[] = {tile.kThreads, tile.kCluster, tile.kLanes, tile.kGroups, int(shifted), programs};
    for (const int number : numbers) text += std::to_string(number) + " ";
  };
  for_each_tile([&](auto tile) { describe(tile, 0); }, Tiles{});
  for_each_tile([&](auto tile) { describe(tile, 1); }, HeavyTiles{});
  for_each_tile([&](auto tile) { describe(tile, 2); }, LayerTiles{});
  return text;
}
#endif

template <class Program>
void launch_rows(const Program& program, const Operands& operands, bool enable_pdl) {
  using Kept = typename LocatedOf<Program>::Kept;
  if (operands.device().device_type != kDLCUDA) TVM_FFI_THROW(ValueError) << "the tensors are not on a CUDA device";
  const int64_t rows = operands.grid_rows();
  if (rows == 0) return;
  const int device = operands.device().device_id;
  const DeviceGuard guard(device);
  const DeviceFacts& facts = device_facts<Program>(device);

  Plan plan = pick(facts, rows, operands.hidden_size(), operands.width(), int(sizeof(Kept)), is_heavy<Program>(),
                   is_layered<Program>());
#ifdef FLASHNORM_TUNING
  if (forced_plan().threads > 0) plan = forced_plan();
#endif
  const RowLaunch<Program> launch = row_launch(program, operands, plan, facts);
  if (launch.ctas > 0x7FFFFFFFll) TVM_FFI_THROW(ValueError) << rows << " rows are too many for one launch";

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(launch.ctas));
  config.blockDim = dim3(plan.threads, plan.rows);
  config.dynamicSmemBytes = launch.stage_bytes;
  config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (plan.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {unsigned(plan.cluster), 1, 1};
  }
  if (enable_pdl && facts.sm >= 90) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  void* arguments[] = {const_cast<Program*>(&program), const_cast<RowGrid*>(&launch.grid)};
  const void* kernel = reinterpret_cast<const void*>(launch.kernel);
  check(cudaLaunchKernelExC(&config, kernel, arguments), "launching a row kernel");
}

}  // namespace flashnorm

#ifdef FLASHNORM_TUNING
#include <tvm/ffi/function.h>
TVM_FFI_DLL_EXPORT_TYPED_FUNC(force_plan, flashnorm::force_plan)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tiles, flashnorm::tiles)
#endif
