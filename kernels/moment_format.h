// Adam's moments in 8 bits. Blocks of 256 neighbouring elements of a flat shard share a scale from
// their largest magnitude, after Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via
// Block-wise Quantization" (ICLR 2022): an outlier costs only its block. As there, the codes spend
// their bits on reach, since what counts is the ratio of two moments that both span decades.
//
// Two things are different. The split between exponent and fraction is fixed and in base 2,
//   m   sign, 4 bits exponent, 3 bits fraction     1.875 down to 2^-17 of the scale, and 0
//   v         5 bits exponent, 3 bits fraction     1.875 down to 2^-33 of the scale, and 0
// and the scale is the least power of two that brings the block's largest magnitude to 1.875 at most.
// A code times its scale is then a bf16 number exactly, so that checkpoints hold the values themselves
// and need no blocks; and a value has the same code under every scale that does not push it below
// 2^-14 (2^-30) of it: other cuts of the shards change next to nothing. And codes are rounded
// stochastically, from the counted noise that bf16 moments use: v moves by a thousandth in a step,
// which rounding to nearest would lose.
#pragma once

#include <cstdint>

#include "engine/core/philox.h"


namespace tessera {

inline constexpr std::int64_t kMomentBlock = 256;

// Bits of a code below its exponent, and of the noise that rounds to it.
inline constexpr int kMomentFraction = 3;
inline constexpr int kMomentNoiseBits = 23 - kMomentFraction;
// Noise that rounds to nearest.
inline constexpr std::uint32_t kMomentNearest = 1u << (kMomentNoiseBits - 1);
// Exponents of a code: the largest is 2^0.
inline constexpr int kMomentExponents = 16;          // of m
inline constexpr int kSquareMomentExponents = 32;    // of v
// Scales below this would lead to numbers that bf16 holds with fewer bits.
inline constexpr int kLeastMomentScale = -90;

namespace moment_detail {
TESSERA_HOST_DEVICE inline std::uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(std::uint32_t, x);
#endif
}
TESSERA_HOST_DEVICE inline float float_of(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}
// 2^exponent.
TESSERA_HOST_DEVICE inline float power_of_two(int exponent) {
  return float_of(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// The code of y in [0, 1.875]: the bits of a float without those of its fraction that it has not.
// Below the least normal the distance between codes stays: that of y + the least normal.
template <int kExponents>
TESSERA_HOST_DEVICE inline std::uint32_t encode(float y, std::uint32_t noise) {
  constexpr int kLeast = 2 - kExponents;  // exponent of the least normal
  constexpr std::uint32_t kFirst = 1u << kMomentFraction;   // its code
  constexpr std::uint32_t kBase = (static_cast<std::uint32_t>(127 + kLeast) << kMomentFraction) - kFirst;
  constexpr std::uint32_t kLast = (kExponents << kMomentFraction) - 1;
  const float least = power_of_two(kLeast);
  const bool is_small = y < least;
  const std::uint32_t u = bits_of(is_small ? y + least : y);
  const std::uint32_t rounded = (u + (noise & ((1u << kMomentNoiseBits) - 1))) >> kMomentNoiseBits;
  const std::uint32_t code = rounded - kBase - (is_small ? kFirst : 0);
  return code < kLast ? code : kLast;
}
template <int kExponents>
TESSERA_HOST_DEVICE inline float decode(std::uint32_t code) {
  constexpr int kLeast = 2 - kExponents;
  constexpr std::uint32_t kFirst = 1u << kMomentFraction;
  constexpr std::uint32_t kBase = (static_cast<std::uint32_t>(127 + kLeast) << kMomentFraction) - kFirst;
  const bool is_small = code < kFirst;
  const float value = float_of((code + kBase + (is_small ? kFirst : 0)) << kMomentNoiseBits);
  return is_small ? value - power_of_two(kLeast) : value;
}
}  // namespace moment_detail

// The scale of a block whose largest magnitude is this.
TESSERA_HOST_DEVICE inline float moment_scale(float largest) {
  if (!(largest > 0)) return 0;
  const std::uint32_t u = moment_detail::bits_of(largest);
  int exponent = static_cast<int>(u >> 23) - 127;
  if ((u & 0x7fffffu) > 0x700000u) ++exponent;  // above 1.875 * 2^exponent
  if (exponent < kLeastMomentScale) exponent = kLeastMomentScale;
  if (exponent > 126) exponent = 126;  // infinite: codes saturate
  return moment_detail::power_of_two(exponent);
}
// What a value is multiplied with to be encoded.
TESSERA_HOST_DEVICE inline float inverse_moment_scale(float scale) { return scale > 0 ? 1.0f / scale : 0.0f; }

// `scaled`: the moment times the inverse of its block's scale. The low kMomentNoiseBits of `noise`
// are uniform, or kMomentNearest.
TESSERA_HOST_DEVICE inline std::uint8_t encode_m(float scaled, std::uint32_t noise) {
  const float magnitude = scaled < 0 ? -scaled : scaled;
  const std::uint32_t code = moment_detail::encode<kMomentExponents>(magnitude, noise);
  return static_cast<std::uint8_t>(code | (scaled < 0 && code != 0 ? 0x80u : 0u));  // 0 has one code
}
TESSERA_HOST_DEVICE inline float decode_m(std::uint8_t code) {
  const float magnitude = moment_detail::decode<kMomentExponents>(code & 0x7fu);
  return (code & 0x80u) != 0 ? -magnitude : magnitude;
}
TESSERA_HOST_DEVICE inline std::uint8_t encode_v(float scaled, std::uint32_t noise) {
  return static_cast<std::uint8_t>(moment_detail::encode<kSquareMomentExponents>(scaled, noise));
}
TESSERA_HOST_DEVICE inline float decode_v(std::uint8_t code) {
  return moment_detail::decode<kSquareMomentExponents>(code);
}

}  // namespace tessera
