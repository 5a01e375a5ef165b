// exp for vectorised loops. Included by kernels/cpu/*.cpp only.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace tessera::cpu {

// exp(x) with a relative error below 1.5 ulp; results under 2^-126 are flushed to 0. Cody-Waite
// reduction x = n ln2 + r, |r| <= ln2 / 2, and a polynomial fitted for minimal relative error
// (weighted least squares, error 0.05 ulp before rounding). Branch-free, so that loops vectorise.
inline float exp_of(float x) {
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kLn2High = 0.693145751953125f;         // 15 bits: n * high is exact
  constexpr float kLn2Low = 1.42860682030941723212e-6f;  // ln2 - high
  constexpr float kMagic = 12582912.0f;                  // 1.5 * 2^23: adding it rounds to an integer
  const float clamped = x < -87.5f ? -87.5f : (x > 88.8f ? 88.8f : x);
  const float shifted = clamped * kLog2e + kMagic;
  const float n = shifted - kMagic;
  const float r = (clamped - n * kLn2High) - n * kLn2Low;
  float q = 1.381461276e-03f;
  q = q * r + 8.368710056e-03f;
  q = q * r + 4.166838899e-02f;
  q = q * r + 1.666652113e-01f;
  q = q * r + 4.999999404e-01f;
  const float p = (q * r) * r + r + 1.0f;
  // 2^n in two factors: n = 128 has no exponent of its own.
  const auto exponent = static_cast<std::int32_t>(n);
  const std::int32_t half = exponent >> 1;
  const float scale_a = std::bit_cast<float>((half + 127) << 23);
  const float scale_b = std::bit_cast<float>((exponent - half + 127) << 23);
  float result = p * scale_a * scale_b;
  result = x < -87.3365447f ? 0.0f : result;
  result = x > 88.7228394f ? std::numeric_limits<float>::infinity() : result;
  return x != x ? x : result;
}

inline double exp_of(double x) { return std::exp(x); }

// 1 / (1 + exp(-x)).
template <typename C>
inline C sigmoid(C x) {
  return C(1) / (C(1) + exp_of(-x));
}

}  // namespace tessera::cpu
