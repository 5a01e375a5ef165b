// How a matrix product is cut on the CPU: tiles of c that threads take in turn. The cut is a
// function of the sizes alone, so the result does not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/check.h"
#include "kernels/gemm.h"

namespace tessera::cpu {

struct GemmPlan {
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t tile_m = 1, tile_n = 1;  // rows and columns of c in a tile
  std::int64_t block_k = 1;             // inner size handled at a time when operands are converted
  bool converts_operands = false;       // bf16, FP8: panels of a and b in fp32
  bool converts_result = false;         // c has not the dtype that the product is computed in
  std::size_t element = 4;              // bytes of the compute type
  int slots = 1;                        // threads that may run a tile at the same time

  static constexpr std::int64_t kMaxTileM = 256;
  static constexpr std::int64_t kMaxTileN = 512;
  static constexpr std::int64_t kBlockK = 1024;

  static GemmPlan of(const Gemm& args, int threads) {
    GemmPlan plan;
    plan.m = args.c.rows();
    plan.n = args.c.cols();
    plan.k = args.transpose_a ? args.a.rows() : args.a.cols();
    plan.converts_operands = size_of(args.a.dtype) <= 2;
    plan.converts_result = args.c.dtype != compute_dtype(args.a.dtype);
    plan.element = size_of(compute_dtype(args.a.dtype));
    plan.tile_m = even(plan.m, kMaxTileM, 8);
    plan.tile_n = even(plan.n, kMaxTileN, 16);
    // Smaller tiles until there are some to share, as long as a tile is worth handing out: OpenBLAS
    // loses a sixth of its speed between tiles of 256 x 256 and 128 x 128.
    while (plan.count() < 4 && plan.tile_m * plan.tile_n * plan.k > (1 << 21) &&
           (plan.tile_m > 64 || plan.tile_n > 64)) {
      if (plan.tile_m >= plan.tile_n || plan.tile_n <= 64) {
        plan.tile_m = even(plan.m, plan.tile_m / 2, 8);
      } else {
        plan.tile_n = even(plan.n, plan.tile_n / 2, 16);
      }
    }
    plan.block_k = std::max<std::int64_t>(1, std::min(plan.k, kBlockK));
    plan.slots = static_cast<int>(std::clamp<std::int64_t>(plan.count(), 1, std::max(1, threads)));
    return plan;
  }

  std::int64_t tiles_m() const { return m == 0 ? 0 : (m + tile_m - 1) / tile_m; }
  std::int64_t tiles_n() const { return n == 0 ? 0 : (n + tile_n - 1) / tile_n; }
  std::int64_t count() const { return tiles_m() * tiles_n(); }

  std::int64_t a_elements() const { return converts_operands ? tile_m * block_k : 0; }
  std::int64_t b_elements() const { return converts_operands ? tile_n * block_k : 0; }
  std::int64_t c_elements() const { return converts_result ? tile_m * tile_n : 0; }
  std::size_t slot_bytes() const {
    return static_cast<std::size_t>(a_elements() + b_elements() + c_elements()) * element;
  }
  std::size_t bytes() const {
    return count() == 0 ? 0 : slot_bytes() * static_cast<std::size_t>(slots);
  }

 private:
  // The smallest multiple of `unit` that cuts `size` into as few pieces as `largest` does.
  static std::int64_t even(std::int64_t size, std::int64_t largest, std::int64_t unit) {
    if (size <= 0) return unit;
    const std::int64_t pieces = (size + largest - 1) / largest;
    const std::int64_t piece = (size + pieces - 1) / pieces;
    return (piece + unit - 1) / unit * unit;
  }
};

}  // namespace tessera::cpu
