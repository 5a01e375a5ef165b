// FP8 copies of matrices with one scale per tensor: what finds the scale, the cast, and the
// transpose that products need (Hopper multiplies FP8 rows by FP8 rows only, so the inner dim must
// be the last of both). Formats: OCP 8-bit Floating Point Specification, revision 1.0.
#pragma once

#include <cstdint>

#include "engine/core/philox.h"
#include "engine/core/tensor.h"

namespace tessera {

// amax = max(amax, largest |in|). NaN where any element is NaN; the caller clears it before the
// first record. Exact, so the order of elements does not matter.
struct Amax {
  Tensor in;    // any shape, bf16 or fp32, rows may be strided
  Tensor amax;  // [1] fp32, at least 0
};

// row = in * q, rounded to nearest even and saturated, and column = its transpose, where q =
// largest number of the format / amax. scale = 1 / q: what a product multiplies the copies with.
// Zero and tiny amax give a finite q. A non-finite amax makes q, scale and every element NaN, so
// that what is wrong reaches the loss and the gradient norm rather than being cut to the format's
// range.
struct Quantize {
  Tensor in;      // [rows, cols] bf16 or fp32
  Tensor amax;    // [1] fp32, as Amax leaves it
  Tensor row;     // [rows, cols] e4m3 or e5m2, or undefined
  Tensor column;  // [cols, depth] of the same format, depth >= rows, or undefined; columns past
                  // rows are written as zeros, so that depth can be a multiple that products want
  Tensor scale;  // [1] fp32
};

// out = in transposed, elements of one byte; columns of out past in's rows are written as zeros.
struct Transpose {
  Tensor in;   // [rows, cols]
  Tensor out;  // [cols, depth], depth >= rows
};

// An amax below this counts as this: both factors stay normal fp32 numbers.
inline constexpr float kSmallestAmax = 7.888609e-31f;  // 2^-100

struct Fp8Factors {
  float quantize;
  float dequantize;
};
TESSERA_HOST_DEVICE inline Fp8Factors fp8_factors(float amax, float largest) {
  const float zero_or_nan = amax - amax;  // NaN for infinities and NaN
  const float bounded = (amax < kSmallestAmax ? kSmallestAmax : amax) + zero_or_nan;
  return {largest / bounded, bounded / largest};
}

constexpr bool is_fp8(DType dtype) { return dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2; }

// Largest finite number of an FP8 format.
constexpr float largest_of(DType dtype) {
  return dtype == DType::kF8E4M3 ? f8e4m3::kMax : f8e5m2::kMax;
}

// Rows are held in multiples of this where they become the inner dim of an FP8 product.
inline constexpr std::int64_t kFp8Quantum = 16;
constexpr std::int64_t fp8_depth(std::int64_t rows) {
  return (rows + kFp8Quantum - 1) / kFp8Quantum * kFp8Quantum;
}

}  // namespace tessera
