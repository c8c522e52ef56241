// Numbers in the messages of errors.
#pragma once

#include <cstdint>
#include <string>

namespace flashnorm {

// A number as text. Not by a stream: where a process has two C++ runtimes, a stream that one of them made looks its
// number format up at the other's place, and what was to be an error ends the process (an H200 with PyTorch 2.11).
inline std::string text(int64_t number) { return std::to_string(number); }

}  // namespace flashnorm
