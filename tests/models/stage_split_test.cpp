#include "models/stage_split.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/expect_error.h"

namespace tessera::test {
namespace {

ModelConfig config_of(std::int64_t layers, std::int64_t vocabulary) {
  ModelConfig config;
  config.vocab_size = vocabulary;
  config.hidden_size = 64;
  config.intermediate_size = 128;
  config.num_hidden_layers = layers;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 4;
  config.head_dim = 16;
  return config;
}

double cost_of(const StagePiece& piece, double head) {
  return piece.num_layers + (piece.has_head ? head : 0);
}

// The least that the most expensive of `pieces` pieces can cost, by trying every cut.
double cheapest(int layers, int pieces, double head) {
  if (pieces == 1) return layers + head;
  double best = 1e30;
  for (int first = 1; first <= layers - pieces + 1; ++first) {
    best = std::min(best, std::max<double>(first, cheapest(layers - first, pieces - 1, head)));
  }
  return best;
}

TEST(StageSplit, CoversEveryBlockOnceAndNoCutIsCheaper) {
  for (const std::int64_t vocabulary :
       {std::int64_t{100}, std::int64_t{1500}, std::int64_t{4000}}) {
    for (int layers = 1; layers <= 12; ++layers) {
      for (int pieces = 1; pieces <= std::min(layers, 6); ++pieces) {
        const ModelConfig config = config_of(layers, vocabulary);
        const double head = head_cost_in_blocks(config, 128);
        const auto split = split_model(config, pieces, 128);
        ASSERT_EQ(split.size(), static_cast<std::size_t>(pieces));
        int next = 0;
        double most = 0;
        for (const StagePiece& piece : split) {
          EXPECT_EQ(piece.first_layer, next);
          EXPECT_GE(piece.num_layers, 1);
          next += piece.num_layers;
          most = std::max(most, cost_of(piece, head));
        }
        EXPECT_EQ(next, layers);
        EXPECT_TRUE(split.front().has_embedding);
        EXPECT_TRUE(split.back().has_head);
        EXPECT_EQ(std::count_if(split.begin(), split.end(),
                                [](const StagePiece& p) { return p.has_head; }),
                  1);
        EXPECT_DOUBLE_EQ(most, cheapest(layers, pieces, head)) << layers << " in " << pieces;
      }
    }
  }
}

TEST(StageSplit, TheHeadMakesTheLastStageShorter) {
  ModelConfig config = config_of(32, 0);
  config.hidden_size = 4096;
  config.intermediate_size = 14336;
  config.num_attention_heads = 32;
  config.num_key_value_heads = 8;
  config.head_dim = 128;
  config.vocab_size = 128256;  // Llama 3 8B: a head is about two and a half blocks
  const auto split = split_model(config, 4, 4096);
  EXPECT_LT(split.back().num_layers, split.front().num_layers);
}

TEST(StageSplit, ChunksGoRoundTheRanks) {
  const ModelConfig config = config_of(8, 100);
  const auto all = split_model(config, 4, 128);
  const auto own = stage_pieces(config, 2, 2, 1, 128);
  ASSERT_EQ(own.size(), 2u);
  EXPECT_EQ(own[0].first_layer, all[1].first_layer);
  EXPECT_EQ(own[1].first_layer, all[3].first_layer);
  EXPECT_TRUE(own[1].has_head);
}

TEST(StageSplit, FewerBlocksThanPiecesAreRefused) {
  expect_error(ErrorKind::kUser, {"is 6", "5 blocks"},
               [] { split_model(config_of(5, 100), 6, 128); });
}

}  // namespace
}  // namespace tessera::test
