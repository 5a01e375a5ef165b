// The hand-written backward of whole models against finite differences in fp64, and every layout
// against one rank, for each feature that changes a block.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/engine/train/model_harness.h"

namespace tessera::test {
namespace {

struct Variant {
  const char* name;
  ModelConfig config;
};

std::ostream& operator<<(std::ostream& out, const Variant& variant) { return out << variant.name; }

ModelConfig tiny_config() {
  ModelConfig config;
  config.vocab_size = 37;  // prime: padded over any tp
  config.hidden_size = 16;
  config.intermediate_size = 24;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 6;  // not hidden / heads
  config.rms_norm_eps = 1e-5;
  config.max_position_embeddings = 64;
  return config;
}

std::vector<Variant> variants() {
  std::vector<Variant> result;
  result.push_back({"llama", tiny_config()});
  ModelConfig tied = tiny_config();
  tied.tie_word_embeddings = true;
  tied.num_key_value_heads = 1;
  result.push_back({"tied_one_kv_head", tied});
  ModelConfig qwen2 = tiny_config();
  qwen2.attention_qkv_bias = true;
  result.push_back({"qkv_bias", qwen2});
  ModelConfig biased = tiny_config();
  biased.attention_qkv_bias = biased.attention_o_bias = biased.mlp_bias = true;
  biased.num_key_value_heads = 4;
  result.push_back({"all_biases_mha", biased});
  ModelConfig qwen3 = tiny_config();
  qwen3.qk_norm = true;
  qwen3.tie_word_embeddings = true;
  result.push_back({"qk_norm", qwen3});
  ModelConfig window = tiny_config();
  window.sliding_windows = {3, 0};
  result.push_back({"sliding_window", window});
  return result;
}

HostBatch tiny_batch(std::uint64_t seed) {
  std::vector<std::vector<std::int32_t>> documents;
  std::uint64_t at = 0;
  for (const std::size_t length : {7u, 1u, 9u}) {
    std::vector<std::int32_t> ids;
    for (std::size_t i = 0; i < length; ++i) {
      ids.push_back(static_cast<std::int32_t>(
          philox_bits(derive_key(seed, RandomPurpose::kSynthetic, 1), at++) % 37));
    }
    documents.push_back(ids);
  }
  HostBatch batch = HostBatch::from_documents(documents);
  batch.targets[2] = -100;  // a masked target inside a document
  return batch;
}

class ModelGradient : public ::testing::TestWithParam<Variant> {};

TEST_P(ModelGradient, MatchesFiniteDifferences) {
  ModelSetup setup;
  setup.config = GetParam().config;
  setup.compute = DType::kF64;
  setup.gradients = DType::kF64;
  const std::vector<HostBatch> batches = {tiny_batch(1), tiny_batch(2)};
  const GlobalTensors weights = random_weights(setup.config, 7, 0.3);
  const auto run = [&](const GlobalTensors& w) {
    return train_step(setup, batches, [&](ModelRuntime& runtime) { set_weights(runtime, w); });
  };
  const StepResult base = run(weights);
  ASSERT_GT(base.loss_sum, 0);
  for (const auto& [name, gradient] : base.gradients) {
    ASSERT_EQ(gradient.size(), weights.at(name).size());
    // Along a random direction in this parameter.
    const PhiloxKey key = derive_key(3, RandomPurpose::kSynthetic, 2);
    double slope = 0;
    double magnitude = 0;
    GlobalTensors plus = weights;
    GlobalTensors minus = weights;
    const double step = 1e-5;
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      const double direction = static_cast<double>(philox_normal(key, i));
      slope += gradient[i] * direction;
      magnitude += std::fabs(gradient[i] * direction);
      plus[name][i] += step * direction;
      minus[name][i] -= step * direction;
    }
    const double numeric = (run(plus).loss_sum - run(minus).loss_sum) / (2 * step);
    // Central differences: truncation step^2 * third derivative, round-off eps * loss / step.
    EXPECT_NEAR(numeric, slope, 1e-6 * magnitude + 1e-7) << name;
  }
}

TEST_P(ModelGradient, EveryLayoutEqualsOneRank) {
  ModelSetup setup;
  setup.config = GetParam().config;
  setup.compute = DType::kF64;
  setup.gradients = DType::kF64;
  const std::vector<HostBatch> batches = {tiny_batch(1), tiny_batch(2), tiny_batch(3)};
  const GlobalTensors weights = random_weights(setup.config, 7, 0.3);
  const auto run = [&] {
    return train_step(setup, batches,
                      [&](ModelRuntime& runtime) { set_weights(runtime, weights); });
  };
  const StepResult base = run();
  for (const auto& [dp, cp, tp, sp, zero, recompute] :
       std::vector<std::tuple<int, int, int, bool, int, Recompute>>{
           {1, 1, 2, false, 0, Recompute::kNone},
           {1, 1, 2, true, 0, Recompute::kFull},
           {1, 1, 4, true, 0, Recompute::kSelective},
           {1, 1, 4, false, 0, Recompute::kFull},
           {2, 1, 1, false, 1, Recompute::kNone},
           {2, 1, 2, true, 1, Recompute::kSelective},
           {3, 1, 2, true, 1, Recompute::kNone},
           {1, 2, 1, false, 0, Recompute::kNone},
           {1, 3, 1, false, 1, Recompute::kFull},
           {1, 4, 2, true, 0, Recompute::kSelective},
           {2, 2, 2, true, 2, Recompute::kNone}}) {
    setup.mesh.data = dp;
    setup.mesh.context = cp;
    setup.mesh.tensor = tp;
    setup.sequence_parallel = sp;
    setup.zero = zero;
    setup.recompute = recompute;
    const StepResult got = run();
    const std::string layout = fmt::format("dp {} cp {} tp {} sp {} zero {} recompute {}", dp, cp,
                                           tp, sp, zero, static_cast<int>(recompute));
    EXPECT_NEAR(got.loss_sum, base.loss_sum, 1e-11 * base.loss_sum) << layout;
    EXPECT_EQ(got.target_tokens, base.target_tokens);
    ASSERT_EQ(got.gradients.size(), base.gradients.size());
    for (const auto& [name, wanted] : base.gradients) {
      const auto& gradient = got.gradients.at(name);
      ASSERT_EQ(gradient.size(), wanted.size()) << name;
      const double scale = norm_of(wanted);
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        ASSERT_NEAR(gradient[i], wanted[i], 1e-10 * scale)
            << layout << " " << name << " element " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, ModelGradient, ::testing::ValuesIn(variants()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::test
