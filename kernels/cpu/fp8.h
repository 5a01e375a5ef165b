// FP8 conversions for loops: the same results as engine/core/numeric.h, written so that they
// vectorise, and the record of a largest magnitude. Included by kernels/cpu/*.cpp only.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

#include "engine/core/numeric.h"
#include "kernels/cpu/common.h"

namespace tessera::cpu {

// Parameters of a format: explicit mantissa bits, exponent bias, bits of the largest number and of
// NaN.
template <typename T>
struct Fp8Format;
template <>
struct Fp8Format<f8e4m3> {
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr std::uint32_t kLargest = 0x7e, kNan = 0x7f;
};
template <>
struct Fp8Format<f8e5m2> {
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr std::uint32_t kLargest = 0x7b, kNan = 0x7f;
};

// Rounds to nearest even and saturates. Branches are selections.
template <typename T>
inline std::uint8_t encode_fp8(float value) {
  using F = Fp8Format<T>;
  constexpr int kDropped = 23 - F::kMantissa;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 24 & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  // Half of the last kept bit, less one where that bit is even: a tie goes to the even neighbour.
  // What carries out of the mantissa raises the exponent.
  const std::uint32_t rounded =
      (magnitude + ((1u << (kDropped - 1)) - 1) + (magnitude >> kDropped & 1u)) >> kDropped;
  const std::uint32_t normal = rounded - ((127u - F::kBias) << F::kMantissa);
  // Below the smallest normal number steps are equal: adding a number whose last bit is one step
  // rounds.
  constexpr std::uint32_t kAddendBits = (127u - F::kBias + 1 - F::kMantissa + 23) << 23;
  const float addend = std::bit_cast<float>(kAddendBits);
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + addend) - kAddendBits;
  constexpr std::uint32_t kSmallestNormal = (127u - F::kBias + 1) << 23;
  std::uint32_t result = magnitude < kSmallestNormal ? subnormal : normal;
  constexpr std::uint32_t kOverflow = ((127u - F::kBias) + (F::kLargest >> F::kMantissa)) << 23 |
                                      (F::kLargest & ((1u << F::kMantissa) - 1)) << kDropped;
  result = magnitude >= kOverflow ? F::kLargest : result;
  result = magnitude > 0x7f800000u ? F::kNan : result;
  return static_cast<std::uint8_t>(sign | result);
}

// The values of all 256 patterns.
template <typename T>
inline const float* fp8_table() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values;
    for (int i = 0; i < 256; ++i) {
      T element;
      element.bits = static_cast<std::uint8_t>(i);
      values[static_cast<std::size_t>(i)] = static_cast<float>(element);
    }
    return values;
  }();
  return table.data();
}

// A magnitude as bits: they order as the numbers do, with NaN above infinity.
inline std::uint32_t magnitude_bits(float value) {
  return std::bit_cast<std::uint32_t>(value) & 0x7fffffffu;
}

// amax = max(amax, magnitude), from any thread: a maximum does not depend on the order.
inline void record_magnitude(float* amax, std::uint32_t magnitude) {
  static_assert(sizeof(std::uint32_t) == sizeof(float));
  std::atomic_ref<float> record(*amax);
  float seen = record.load(std::memory_order_relaxed);
  while (magnitude_bits(seen) < magnitude &&
         !record.compare_exchange_weak(seen, std::bit_cast<float>(magnitude),
                                       std::memory_order_relaxed)) {
  }
}

// Bits of the largest magnitude of a run of stored values.
template <typename T>
inline std::uint32_t largest_magnitude(const T* values, std::int64_t n) {
  std::uint32_t largest = 0;
  if constexpr (std::is_same_v<T, bf16>) {
#pragma omp simd reduction(max : largest)
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint32_t bits = values[i].bits & 0x7fffu;
      largest = bits > largest ? bits : largest;
    }
    return largest << 16;
  } else {
#pragma omp simd reduction(max : largest)
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint32_t bits = magnitude_bits(static_cast<float>(values[i]));
      largest = bits > largest ? bits : largest;
    }
    return largest;
  }
}

// Records the largest magnitude of rows [begin, end) of `values` where `amax` is given.
template <typename T>
inline void record_rows(const Tensor& values, std::int64_t begin, std::int64_t end,
                        const Tensor& amax) {
  if (!amax.defined() || begin >= end) return;
  std::uint32_t largest = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::uint32_t of_row = largest_magnitude(row<T>(values, i), values.cols());
    largest = of_row > largest ? of_row : largest;
  }
  record_magnitude(static_cast<float*>(amax.data), largest);
}

}  // namespace tessera::cpu
