#include "engine/core/numeric.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace tessera {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Value of a small float from its definition, apart from the code under test.
double value_by_definition(std::uint32_t bits, int exponent_bits, int mantissa_bits, int bias) {
  const std::uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const std::uint32_t exponent = (bits >> mantissa_bits) & ((1u << exponent_bits) - 1);
  const double sign = (bits >> (exponent_bits + mantissa_bits)) & 1 ? -1.0 : 1.0;
  const double fraction = mantissa / std::exp2(mantissa_bits);
  if (exponent == 0) return sign * fraction * std::exp2(1 - bias);
  return sign * (1 + fraction) * std::exp2(static_cast<int>(exponent) - bias);
}

// For each pair of neighbours a < b of a format: the middle goes to the even pattern, anything nearer
// to one goes to that one. `value` decodes the patterns 0 to `largest_pattern`.
template <typename Format>
void expect_ties_to_even(std::uint32_t largest_pattern, double (*value)(std::uint32_t)) {
  for (std::uint32_t bits = 0; bits < largest_pattern; ++bits) {
    const auto low = static_cast<float>(value(bits));
    const auto high = static_cast<float>(value(bits + 1));
    const float middle = low + (high - low) / 2;  // exact: one more bit than the format has
    const std::uint32_t even = bits & 1 ? bits + 1 : bits;
    ASSERT_EQ(Format(middle).bits, even) << bits;
    ASSERT_EQ(Format(std::nextafter(middle, 0.0f)).bits, bits);
    ASSERT_EQ(Format(std::nextafter(middle, kInfinity)).bits, bits + 1);
    const std::uint32_t sign = sizeof(Format) == 1 ? 0x80 : 0x8000;
    ASSERT_EQ(Format(-middle).bits, even | sign);
  }
}

double e4m3_value(std::uint32_t bits) { return value_by_definition(bits, 4, 3, 7); }
double e5m2_value(std::uint32_t bits) { return value_by_definition(bits, 5, 2, 15); }
double f16_value(std::uint32_t bits) { return value_by_definition(bits, 5, 10, 15); }
double bf16_value(std::uint32_t bits) { return value_by_definition(bits, 8, 7, 127); }

TEST(Numeric, Bf16EveryPatternDecodesAndEncodes) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const bf16 number = bf16::from_bits(static_cast<std::uint16_t>(bits));
    const float value = static_cast<float>(number);
    const std::uint32_t magnitude = bits & 0x7fff;
    if (magnitude > 0x7f80) {
      ASSERT_TRUE(std::isnan(value));
      ASSERT_TRUE(std::isnan(static_cast<float>(bf16(value))));
      continue;
    }
    if (magnitude < 0x7f80) {
      ASSERT_EQ(value, bf16_value(bits));
    }
    ASSERT_EQ(bf16(value).bits, bits);
  }
}

TEST(Numeric, Bf16RoundsToNearestEven) {
  expect_ties_to_even<bf16>(0x7f7f, bf16_value);
  EXPECT_EQ(bf16(std::numeric_limits<float>::max()).bits, 0x7f80);  // nearer to 2^128 than to the largest
  EXPECT_EQ(bf16(kInfinity).bits, 0x7f80);
  EXPECT_EQ(bf16(-kInfinity).bits, 0xff80);
  EXPECT_EQ(bf16(-0.0f).bits, 0x8000);
  // A NaN whose payload sits in the bits that are cut off must not become infinity.
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16(std::bit_cast<float>(0xffffffffu)))));
}

TEST(Numeric, Bf16StochasticRoundingIsUnbiased) {
  for (const float value : {1.0f, 1.001f, -3.14159f, 1e-30f, 6.5e20f}) {
    double sum = 0;
    for (std::uint32_t noise = 0; noise < 0x10000; ++noise) {
      sum += static_cast<float>(bf16::round_stochastic(value, noise));
    }
    // Every noise once: the mean is the value itself.
    EXPECT_NEAR(sum / 0x10000, value, std::fabs(value) * 1e-12) << value;
  }
  EXPECT_EQ(bf16::round_stochastic(kInfinity, 0xffff).bits, 0x7f80);
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16::round_stochastic(kNan, 0xffff))));
  EXPECT_EQ(bf16::round_stochastic(2.0f, 0xffffffffu).bits, bf16(2.0f).bits);
}

TEST(Numeric, F16EveryPatternDecodesAndEncodes) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = static_cast<float>(f16::from_bits(static_cast<std::uint16_t>(bits)));
    const std::uint32_t magnitude = bits & 0x7fff;
    if (magnitude > 0x7c00) {
      ASSERT_TRUE(std::isnan(value));
      ASSERT_TRUE(std::isnan(static_cast<float>(f16(value))));
      continue;
    }
    if (magnitude < 0x7c00) {
      ASSERT_EQ(value, f16_value(bits));
    }
    ASSERT_EQ(f16(value).bits, bits);
  }
}

TEST(Numeric, F16RoundsToNearestEvenAndOverflowsToInfinity) {
  expect_ties_to_even<f16>(0x7bff, f16_value);
  EXPECT_EQ(f16(65504.0f).bits, 0x7bff);
  EXPECT_EQ(f16(std::nextafter(65520.0f, 0.0f)).bits, 0x7bff);
  EXPECT_EQ(f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(f16(-1e30f).bits, 0xfc00);
  EXPECT_EQ(f16(-0.0f).bits, 0x8000);
  EXPECT_EQ(f16(1e-30f).bits, 0);
}

#ifdef __FLT16_MAX__
TEST(Numeric, F16AgreesWithTheCompiler) {
  // A prime stride visits every exponent with scattered mantissas.
  std::size_t checked = 0;
  for (std::uint64_t u = 0; u < 0x100000000ull; u += 9973) {
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(u));
    const auto reference = static_cast<_Float16>(value);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(static_cast<float>(f16(value))));
    } else {
      ASSERT_EQ(f16(value).bits, std::bit_cast<std::uint16_t>(reference)) << value;
    }
    ++checked;
  }
  EXPECT_GT(checked, 400'000u);
  for (std::uint32_t bits = 0; bits < 0x7c01; ++bits) {
    ASSERT_EQ(static_cast<float>(f16::from_bits(static_cast<std::uint16_t>(bits))),
              static_cast<float>(std::bit_cast<_Float16>(static_cast<std::uint16_t>(bits))));
  }
}
#endif

