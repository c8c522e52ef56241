// How the CUDA route splits a launch: a pure function of the shape and the device, so that it can be
// asked about devices that are not here. All the numbers of the route are in this file.
#pragma once

#include <cstdint>

#include "../reduce.cuh"

namespace flashnorm {

// What the plan needs to know of a device.
struct DeviceFacts {
  int sm = 0;  // 90 for compute capability 9.0
  int processors = 0;
  int shared_memory = 0;  // bytes a CTA may have
};

// How a launch is split. No result depends on it.
struct Plan {
  int threads;  // a row, in one CTA
  int rows;     // a CTA
  int cluster;  // CTAs a row
  int lanes;    // a thread, in registers; 0: streamed
  int groups;   // a lane
};

// A thread's part of a row stays in registers up to this many bytes, else in shared memory.
constexpr int kRegisterBytes = 256;

inline int round_up_to_power_of_two(int value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

// The plan for rows of `hidden_size` elements. Figures from an H200 (benchmarks/tune_cuda.py), bfloat16:
// few rows want many threads each, many rows want few, and wide rows a cluster, so that a processor
// holds several rows' parts and loads one while it stores another.
inline Plan pick(const DeviceFacts& device, int64_t rows, int hidden_size, int width, int kept_bytes) {
  const int lanes = lanes_of(hidden_size);
  if (width < kGroup) {
    const int per_cta = lanes >= 256 ? 1 : 256 / lanes;
    return {lanes, per_cta, 1, 0, 0};
  }
  if (hidden_size <= kGroup * kMaxLanes) {
    // Lanes a thread: as few as fill the machine once.
    int held = 1;
    const int most = lanes >= 1024 ? 2 : 4;
    while (held < most && lanes / held > 32 && rows * (lanes / held) > int64_t(device.processors) * 1024) held *= 2;
    const int threads = lanes / held;
    const int in_cta = threads >= 128 ? threads : threads <= 16 ? 256 : 128;
    return {threads, in_cta / threads, 1, held, 1};
  }
  const int groups = round_up_to_power_of_two((hidden_size + kGroup * kMaxLanes - 1) / (kGroup * kMaxLanes));
  if (device.sm < 90) {
    // No clusters: up to 16384 in registers, wider rows through shared memory.
    if (groups == 2 && rows > device.processors) return {256, 1, 1, 4, 2};
    if (groups == 2) return {1024, 1, 1, 1, 2};
    return {1024, 1, 1, 0, 0};
  }
  const int cluster = groups == 2 && rows <= device.processors ? 2 : groups <= 8 ? 4 : 8;
  const bool registers = groups * kGroup * kept_bytes <= kRegisterBytes;
  return {kMaxLanes / cluster, 1, cluster, registers ? 1 : 0, registers ? groups : 0};
}

}  // namespace flashnorm
