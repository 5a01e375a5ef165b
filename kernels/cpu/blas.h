// The one place that calls OpenBLAS: row-major single-threaded products.
#pragma once

#include <cstdint>

#include "engine/core/tensor.h"

namespace tessera::cpu {

// c[m, n] = alpha * op(a) op(b) + beta * c; with beta 0 the old c is not read. `ld*` are row strides.
template <typename T>
struct BlasGemm {
  bool transpose_a = false;
  bool transpose_b = false;
  std::int64_t m = 0, n = 0, k = 0;
  T alpha = 1;
  const T* a = nullptr;
  std::int64_t lda = 0;
  const T* b = nullptr;
  std::int64_t ldb = 0;
  T beta = 0;
  T* c = nullptr;
  std::int64_t ldc = 0;
};

void blas_gemm(const BlasGemm<float>& args);
void blas_gemm(const BlasGemm<double>& args);

// Announces the rows of `t` to ThreadSanitizer, which cannot see into OpenBLAS.
void announce_rows_read(const Tensor& t);
void announce_rows_write(const Tensor& t);

}  // namespace tessera::cpu