TEST(Numeric, E4m3EveryPatternDecodesAndEncodes) {
  for (std::uint32_t bits = 0; bits < 0x100; ++bits) {
    f8e4m3 number;
    number.bits = static_cast<std::uint8_t>(bits);
    const auto value = static_cast<float>(number);
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
    } else {
      EXPECT_EQ(value, e4m3_value(bits)) << bits;
    }
    // The sign of a NaN is of no account.
    EXPECT_EQ(f8e4m3(value).bits & (std::isnan(value) ? 0x7f : 0xff), bits & (std::isnan(value) ? 0x7f : 0xff));
  }
}

TEST(Numeric, E4m3RoundsToNearestEvenAndSaturates) {
  expect_ties_to_even<f8e4m3>(0x7e, e4m3_value);
  EXPECT_EQ(static_cast<float>(f8e4m3(448.0f)), 448.0f);
  for (const float big : {449.0f, 464.0f, 1e6f, kInfinity, std::numeric_limits<float>::max()}) {
    EXPECT_EQ(f8e4m3(big).bits, 0x7e) << big;
    EXPECT_EQ(f8e4m3(-big).bits, 0xfe) << big;
  }
  EXPECT_EQ(f8e4m3(kNan).bits & 0x7f, 0x7f);
  EXPECT_EQ(f8e4m3(-0.0f).bits, 0x80);
  EXPECT_EQ(f8e4m3(0x1p-10f).bits, 0);  // half of the smallest: to even
  EXPECT_EQ(f8e4m3(std::numeric_limits<float>::denorm_min()).bits, 0);
}

TEST(Numeric, E5m2EveryPatternDecodesAndEncodes) {
  for (std::uint32_t bits = 0; bits < 0x100; ++bits) {
    f8e5m2 number;
    number.bits = static_cast<std::uint8_t>(bits);
    const auto value = static_cast<float>(number);
    const std::uint32_t magnitude = bits & 0x7f;
    if (magnitude > 0x7c) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_TRUE(std::isnan(static_cast<float>(f8e5m2(value))));
    } else if (magnitude == 0x7c) {
      EXPECT_TRUE(std::isinf(value));
      EXPECT_EQ(f8e5m2(value).bits, (bits & 0x80) | 0x7b);  // conversions saturate
    } else {
      EXPECT_EQ(value, e5m2_value(bits)) << bits;
      EXPECT_EQ(f8e5m2(value).bits, bits);
    }
  }
}

TEST(Numeric, E5m2RoundsToNearestEvenAndSaturates) {
  expect_ties_to_even<f8e5m2>(0x7b, e5m2_value);
  for (const float big : {57344.0f, 57345.0f, 61440.0f, 1e9f, kInfinity}) {
    EXPECT_EQ(f8e5m2(big).bits, 0x7b) << big;
    EXPECT_EQ(f8e5m2(-big).bits, 0xfb) << big;
  }
  EXPECT_EQ(f8e5m2(0x1p-17f).bits, 0);
  EXPECT_EQ(f8e5m2(std::nextafter(0x1p-17f, 1.0f)).bits, 1);
}

TEST(Numeric, TypesNamesAndSizesAgree) {
  const std::pair<DType, std::size_t> sizes[] = {
      {DType::kF64, 8}, {DType::kF32, 4},    {DType::kBF16, 2},  {DType::kF16, 2}, {DType::kF8E4M3, 1},
      {DType::kF8E5M2, 1}, {DType::kI64, 8}, {DType::kI32, 4}, {DType::kU8, 1}};
  std::vector<std::string_view> names;
  for (const auto& [dtype, size] : sizes) {
    EXPECT_EQ(size_of(dtype), size);
    for (const std::string_view name : names) EXPECT_NE(name, name_of(dtype));
    names.push_back(name_of(dtype));
  }
  static_assert(sizeof(bf16) == 2 && sizeof(f16) == 2 && sizeof(f8e4m3) == 1 && sizeof(f8e5m2) == 1);
  // epsilon: the distance from 1 to the next number of the format.
  EXPECT_EQ(epsilon_of(DType::kBF16), static_cast<float>(bf16::from_bits(bf16(1.0f).bits + 1)) - 1);
  EXPECT_EQ(epsilon_of(DType::kF16), static_cast<float>(f16::from_bits(f16(1.0f).bits + 1)) - 1);
  EXPECT_EQ(epsilon_of(DType::kF8E4M3), e4m3_value(f8e4m3(1.0f).bits + 1u) - 1);
  EXPECT_EQ(epsilon_of(DType::kF8E5M2), e5m2_value(f8e5m2(1.0f).bits + 1u) - 1);
  EXPECT_EQ(epsilon_of(DType::kF32), std::numeric_limits<float>::epsilon());
  EXPECT_EQ(epsilon_of(DType::kF64), std::numeric_limits<double>::epsilon());
  EXPECT_EQ(epsilon_of(DType::kI32), 0);
  EXPECT_FALSE(is_floating(DType::kU8));
  EXPECT_TRUE(is_floating(DType::kF8E5M2));
}

}  // namespace
}  // namespace tessera
