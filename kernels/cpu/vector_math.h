// exp for vectorised loops. Included by kernels/cpu/*.cpp only.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace tessera::cpu {

// exp(x) within 1.5 ulp for x up to 88; above that infinity, below -87.33 (results under 2^-126) zero.
// Cody-Waite reduction x = n ln2 + r, |r| <= ln2 / 2, and a polynomial fitted for minimal relative error
// (weighted least squares, 0.05 ulp before rounding). Branch-free, so that loops vectorise.
inline float exp_of(float x) {
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kLn2High = 0.693145751953125f;         // 15 bits: n * high is exact
  constexpr float kLn2Low = 1.42860682030941723212e-6f;  // ln2 - high
  constexpr float kMagic = 12582912.0f;                  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kLowest = -87.3365447f, kHighest = 88.7228394f;
  // Comparisons with NaN are false: it passes through to the result.
  const float above = x < kLowest ? kLowest : x;
  const float clamped = above > kHighest ? kHighest : above;
  const float shifted = clamped * kLog2e + kMagic;
  const float n = shifted - kMagic;
  const float r = (clamped - n * kLn2High) - n * kLn2Low;
  float q = 1.381461276e-03f;
  q = q * r + 8.368710056e-03f;
  q = q * r + 4.166838899e-02f;
  q = q * r + 1.666652113e-01f;
  q = q * r + 4.999999404e-01f;
  const float p = (q * r) * r + r + 1.0f;
  // The low bits of `shifted` hold n; n = 128 makes the factor infinite.
  const float scale = std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) + 127u) << 23);
  return x < kLowest ? 0.0f : p * scale;
}

inline double exp_of(double x) { return std::exp(x); }

// 1 / (1 + exp(-x)).
template <typename C>
inline C sigmoid(C x) {
  return C(1) / (C(1) + exp_of(-x));
}

}  // namespace tessera::cpu
