// Number formats in plain C++: bf16, fp16, FP8 E4M3/E5M2. Conversions round to nearest, ties to even;
// FP8 conversions saturate (OCP 8-bit Floating Point Specification, revision 1.0).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "engine/core/dtype.h"

namespace tessera {

struct bf16 {
  std::uint16_t bits = 0;

  bf16() = default;
  explicit bf16(float value) {
    const auto u = std::bit_cast<std::uint32_t>(value);
    // A NaN keeps its sign and becomes quiet: adding the rounding bias could carry it into infinity.
    const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
    bits = static_cast<std::uint16_t>(is_nan ? ((u >> 16) | 0x40u) : rounded);
  }
  explicit operator float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  static bf16 from_bits(std::uint16_t bits) {
    bf16 result;
    result.bits = bits;
    return result;
  }
  // Stochastic rounding: `noise` is 16 uniform random bits; E[result] = value.
  static bf16 round_stochastic(float value, std::uint32_t noise) {
    const auto u = std::bit_cast<std::uint32_t>(value);
    if ((u & 0x7f800000u) == 0x7f800000u) return bf16(value);
    return from_bits(static_cast<std::uint16_t>((u + (noise & 0xffffu)) >> 16));
  }
};

struct f16 {
  std::uint16_t bits = 0;

  f16() = default;
  explicit f16(float value);
  explicit operator float() const;
  static f16 from_bits(std::uint16_t bits) {
    f16 result;
    result.bits = bits;
    return result;
  }
};

struct f8e4m3 {
  std::uint8_t bits = 0;

  f8e4m3() = default;
  explicit f8e4m3(float value);
  explicit operator float() const;
  static constexpr float kMax = 448.0f;
};

struct f8e5m2 {
  std::uint8_t bits = 0;

  f8e5m2() = default;
  explicit f8e5m2(float value);
  explicit operator float() const;
  static constexpr float kMax = 57344.0f;
};

// DType of a C++ element type.
template <typename T>
struct DTypeOf;
template <> struct DTypeOf<double> { static constexpr DType value = DType::kF64; };
template <> struct DTypeOf<float> { static constexpr DType value = DType::kF32; };
template <> struct DTypeOf<bf16> { static constexpr DType value = DType::kBF16; };
template <> struct DTypeOf<f16> { static constexpr DType value = DType::kF16; };
template <> struct DTypeOf<f8e4m3> { static constexpr DType value = DType::kF8E4M3; };
template <> struct DTypeOf<f8e5m2> { static constexpr DType value = DType::kF8E5M2; };
template <> struct DTypeOf<std::int64_t> { static constexpr DType value = DType::kI64; };
template <> struct DTypeOf<std::int32_t> { static constexpr DType value = DType::kI32; };
template <> struct DTypeOf<std::uint8_t> { static constexpr DType value = DType::kU8; };

}  // namespace tessera
