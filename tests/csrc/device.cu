// The device bodies of csrc/'s conversions and activations as functions over tensors: N elements a thread, as the kernels
// have them.
#include <cuda_runtime.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "flashnorm/activation.cuh"
#include "flashnorm/codec8.cuh"
#include "flashnorm/ffi/call.h"
#include "flashnorm/vec.cuh"

namespace {

using namespace flashnorm;

constexpr int N = kGroup;

// The number of this thread's pack.
__device__ int64_t own() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }

__device__ void take(float (&v)[N], const float* from) {
  for (int j = 0; j < N; ++j) v[j] = from[j];
}
__device__ void give(float* to, const float (&v)[N]) {
  for (int j = 0; j < N; ++j) to[j] = v[j];
}

template <class T>
__global__ void narrow_all(const float* from, T* to, int64_t packs) {
  const int64_t i = own();
  if (i >= packs) return;
  float v[N];
  take(v, from + i * N);
  Pack<T, N> pack;
  narrow(pack, v);
  RowRef<T>{to, 0, 0}.store(pack, At<Whole>{{0, 0}, int(i * N), {}});
}

template <class T>
__global__ void widen_all(const T* from, float* to, int64_t packs) {
  const int64_t i = own();
  if (i >= packs) return;
  Pack<T, N> pack;
  RowRef<const T>{from, 0, 0}.load(pack, At<Whole>{{0, 0}, int(i * N), {}});
  float v[N];
  widen(v, pack);
  give(to + i * N, v);
}

template <Activation kActivation>
__global__ void activate_all(const float* from, float* to, int64_t packs) {
  const int64_t i = own();
  if (i >= packs) return;
  float v[N];
  take(v, from + i * N);
  activate<kActivation, bf16>(v);
  give(to + i * N, v);
}

template <class From, class To>
void run(void (*kernel)(const From*, To*, int64_t), const TensorView& from, const TensorView& to) {
  const int64_t packs = from.numel() / N;
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, from.device().device_id));
  kernel<<<unsigned((packs + 255) / 256), 256, 0, stream>>>(static_cast<const From*>(from.data_ptr()),
                                                             static_cast<To*>(to.data_ptr()), packs);
  if (cudaGetLastError() != cudaSuccess) throw flashnorm::runtime_error() << "the launch failed";
}

}  // namespace

#define CONVERSION(name, T)                                                                       \
  void narrow_##name(TensorView from, TensorView to) { run<float, T>(narrow_all<T>, from, to); } \
  FLASHNORM_EXPORT(narrow_##name, narrow_##name)
#define WIDENING(name, T)                                                                       \
  void widen_##name(TensorView from, TensorView to) { run<T, float>(widen_all<T>, from, to); } \
  FLASHNORM_EXPORT(widen_##name, widen_##name)

#define ACTIVATION(name, kind)                                                                                  \
  void name(TensorView from, TensorView to) { run<float, float>(activate_all<Activation::kind>, from, to); } \
  FLASHNORM_EXPORT(name, name)

ACTIVATION(silu, kSilu)
ACTIVATION(sigmoid, kSigmoid)
CONVERSION(bf16, bf16)
CONVERSION(f16, f16)
CONVERSION(e4m3, e4m3)
CONVERSION(e5m2, e5m2)
CONVERSION(int8, int8_t)
WIDENING(bf16, bf16)
WIDENING(f16, f16)
WIDENING(int8, int8_t)
