// Kind B88: documents of a row do not see each other, under every kind of layout. What one document
// holds changes no bit of another's loss and gradients.
#include <gtest/gtest.h>

#include "tests/engine/train/model_harness.h"

namespace tessera::test {
namespace {

struct Layout {
  const char* name;
  int tensor = 1;
  bool sequence_parallel = false;
  Recompute recompute = Recompute::kNone;
  int context = 1;
};

class PackedIsolation : public ::testing::TestWithParam<Layout> {};

std::vector<std::int32_t> document(int length, int factor) {
  std::vector<std::int32_t> tokens;
  for (int i = 0; i < length; ++i) tokens.push_back((i * factor + 3) % 61);
  return tokens;
}

TEST_P(PackedIsolation, AnotherDocumentChangesNoBit) {
  const Layout& layout = GetParam();
  ModelSetup setup;
  setup.config.architecture = Architecture::kLlama;
  setup.config.vocab_size = 61;
  setup.config.hidden_size = 32;
  setup.config.intermediate_size = 48;
  setup.config.num_hidden_layers = 2;
  setup.config.num_attention_heads = 4;
  setup.config.num_key_value_heads = 2;
  setup.config.head_dim = 8;
  setup.config.max_position_embeddings = 64;
  setup.mesh.tensor = layout.tensor;
  setup.mesh.context = layout.context;
  setup.sequence_parallel = layout.sequence_parallel;
  setup.recompute = layout.recompute;
  const GlobalTensors values = random_weights(setup.config, 5, 0.3);
  // Only the document in the middle is trained.
  const auto step = [&](int length, int factor) {
    HostBatch batch = HostBatch::from_documents(
        {document(length, factor), document(13, 7), document(40 - length, factor + 1)});
    for (std::size_t i = 0; i < batch.targets.size(); ++i) {
      if (i < static_cast<std::size_t>(length) || i >= static_cast<std::size_t>(length) + 13) {
        batch.targets[i] = -100;
      }
    }
    return train_step(setup, {batch}, [&](ModelRuntime& runtime) { set_weights(runtime, values); });
  };
  const StepResult one = step(17, 5);
  const StepResult other = step(17, 11);
  EXPECT_EQ(one.target_tokens, 12);
  EXPECT_GT(one.grad_norm, 0);
  EXPECT_EQ(one.loss_sum, other.loss_sum);
  EXPECT_EQ(one.gradients, other.gradients);
  // Nor does its place in the row matter, up to the order of sums.
  const StepResult moved = step(9, 5);
  EXPECT_NEAR(moved.loss_sum, one.loss_sum, 1e-5 * one.loss_sum);
  EXPECT_NEAR(moved.grad_norm, one.grad_norm, 1e-4 * one.grad_norm);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, PackedIsolation,
    ::testing::Values(Layout{"OneRank"}, Layout{"Recomputed", 1, false, Recompute::kFull},
                      Layout{"TensorParallel", 2},
                      Layout{"SequenceParallel", 2, true, Recompute::kSelective},
                      Layout{"ContextParallel", 1, false, Recompute::kFull, 3},
                      Layout{"ContextAndSequenceParallel", 2, true, Recompute::kNone, 2}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::test
