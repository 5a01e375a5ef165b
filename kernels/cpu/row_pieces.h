// How sums over rows (gradients of norm weights and biases) are cut on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera::cpu {

// Pieces of [0, rows): few enough to add up cheaply, at least 16 rows each, and a function of the
// number of rows alone, so that the sum does not depend on the number of threads.
struct RowPieces {
  std::int64_t rows = 0;
  std::int64_t count = 1;

  static constexpr std::int64_t kMaxPieces = 32;
  static RowPieces of(std::int64_t rows) {
    return {rows, std::clamp<std::int64_t>(rows / 16, 1, kMaxPieces)};
  }
  std::int64_t begin(std::int64_t piece) const { return rows * piece / count; }
  std::int64_t end(std::int64_t piece) const { return rows * (piece + 1) / count; }
};

}  // namespace tessera::cpu
