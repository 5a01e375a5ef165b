// How much host memory this process may still take.
#pragma once

#include <cstdint>

namespace tessera {

// The smaller of what the machine has available and what the process's control group allows; 2^63 - 1
// if neither can be read.
std::int64_t available_host_bytes();

}  // namespace tessera
