#include "parallel/reduction.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace tessera {
namespace {

template <typename T>
std::vector<T> reduce(ReduceOp op, const std::vector<std::vector<T>>& inputs) {
  std::vector<const void*> in;
  for (const auto& input : inputs) in.push_back(input.data());
  std::vector<T> out(inputs[0].size());
  void* result = out.data();
  reduce_in_rank_order(DTypeOf<T>::value, op, in, {&result, 1},
                       static_cast<std::int64_t>(out.size()));
  return out;
}

TEST(Reduction, AddsInRankOrder) {
  // In any other order the small numbers survive.
  EXPECT_EQ(reduce<float>(ReduceOp::kSum, {{1.0f}, {1e8f}, {-1e8f}})[0], 0.0f);
  EXPECT_EQ(reduce<float>(ReduceOp::kSum, {{1e8f}, {-1e8f}, {1.0f}})[0], 1.0f);
}

TEST(Reduction, Bf16IsRoundedOnce) {
  // 256 + 1 is lost in bf16, where neighbours of 256 are 2 apart; in fp32 two ones add up.
  const bf16 big(256.0f);
  const bf16 one(1.0f);
  const auto sum = reduce<bf16>(ReduceOp::kSum, {{big}, {one}, {one}});
  EXPECT_EQ(static_cast<float>(sum[0]), 258.0f);
}

TEST(Reduction, MaximumKeepsNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto result = reduce<float>(ReduceOp::kMax, {{1, nan, 3, -2}, {2, 1, nan, -3}});
  EXPECT_EQ(result[0], 2);
  EXPECT_TRUE(std::isnan(result[1]));
  EXPECT_TRUE(std::isnan(result[2]));
  EXPECT_EQ(result[3], -2);
}

TEST(Reduction, IntegersWrap) {
  const std::int32_t most = std::numeric_limits<std::int32_t>::max();
  EXPECT_EQ(reduce<std::int32_t>(ReduceOp::kSum, {{most}, {1}})[0],
            std::numeric_limits<std::int32_t>::min());
  EXPECT_EQ(reduce<std::int64_t>(ReduceOp::kMax, {{-5}, {-7}, {-6}})[0], -5);
}

TEST(Reduction, OutputMayBeAnInput) {
  std::vector<double> a(5000, 1);
  std::vector<double> b(5000, 2);
  const void* in[] = {a.data(), b.data()};
  void* out[] = {a.data(), b.data()};
  reduce_in_rank_order(DType::kF64, ReduceOp::kSum, in, out, 5000);
  EXPECT_EQ(a, std::vector<double>(5000, 3));
  EXPECT_EQ(b, std::vector<double>(5000, 3));
}

TEST(Reduction, SlicesCoverTheWholeOnWholeCacheLines) {
  for (const std::int64_t count : {0, 1, 15, 16, 17, 1000, 100003}) {
    for (const int parts : {1, 2, 3, 7, 64}) {
      std::int64_t at = 0;
      for (int part = 0; part < parts; ++part) {
        const ElementRange range = slice_of(count, 4, part, parts);
        EXPECT_EQ(range.begin, at);
        EXPECT_TRUE(range.begin % 16 == 0 || range.begin == count);
        at = range.end;
      }
      EXPECT_EQ(at, count);
    }
  }
}

}  // namespace
}  // namespace tessera
