// How an MLP's tokens are cut into chunks. What the chunks compute: engine/train/long_rows_test.cpp.
#include "models/mlp.h"

#include <gtest/gtest.h>

#include "models/model_runtime.h"

namespace tessera::test {
namespace {

ModelConfig config_of(std::int64_t hidden, std::int64_t ffn) {
  ModelConfig config;
  config.vocab_size = 256;
  config.hidden_size = hidden;
  config.intermediate_size = ffn;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 4;
  config.head_dim = hidden / 4;
  return config;
}

BatchGeometry rows_of(std::int64_t length, int tensor = 1, bool sequence_parallel = false) {
  return batch_geometry(1, length, 1, DType::kBF16, tensor, sequence_parallel);
}

TEST(MlpChunks, AreEqualAndWithinTheBound) {
  const ModelConfig config = config_of(4096, 14336);
  const auto chunk = [&](std::int64_t length) {
    return Mlp::chunk_tokens(config, 1, rows_of(length), kMlpChunkBytes);
  };
  EXPECT_EQ(chunk(2048), 2048);
  EXPECT_EQ(chunk(18432), 18432);  // 1 GiB holds 18,724 tokens of 57,344 bytes
  EXPECT_EQ(chunk(18725), 9472);   // two chunks, not one of 18,688 and one of 37
  EXPECT_EQ(chunk(131072), 16384);
  EXPECT_EQ(chunk(1), 1);
  for (const std::int64_t length : {1, 127, 129, 18725, 40000, 131072, 131073}) {
    const std::int64_t tokens = chunk(length);
    EXPECT_LE(tokens * 2 * 14336 * 2, kMlpChunkBytes) << length;
    EXPECT_TRUE(tokens == length || tokens % 128 == 0) << length;
  }
  // Never less than what a scale of blocks covers, however small the bound.
  EXPECT_EQ(Mlp::chunk_tokens(config, 1, rows_of(1000), 1), 128);
  EXPECT_EQ(Mlp::chunk_tokens(config, 1, rows_of(100), 1), 100);
}

// Under tensor parallelism a rank has a part of the features; under sequence parallelism a chunk of
// its tokens brings those of the other ranks.
TEST(MlpChunks, CountWhatTheOtherRanksBring) {
  const ModelConfig config = config_of(4096, 14336);
  EXPECT_EQ(Mlp::chunk_tokens(config, 4, rows_of(131072, 4), kMlpChunkBytes), 65536);
  EXPECT_EQ(Mlp::chunk_tokens(config, 4, rows_of(131072, 4, true), kMlpChunkBytes), 16384);
}

std::size_t bytes_of(const MemoryPlan& plan, const std::string& part) {
  std::size_t sum = 0;
  for (const MemoryPlan::Entry& entry : plan.entries) {
    if (entry.name.find(part) != std::string::npos) sum += entry.bytes;
  }
  return sum;
}

// The wide activations are planned for a chunk where they need not be kept, and whole where they do.
TEST(MlpChunks, ArePlannedWhereNothingIsKept) {
  const ModelConfig config = config_of(64, 256);
  RuntimeOptions options;
  options.geometry = rows_of(1000);
  options.mlp_chunk_bytes = 1;
  const auto plan = [&](Recompute recompute, bool trains) {
    options.recompute = recompute;
    options.params.trains = trains;
    return measure_runtime({}, {}, 0, config, options, [](ModelRuntime&) {}).plan;
  };
  const std::size_t token = 2 * 256 * 2;
  EXPECT_EQ(bytes_of(plan(Recompute::kFull, true), "gate_up"), 128 * token);
  EXPECT_EQ(bytes_of(plan(Recompute::kFull, true), " act"), 128 * token / 2);
  EXPECT_EQ(bytes_of(plan(Recompute::kFull, true), "work dact"), 128 * token / 2);
  EXPECT_EQ(bytes_of(plan(Recompute::kNone, false), "gate_up"), 128 * token);
  EXPECT_EQ(bytes_of(plan(Recompute::kSelective, true), "gate_up"), 2 * 1000 * token);
  EXPECT_EQ(bytes_of(plan(Recompute::kNone, true), "gate_up"), 2 * 1000 * token);
  options.mlp_chunk_bytes = kMlpChunkBytes;
  EXPECT_EQ(bytes_of(plan(Recompute::kFull, true), "gate_up"), 1000 * token);
}

}  // namespace
}  // namespace tessera::test
