#include "kernels/cpu/vector_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace tessera::cpu {
namespace {

TEST(VectorMath, ExpIsWithinItsBound) {
  double worst = 0;
  // Every 977th float of both signs, a prime so that mantissas vary.
  for (std::uint32_t bits = 0; bits < 0x42b00000u; bits += 977) {  // up to 88
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const float x = std::bit_cast<float>(bits | sign);
      if (x < -87.3365f) continue;
      const double want = std::exp(static_cast<double>(x));
      const double ulp = std::ldexp(1.0, std::ilogb(want) - 23);
      const double error = std::abs(static_cast<double>(exp_of(x)) - want) / ulp;
      if (error > worst) worst = error;
    }
  }
  EXPECT_LT(worst, 1.5);
}

TEST(VectorMath, ExpAtTheEnds) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(exp_of(0.0f), 1.0f);
  EXPECT_EQ(exp_of(-infinity), 0.0f);
  EXPECT_EQ(exp_of(-88.0f), 0.0f);
  EXPECT_EQ(exp_of(-1e30f), 0.0f);
  EXPECT_EQ(exp_of(89.0f), infinity);
  EXPECT_EQ(exp_of(infinity), infinity);
  EXPECT_TRUE(std::isnan(exp_of(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_EQ(sigmoid(-infinity), 0.0f);
  EXPECT_EQ(sigmoid(infinity), 1.0f);
  EXPECT_EQ(sigmoid(0.0f), 0.5f);
}

}  // namespace
}  // namespace tessera::cpu
