#include "engine/core/philox.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>

namespace tessera {
namespace {

void expect_block(const PhiloxBlock& block, std::array<std::uint32_t, 4> expected) {
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(block.v[i], expected[i]) << i;
}

// Known-answer vectors of philox4x32-10 from the Random123 distribution (kat_vectors).
TEST(Philox, KnownAnswers) {
  expect_block(philox(PhiloxKey{}, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  expect_block(philox(PhiloxKey{~0ull, ~0u, ~0u}, ~0ull), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  // Counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0: the digits of pi.
  expect_block(philox(PhiloxKey{0x299f31d0a4093822ull, 0x13198a2e, 0x03707344}, 0x85a308d3243f6a88ull),
               {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(Philox, ElementsAreWordsOfBlocks) {
  const PhiloxKey key = derive_key(42, RandomPurpose::kDropout, 7);
  for (const std::uint64_t block : {0ull, 1ull, 1ull << 31, 1ull << 40}) {
    for (std::uint64_t word = 0; word < 4; ++word) {
      EXPECT_EQ(philox_bits(key, 4 * block + word), philox(key, block).v[word]);
    }
  }
}

TEST(Philox, UniformStaysBelowOneAndIsFlat) {
  const PhiloxKey key = derive_key(1, RandomPurpose::kInit);
  constexpr int kCount = 100'000;
  double sum = 0;
  double squares = 0;
  int tenths[10] = {};
  for (int i = 0; i < kCount; ++i) {
    const float u = philox_uniform(key, static_cast<std::uint64_t>(i));
    ASSERT_GE(u, 0.0f);
    ASSERT_LT(u, 1.0f);
    sum += u;
    squares += static_cast<double>(u) * u;
    ++tenths[static_cast<int>(u * 10)];
  }
  // Five standard errors.
  EXPECT_NEAR(sum / kCount, 0.5, 5 * 0.2887 / std::sqrt(kCount));
  EXPECT_NEAR(squares / kCount, 1.0 / 3, 5 * 0.2981 / std::sqrt(kCount));
  for (const int count : tenths) EXPECT_NEAR(count, kCount / 10, 5 * std::sqrt(kCount * 0.09));
}

TEST(Philox, NormalHasTheMomentsOfOne) {
  const PhiloxKey key = derive_key(3, RandomPurpose::kInit, 0, 5);
  constexpr int kCount = 200'000;
  double moments[5] = {};
  double neighbours = 0;
  for (int i = 0; i < kCount; ++i) {
    const double x = philox_normal(key, static_cast<std::uint64_t>(i));
    ASSERT_TRUE(std::isfinite(x));
    double power = 1;
    for (double& moment : moments) {
      moment += power;
      power *= x;
    }
    neighbours += x * philox_normal(key, static_cast<std::uint64_t>(i) ^ 1);
  }
  const double root = std::sqrt(static_cast<double>(kCount));
  EXPECT_NEAR(moments[1] / kCount, 0, 5 / root);
  EXPECT_NEAR(moments[2] / kCount, 1, 5 * std::sqrt(2.0) / root);
  EXPECT_NEAR(moments[3] / kCount, 0, 5 * std::sqrt(15.0) / root);
  EXPECT_NEAR(moments[4] / kCount, 3, 5 * std::sqrt(96.0) / root);
  // Elements 2k and 2k + 1 share their draws and must still be independent.
  EXPECT_NEAR(neighbours / kCount, 0, 5 * std::sqrt(2.0) / root);
}

TEST(Philox, DerivedKeysDiffer) {
  std::set<std::tuple<std::uint64_t, std::uint32_t, std::uint32_t>> keys;
  std::size_t made = 0;
  for (const std::uint64_t seed : {0ull, 1ull, 2ull, ~0ull}) {
    for (const auto purpose : {RandomPurpose::kInit, RandomPurpose::kShuffle, RandomPurpose::kSampling}) {
      for (const std::uint64_t step : {0ull, 1ull, 1ull << 32, (1ull << 32) + 1}) {
        for (const std::uint64_t stream : {0ull, 1ull, 2ull}) {
          const PhiloxKey key = derive_key(seed, purpose, step, stream);
          keys.emplace(key.seed, key.purpose, key.step);
          ++made;
        }
      }
    }
  }
  // Seed s with stream t + 1 and seed s + 1 with stream t must not meet either.
  EXPECT_EQ(keys.size(), made);
}

}  // namespace
}  // namespace tessera
