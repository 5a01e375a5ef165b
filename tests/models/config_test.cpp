#include "models/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/support/expect_error.h"

namespace tessera {
namespace {

ModelConfig small_model() {
  ModelConfig model;
  model.vocab_size = 97;
  model.hidden_size = 96;
  model.intermediate_size = 64;
  model.num_hidden_layers = 2;
  model.num_attention_heads = 6;
  model.num_key_value_heads = 2;
  model.head_dim = 24;
  model.max_position_embeddings = 64;
  return model;
}

struct Mistake {
  const char* part;  // of the sentence it must give
  void (*make)(ModelConfig&);
};

TEST(ModelConfig, EachMistakeIsNamed) {
  EXPECT_TRUE(find_problems(small_model()).empty());
  const Mistake mistakes[] = {
      {"vocab_size is 0", [](ModelConfig& m) { m.vocab_size = 0; }},
      {"hidden_size is -1", [](ModelConfig& m) { m.hidden_size = -1; }},
      {"intermediate_size", [](ModelConfig& m) { m.intermediate_size = std::int64_t{1} << 40; }},
      {"num_hidden_layers", [](ModelConfig& m) { m.num_hidden_layers = 0; }},
      {"num_attention_heads", [](ModelConfig& m) { m.num_attention_heads = 0; }},
      {"not a multiple of num_key_value_heads 4",
       [](ModelConfig& m) { m.num_key_value_heads = 4; }},
      {"wanted an even number", [](ModelConfig& m) { m.head_dim = 23; }},
      {"rms_norm_eps", [](ModelConfig& m) { m.rms_norm_eps = 0; }},
      {"rms_norm_eps", [](ModelConfig& m) { m.rms_norm_eps = std::nan(""); }},
      {"initializer_range", [](ModelConfig& m) { m.initializer_range = -0.02; }},
      {"theta", [](ModelConfig& m) { m.rope.theta = std::numeric_limits<double>::infinity(); }},
      {"partial_rotary_factor", [](ModelConfig& m) { m.rope.partial_rotary_factor = 0; }},
      {"factor is 0.5",
       [](ModelConfig& m) {
         m.rope.kind = RopeKind::kLinear;
         m.rope.factor = 0.5;
       }},
      {"original_max_position_embeddings",
       [](ModelConfig& m) {
         m.rope.kind = RopeKind::kYarn;
         m.rope.factor = 2;
       }},
      {"high_freq_factor",
       [](ModelConfig& m) {
         m.rope.kind = RopeKind::kLlama3;
         m.rope.original_max_position_embeddings = 8;
         m.rope.high_freq_factor = 1;
       }},
      {"attention_factor",
       [](ModelConfig& m) {
         m.rope.kind = RopeKind::kYarn;
         m.rope.original_max_position_embeddings = 8;
         m.rope.attention_factor = 0;
       }},
      {"beta_fast",
       [](ModelConfig& m) {
         m.rope.kind = RopeKind::kYarn;
         m.rope.original_max_position_embeddings = 8;
         m.rope.beta_fast = 0.5;
       }},
      {"sliding window entry", [](ModelConfig& m) { m.sliding_windows = {8}; }},
      {"sliding window is -8",
       [](ModelConfig& m) {
         m.sliding_windows = {8, -8};
       }},
  };
  for (const Mistake& mistake : mistakes) {
    ModelConfig model = small_model();
    mistake.make(model);
    test::expect_error(ErrorKind::kUser, {"[model] here", mistake.part},
                       [&] { validate(model, "here"); });
  }
}

TEST(ModelConfig, AllMistakesComeAtOnce) {
  ModelConfig model = small_model();
  model.vocab_size = 0;
  model.num_key_value_heads = 5;
  model.rms_norm_eps = -1;
  EXPECT_EQ(find_problems(model).size(), 3u);
  test::expect_error(ErrorKind::kUser, {"vocab_size", "num_key_value_heads", "rms_norm_eps"},
                     [&] { validate(model, "here"); });
}

TEST(ModelConfig, WindowsPerLayer) {
  ModelConfig model = small_model();
  EXPECT_EQ(model.sliding_window(1), 0);
  EXPECT_FALSE(model.has_sliding_window());
  model.sliding_windows = {0, 8};
  EXPECT_EQ(model.sliding_window(0), 0);
  EXPECT_EQ(model.sliding_window(1), 8);
  EXPECT_TRUE(model.has_sliding_window());
  EXPECT_EQ(model.query_size(), 144);
  EXPECT_EQ(model.key_value_size(), 48);
}

}  // namespace
}  // namespace tessera
