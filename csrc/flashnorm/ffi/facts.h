// What plans know of a device.
#pragma once

namespace flashnorm {

// What the plan needs to know of a device.
struct DeviceFacts {
  int sm = 0;  // 90 for compute capability 9.0; what the code was compiled for, if that is less
  int processors = 0;
  int shared_memory = 0;  // bytes a CTA may have
};

// What a kernel takes of a CTA's shared memory besides the row: its slots, with room to spare.
constexpr int kOwnSharedMemory = 1024;

}  // namespace flashnorm
