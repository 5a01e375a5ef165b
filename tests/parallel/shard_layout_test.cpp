// Cuts of buckets into parts and shards: every element once, whatever the sizes.
#include "parallel/shard_layout.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace tessera::test {
namespace {

BucketSpec bucket_of(const std::vector<Shape>& shapes) {
  BucketSpec bucket;
  bucket.name = "bucket";
  for (const Shape& shape : shapes) {
    ParamSpec spec;
    spec.name = "p" + std::to_string(bucket.params.size());
    spec.shape = shape;
    if (shape.rank == 2) spec.placement = Placement::sharded(0, 16);
    if (shape.rank == 1) spec.gradient_sum = GradientSum::kTensor;
    bucket.params.push_back(spec);
  }
  return bucket;
}

TEST(ShardLayout, ShardsHoldEveryElementOnce) {
  const BucketSpec bucket =
      bucket_of({Shape{37, 20}, Shape{1}, Shape{257}, Shape{16, 1000}, Shape{129}});
  for (const int shards : {1, 2, 3, 8}) {
    for (const std::int64_t max_part : {0, 1, 300, 5000, 1 << 30}) {
      const BucketLayout layout = lay_out_bucket(bucket, 2, 1, shards, max_part);
      ASSERT_FALSE(layout.parts.empty());
      EXPECT_EQ(layout.shard_size * shards, layout.size);
      std::int64_t at = 0;
      std::int64_t in_shard = 0;
      for (const BucketLayout::Part& part : layout.parts) {
        EXPECT_EQ(part.begin, at);
        EXPECT_EQ(part.shard_begin, in_shard);
        EXPECT_EQ(part.shard_size * shards, part.size);
        EXPECT_EQ(part.shard_size % kShardAlignment, 0);
        EXPECT_TRUE(max_part == 0 ||
                    part.size <= std::max<std::int64_t>(max_part, kShardAlignment * shards));
        at += part.size;
        in_shard += part.shard_size;
      }
      EXPECT_EQ(at, layout.size);
      for (std::size_t i = 0; i < bucket.params.size(); ++i) {
        std::vector<int> held(static_cast<std::size_t>(layout.pieces[i].extent.elements()), 0);
        for (int shard = 0; shard < shards; ++shard) {
          std::int64_t end = 0;
          for (const ShardPiece& piece : pieces_of_shard(layout, shard)) {
            EXPECT_GE(piece.shard_begin, end);
            end = piece.shard_begin + piece.length;
            if (piece.param != static_cast<int>(i)) continue;
            for (std::int64_t e = 0; e < piece.length; ++e)
              ++held[static_cast<std::size_t>(piece.local_begin + e)];
          }
          EXPECT_LE(end, layout.shard_size);
        }
        EXPECT_TRUE(std::all_of(held.begin(), held.end(), [](int count) { return count == 1; }))
            << "parameter " << i << " over " << shards << " shards, parts of " << max_part;
      }
    }
  }
}

TEST(ShardLayout, RangesOfShardsCoverARangeOfTheBucket) {
  const BucketSpec bucket = bucket_of({Shape{64, 64}, Shape{300}, Shape{5}});
  for (const int shards : {1, 3}) {
    for (const std::int64_t max_part : {0, 512}) {
      const BucketLayout layout = lay_out_bucket(bucket, 2, 0, shards, max_part);
      ASSERT_GT(layout.tensor_sum_end, 0);
      std::int64_t covered = 0;
      for (int shard = 0; shard < shards; ++shard) {
        std::int64_t last = -1;
        for (const auto& range :
             shard_ranges(layout, shard, layout.tensor_sum_begin, layout.tensor_sum_end)) {
          EXPECT_GT(range.begin, last);  // not even adjacent: those are one
          EXPECT_LE(range.end, layout.shard_size);
          last = range.end;
          covered += range.end - range.begin;
        }
      }
      EXPECT_EQ(covered, layout.tensor_sum_end - layout.tensor_sum_begin);
    }
  }
}

}  // namespace
}  // namespace tessera::test
