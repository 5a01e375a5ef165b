#include "engine/core/numeric.h"

namespace tessera {
namespace {

// Rounds to a small binary float with `kMantissa` explicit bits and exponent bias `kBias`, returning
// the sign-less bits; `max_bits` is the largest finite pattern, used for saturation.
template <int kMantissa, int kBias>
std::uint32_t encode_magnitude(float magnitude, std::uint32_t max_bits) {
  if (magnitude == 0.0f) return 0;
  int exponent = 0;
  std::frexp(magnitude, &exponent);  // magnitude = f * 2^exponent, f in [0.5, 1)
  exponent -= 1;                     // leading one at 2^exponent
  const int min_exponent = 1 - kBias;
  const int effective = exponent < min_exponent ? min_exponent : exponent;
  // nearbyint rounds half to even in the default mode.
  const double steps = std::nearbyint(std::ldexp(static_cast<double>(magnitude), kMantissa - effective));
  const auto units = static_cast<std::uint64_t>(steps);
  // Adding the units to the exponent field lets a mantissa carry move into the exponent.
  const std::uint64_t bits =
      effective == min_exponent && units < (1u << kMantissa)
          ? units
          : (static_cast<std::uint64_t>(effective + kBias) << kMantissa) + (units - (1u << kMantissa));
  return bits > max_bits ? max_bits : static_cast<std::uint32_t>(bits);
}

template <int kMantissa, int kBias>
float decode_magnitude(std::uint32_t bits) {
  const std::uint32_t exponent = bits >> kMantissa;
  const std::uint32_t mantissa = bits & ((1u << kMantissa) - 1);
  if (exponent == 0) return std::ldexp(static_cast<float>(mantissa), 1 - kBias - kMantissa);
  return std::ldexp(static_cast<float>(mantissa | (1u << kMantissa)),
                    static_cast<int>(exponent) - kBias - kMantissa);
}

}  // namespace

f16::f16(float value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) {
    bits = sign | 0x7e00;
  } else if (std::fabs(value) >= 65520.0f) {  // rounds past the largest finite number
    bits = sign | 0x7c00;
  } else {
    bits = static_cast<std::uint16_t>(sign | encode_magnitude<10, 15>(std::fabs(value), 0x7bff));
  }
}

f16::operator float() const {
  const std::uint32_t magnitude = bits & 0x7fffu;
  const float sign = (bits & 0x8000u) ? -1.0f : 1.0f;
  if (magnitude == 0x7c00u) return sign * INFINITY;
  if (magnitude > 0x7c00u) return NAN;
  return sign * decode_magnitude<10, 15>(magnitude);
}

f8e4m3::f8e4m3(float value) {
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  bits = std::isnan(value) ? static_cast<std::uint8_t>(sign | 0x7f)
                           : static_cast<std::uint8_t>(
                                 sign | (std::fabs(value) >= kMax
                                             ? 0x7eu
                                             : encode_magnitude<3, 7>(std::fabs(value), 0x7e)));
}

f8e4m3::operator float() const {
  const std::uint32_t magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) return NAN;
  const float value = decode_magnitude<3, 7>(magnitude);
  return (bits & 0x80u) ? -value : value;
}

f8e5m2::f8e5m2(float value) {
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  bits = std::isnan(value) ? static_cast<std::uint8_t>(sign | 0x7f)
                           : static_cast<std::uint8_t>(
                                 sign | (std::fabs(value) >= kMax
                                             ? 0x7bu
                                             : encode_magnitude<2, 15>(std::fabs(value), 0x7b)));
}

f8e5m2::operator float() const {
  const std::uint32_t magnitude = bits & 0x7fu;
  const float sign = (bits & 0x80u) ? -1.0f : 1.0f;
  if (magnitude == 0x7cu) return sign * INFINITY;
  if (magnitude > 0x7cu) return NAN;
  return sign * decode_magnitude<2, 15>(magnitude);
}

}  // namespace tessera
