// How flat shards are cut on the CPU: blocks of a fixed size, so that sums over a shard do not depend on
// the number of threads.
#pragma once

#include <cstdint>

namespace tessera::cpu {

inline constexpr std::int64_t kFlatBlock = 16384;

inline std::int64_t flat_blocks(std::int64_t n) { return (n + kFlatBlock - 1) / kFlatBlock; }

}  // namespace tessera::cpu
