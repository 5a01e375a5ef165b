// Matrix products. Row-major; any operand may have a row stride.
#pragma once

#include "engine/core/tensor.h"

namespace tessera {

// c[m, n] = alpha * op(a) op(b) (+ c if accumulate) (+ bias on every row).
// a is [m, k] ([k, m] if transpose_a), b is [k, n] ([n, k] if transpose_b); a and b share one of
// bf16, fp32, fp64; c has that dtype or fp32. Products accumulate in fp32 (fp64 for fp64).
struct Gemm {
  Tensor a;
  Tensor b;
  Tensor c;
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;
  float alpha = 1.0f;
  Tensor bias;  // [n] in a's dtype, or undefined
};

}  // namespace tessera
