// FP8 copies of matrices with one scale per tensor or one per 128 elements: what finds the scales,
// the casts, and the transpose that products need (Hopper multiplies FP8 rows by FP8 rows only, so
// the inner dim must be the last of both). Formats: OCP 8-bit Floating Point Specification,
// revision 1.0.
#pragma once

#include <bit>
#include <cstdint>

#include "engine/core/philox.h"
#include "engine/core/tensor.h"
#include "kernels/gemm.h"

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
  Tensor scale;   // [1] fp32
};

// FP8 copies with scales of their own for every 128 elements, as products of kVector or kBlock
// operands read them. `column` is the transpose, cut along *its* rows: its vectors are 128 rows of
// `in` in one column, so it is cast from `in` and not from `row`. Under kBlock both copies hold the
// same bytes and the transposed scales.
//
// scale = the least power of two that the largest magnitude of its elements divided by fits the
// format; a copy's element = in / scale, rounded to nearest even. With powers of two a copy times
// its scale is a bf16 number exactly, and scales round nothing. Elements among which one is not
// finite become NaN together with their scale; elements of zero get a finite scale. Padding enters
// no scale.
struct QuantizeBlocks {
  Tensor in;            // [rows, cols] bf16 or fp32
  Tensor row;           // [rows, cols] e4m3 or e5m2, or undefined
  Tensor row_scale;     // scale_shape(mode, rows, cols) fp32, dense; with row
  Tensor column;        // [cols, depth] of the same format, depth >= rows, or undefined; zeros past
                        // rows as in Quantize
  Tensor column_scale;  // scale_shape(mode, cols, depth) fp32, dense; with column
  ScaleMode mode = ScaleMode::kVector;  // kVector or kBlock
};

// What a cast lost below the reach of its format: counts[0] += elements of `in` other than zero,
// counts[1] += those of them whose copy is zero. Exact, so the order does not matter.
struct CastLosses {
  Tensor in;      // [rows, cols] bf16 or fp32
  Tensor row;     // [rows, cols] e4m3 or e5m2: its row copy
  Tensor counts;  // [2] int64, added to
};

// out = in transposed, elements of one byte; columns of out past in's rows are written as zeros.
struct Transpose {
  Tensor in;   // [rows, cols]
  Tensor out;  // [cols, depth], depth >= rows
};

// An amax below this counts as this: both factors stay normal fp32 numbers.
inline constexpr float kSmallestAmax = 7.888609e-31f;  // 2^-100

namespace fp8_detail {
TESSERA_HOST_DEVICE inline std::uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  return std::bit_cast<std::uint32_t>(value);
#endif
}
TESSERA_HOST_DEVICE inline float float_of(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}
}  // namespace fp8_detail

struct Fp8Factors {
  float quantize;
  float dequantize;
};
TESSERA_HOST_DEVICE inline Fp8Factors fp8_factors(float amax, float largest) {
  const float zero_or_nan = amax - amax;  // NaN for infinities and NaN
  const float bounded = (amax < kSmallestAmax ? kSmallestAmax : amax) + zero_or_nan;
  return {largest / bounded, bounded / largest};
}

// Factors of elements whose largest magnitude is `amax`, for a format whose largest number is 1.75
// times 2^kExponent: both formats are of this form (448 and 57,344). Powers of two.
TESSERA_HOST_DEVICE inline Fp8Factors fp8_block_factors(float amax, int exponent_of_largest) {
  const float zero_or_nan = amax - amax;
  const float bounded = (amax < kSmallestAmax ? kSmallestAmax : amax) + zero_or_nan;
  // amax = m 2^e with 1 <= m < 2 fits 1.75 2^E times 2^(e - E), or the next power where m > 1.75.
  const std::uint32_t bits = fp8_detail::bits_of(bounded);
  const std::uint32_t up = (bits & 0x7fffffu) > 0x600000u ? 1u : 0u;
  const std::uint32_t biased =
      (bits >> 23 & 0xffu) + up - static_cast<std::uint32_t>(exponent_of_largest);
  return {fp8_detail::float_of((254u - biased) << 23) + zero_or_nan,
          fp8_detail::float_of(biased << 23) + zero_or_nan};
}

constexpr bool is_fp8(DType dtype) { return dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2; }

// Largest finite number of an FP8 format.
constexpr float largest_of(DType dtype) {
  return dtype == DType::kF8E4M3 ? f8e4m3::kMax : f8e5m2::kMax;
}

// Its exponent.
constexpr int exponent_of_largest(DType dtype) { return dtype == DType::kF8E4M3 ? 8 : 15; }

// Rows are held in multiples of this where they become the inner dim of an FP8 product.
inline constexpr std::int64_t kFp8Quantum = 16;
constexpr std::int64_t fp8_depth(std::int64_t rows) {
  return (rows + kFp8Quantum - 1) / kFp8Quantum * kFp8Quantum;
}

}  // namespace tessera
