// Matrix products. Row-major; any operand may have a row stride.
#pragma once

#include "engine/core/tensor.h"

namespace tessera {

// c[m, n] = alpha * op(a) op(b) (+ c if accumulate) (+ bias on every row).
// a is [m, k] ([k, m] if transpose_a), b is [k, n] ([n, k] if transpose_b); a and b share one of
// bf16, fp32, fp64; c has that dtype or fp32. Products accumulate in fp32 (fp64 for fp64).
//
// FP8: a and b are e4m3 or e5m2 (not both e5m2) and stand for scale_a * a and scale_b * b; b is
// transposed and a is not; k and n are multiples of 16 and rows start at multiples of 16 bytes; c
// is bf16 or fp32. Tensor cores of Hopper keep about 14 bits of a sum of FP8 products; every 128 of
// them they are added up in fp32, with fast_accumulation never. (DeepSeek-AI 2024, DeepSeek-V3,
// section 3.3.2.)
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
  Tensor scale_a;  // [1] fp32
  Tensor scale_b;
  bool fast_accumulation = false;
};

}  // namespace tessera
