// The floating point mode that the arithmetic needs, whatever the calling thread has set.
//
// torch.set_flush_denormal and libraries built with -ffast-math leave a thread flushing subnormals to
// zero, and threads inherit it from their creator. A result must not depend on that.
#pragma once

#include <cstdint>

#include "x86.h"

namespace flashnorm {
namespace cpu {

// While it lives, this thread rounds to nearest even and keeps subnormals.
class IeeeMode {
 public:
#if defined(__x86_64__)
  IeeeMode() : saved_(_mm_getcsr()) {
    if (saved_ & kChanged) _mm_setcsr(saved_ & ~kChanged);
  }
  ~IeeeMode() {
    if (saved_ & kChanged) _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kChanged = 0x8000u | 0x0040u | 0x6000u;  // FTZ, DAZ, rounding control
  unsigned saved_;
#elif defined(__aarch64__)
  IeeeMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    if (saved_ & kChanged) set(saved_ & ~kChanged);
  }
  ~IeeeMode() {
    if (saved_ & kChanged) set(saved_);
  }

 private:
  static void set(uint64_t value) { asm volatile("msr fpcr, %0" ::"r"(value) : "memory"); }
  static constexpr uint64_t kChanged = 1ull << 24 | 3ull << 22 | 1ull << 19;  // FZ, rounding mode, FZ16
  uint64_t saved_;
#else
  IeeeMode() {}
#endif
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;
};

}  // namespace cpu
}  // namespace flashnorm
