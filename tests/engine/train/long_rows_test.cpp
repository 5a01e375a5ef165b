// Rows so long that the MLP takes its tokens in chunks: the same training as in one piece under every
// layout, the same bits when repeated, and FP8 within its noise.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/engine/train/model_harness.h"

namespace tessera::test {
namespace {

struct Layout {
  int pp = 1;
  int dp = 1;
  int tp = 1;
  bool sequence_parallel = false;
  int zero = 0;
  bool is_tied = false;
  DeviceKind device = DeviceKind::kCpu;
};

std::string name_of(const Layout& layout) {
  return fmt::format("{}pp{}_dp{}_tp{}{}_zero{}{}",
                     layout.device == DeviceKind::kCuda ? "cuda_" : "", layout.pp, layout.dp,
                     layout.tp, layout.sequence_parallel ? "_sp" : "", layout.zero,
                     layout.is_tied ? "_tied" : "");
}

std::ostream& operator<<(std::ostream& out, const Layout& layout) { return out << name_of(layout); }

// Rows of 300 tokens are chunks of 128, 128 and 44.
std::vector<HostBatch> batches() {
  return random_batches(3, 5, [](int i) { return std::vector<int>{130 + i, 1, 169 - i}; });
}

ModelSetup setup_of(const Layout& layout) {
  ModelSetup setup;
  setup.config = uneven_config(3, layout.is_tied ? 1 : 2, layout.is_tied);
  setup.config.max_position_embeddings = 512;
  setup.device.kind = layout.device;
  setup.mesh.pipeline = layout.pp;
  setup.mesh.data = layout.dp;
  setup.mesh.tensor = layout.tp;
  setup.sequence_parallel = layout.sequence_parallel;
  setup.zero = layout.zero;
  setup.recompute = Recompute::kFull;
  setup.mlp_chunk_bytes = 1;
  setup.weight_decay = 0.1f;
  setup.steps = 5;
  return setup;
}

StepResult run(const ModelSetup& setup) {
  const GlobalTensors weights = random_weights(setup.config, 11, 0.2);
  return train_step(
      setup, batches(), [&](ModelRuntime& runtime) { set_weights(runtime, weights); }, 1e-2, 1.0);
}

// One rank, in one piece.
StepResult whole(bool is_tied) {
  Layout layout;
  layout.is_tied = is_tied;
  ModelSetup setup = setup_of(layout);
  setup.mlp_chunk_bytes = kMlpChunkBytes;
  return run(setup);
}

class LongRows : public ::testing::TestWithParam<Layout> {
 protected:
  void SetUp() override {
    if (GetParam().device == DeviceKind::kCuda && cuda_device_count() == 0)
      GTEST_SKIP() << "no CUDA device";
  }
};

TEST_P(LongRows, ChunksOfAnMlpTrainAsTheWhole) {
  static const StepResult wholes[2] = {whole(false), whole(true)};
  expect_same_training(run(setup_of(GetParam())), wholes[GetParam().is_tied ? 1 : 0], 3e-6);
}

TEST_P(LongRows, ChunksGiveTheSameBitsAgain) {
  const StepResult first = run(setup_of(GetParam()));
  const StepResult second = run(setup_of(GetParam()));
  EXPECT_EQ(first.losses, second.losses);
  EXPECT_EQ(first.gradients, second.gradients);
  EXPECT_EQ(first.weights, second.weights);
}

std::vector<Layout> layouts() {
  std::vector<Layout> result;
  for (const DeviceKind device : {DeviceKind::kCpu, DeviceKind::kCuda}) {
    result.push_back({1, 1, 1, false, 0, false, device});
    result.push_back({1, 1, 1, false, 0, true, device});
    result.push_back({1, 1, 2, false, 0, false, device});
    result.push_back({1, 1, 2, true, 0, true, device});
    result.push_back({1, 2, 2, true, 3, false, device});
    result.push_back({2, 1, 1, false, 2, true, device});
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Layouts, LongRows, ::testing::ValuesIn(layouts()),
                         [](const auto& info) { return name_of(info.param); });

// |a - b| / |b| over all parameters together.
double distance(const GlobalTensors& a, const GlobalTensors& b) {
  double difference = 0;
  double size = 0;
  for (const auto& [name, values] : b) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      difference += (a.at(name)[i] - values[i]) * (a.at(name)[i] - values[i]);
      size += values[i] * values[i];
    }
  }
  return std::sqrt(difference / size);
}

// Chunks have scales of their own where the whole has one; both are as far from the exact gradient.
// A recompute that found another scale than its forward would be farther.
class LongRowsFp8 : public ::testing::TestWithParam<DeviceKind> {};

TEST_P(LongRowsFp8, StaysWithinTheNoiseOfTheWhole) {
  if (GetParam() == DeviceKind::kCuda && cuda_device_count() == 0)
    GTEST_SKIP() << "no CUDA device";
  Layout layout;
  layout.device = GetParam();
  ModelSetup setup = setup_of(layout);
  setup.steps = 1;
  setup.config.hidden_size = 64;
  setup.config.intermediate_size = 96;
  setup.config.head_dim = 16;
  setup.config.num_key_value_heads = 4;
  setup.config.attention_qkv_bias = false;
  const StepResult plain = run(setup);
  for (const QuantScaling scaling : {QuantScaling::kCurrent, QuantScaling::kBlockwise}) {
    setup.recipe.scaling = scaling;
    setup.mlp_chunk_bytes = kMlpChunkBytes;
    const StepResult whole = run(setup);
    setup.mlp_chunk_bytes = 1;
    const double noise = distance(whole.gradients, plain.gradients);
    EXPECT_GT(noise, 0) << "nothing was quantised";
    for (const auto& [dp, tp, sp] :
         std::vector<std::tuple<int, int, bool>>{{1, 1, false}, {1, 2, false}, {1, 2, true}}) {
      setup.mesh.data = dp;
      setup.mesh.tensor = tp;
      setup.sequence_parallel = sp;
      const StepResult chunked = run(setup);
      EXPECT_LT(distance(chunked.gradients, plain.gradients), 1.25 * noise)
          << static_cast<int>(scaling) << " tp " << tp << (sp ? " sp" : "");
      EXPECT_NEAR(chunked.loss_sum, whole.loss_sum, 1e-2 * whole.loss_sum);
    }
    setup.mesh = {};
    setup.sequence_parallel = false;
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, LongRowsFp8,
                         ::testing::Values(DeviceKind::kCpu, DeviceKind::kCuda),
                         [](const auto& info) {
                           return info.param == DeviceKind::kCpu ? "cpu" : "cuda";
                         });

}  // namespace
}  // namespace tessera::test
