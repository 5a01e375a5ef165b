// Matrix products. Row-major; any operand may have a row stride.
#pragma once

#include <cstdint>

#include "engine/core/tensor.h"

namespace tessera {

// What one scale of an FP8 operand [rows, inner] belongs to.
enum class ScaleMode : unsigned char {
  kTensor,  // everything
  kVector,  // 128 neighbours along the inner dim of one row
  kBlock,   // 128 rows of 128 such neighbours
};

inline constexpr std::int64_t kScaleBlock = 128;

constexpr std::int64_t scale_blocks(std::int64_t size) {
  return (size + kScaleBlock - 1) / kScaleBlock;
}

// The scales of an operand [rows, inner], a dense fp32 matrix in the layout that cuBLASLt reads:
// kVector [blocks of inner, rows]; kBlock [blocks of rows, blocks of inner rounded up to a multiple
// of 4], zeros in the padding. (cuBLAS 13 documentation, section "128-element 1D and 128x128 2D
// block scaling".)
inline Shape scale_shape(ScaleMode mode, std::int64_t rows, std::int64_t inner) {
  if (mode == ScaleMode::kTensor) return Shape{1};
  if (mode == ScaleMode::kVector) return Shape{scale_blocks(inner), rows};
  return Shape{scale_blocks(rows), (scale_blocks(inner) + 3) / 4 * 4};
}

// c[m, n] = alpha * op(a) op(b) (+ c if accumulate) (+ bias on every row).
// a is [m, k] ([k, m] if transpose_a), b is [k, n] ([n, k] if transpose_b); a and b share one of
// bf16, fp32, fp64; c has that dtype or fp32. Products accumulate in fp32 (fp64 for fp64).
//
// FP8: a and b are e4m3 or e5m2 (not both e5m2) and stand for scale_a * a and scale_b * b; b is
// transposed and a is not; k and n are multiples of 16 and rows start at multiples of 16 bytes; c
// is bf16 or fp32. Tensor cores of Hopper keep about 14 bits of a sum of FP8 products; every 128 of
// them they are added up in fp32, with fast_accumulation never. (DeepSeek-AI 2024, DeepSeek-V3,
// section 3.3.2.)
//
// Scales of kVector and kBlock multiply each 128 products before these are added up in fp32, so
// fast_accumulation does not apply; at most one operand is kBlock. Where a GPU's library has no
// kernel for such a product (it wants rows of a kVector a in multiples of 8, among others), the
// operands are decoded to bf16 a panel at a time and multiplied so: slower, the same numbers.
struct Gemm {
  Tensor a;
  Tensor b;
  Tensor c;
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;
  float alpha = 1.0f;
  Tensor bias;  // [n] in a's dtype (c's for FP8), or undefined
  // FP8 alone:
  Tensor scale_a;  // scale_shape(scale_mode_a, rows and cols of a) fp32, dense
  Tensor scale_b;  // the same of b
  bool fast_accumulation = false;
  ScaleMode scale_mode_a = ScaleMode::kTensor;  // kTensor of both operands or of none
  ScaleMode scale_mode_b = ScaleMode::kTensor;

  bool has_block_scales() const { return scale_mode_a != ScaleMode::kTensor; }
};

}  // namespace tessera
