// Context parallelism against one rank over several updates, with every other kind of parallelism,
// and what must not change a bit: the streams.
#include <gtest/gtest.h>

#include "tests/engine/train/model_harness.h"

namespace tessera::test {
namespace {

struct Layout {
  int cp = 2;
  int dp = 1;
  int tp = 1;
  int pp = 1;
  int zero = 0;
  bool sequence_parallel = false;
  bool is_tied = false;
  Recompute recompute = Recompute::kNone;
  bool inline_streams = true;
};

std::string name_of(const Layout& layout) {
  const char* recompute[] = {"", "_selective", "_full"};
  return fmt::format("cp{}_dp{}_tp{}_pp{}_zero{}{}{}{}{}", layout.cp, layout.dp, layout.tp,
                     layout.pp, layout.zero, layout.sequence_parallel ? "_sp" : "",
                     layout.is_tied ? "_tied" : "", recompute[static_cast<int>(layout.recompute)],
                     layout.inline_streams ? "" : "_workers");
}

std::ostream& operator<<(std::ostream& out, const Layout& layout) { return out << name_of(layout); }

// Packed rows of 23 tokens, which no number of ranks here divides: pieces end within documents, and
// ranks hold padding.
std::vector<HostBatch> batches() {
  return random_batches(5, 8, [](int i) { return std::vector<int>{9 + i, 1, 13 - i}; });
}

ModelSetup setup_of(const Layout& layout) {
  ModelSetup setup;
  // Fewer key/value heads than the largest tp.
  setup.config = uneven_config(3, layout.is_tied ? 1 : 2, layout.is_tied);
  setup.config.sliding_windows = {0, 4, 0};
  setup.mesh.context = layout.cp;
  setup.mesh.data = layout.dp;
  setup.mesh.tensor = layout.tp;
  setup.mesh.pipeline = layout.pp;
  setup.zero = layout.zero;
  setup.sequence_parallel = layout.sequence_parallel;
  setup.recompute = layout.recompute;
  setup.inline_streams = layout.inline_streams;
  setup.weight_decay = 0.1f;
  setup.steps = 5;
  return setup;
}

StepResult run(const ModelSetup& setup) {
  const GlobalTensors weights = random_weights(setup.config, 17, 0.2);
  return train_step(
      setup, batches(), [&](ModelRuntime& runtime) { set_weights(runtime, weights); }, 1e-2, 1.0);
}

const StepResult& one_rank(bool is_tied) {
  const auto one = [](bool tied) {
    Layout layout;
    layout.cp = 1;
    layout.is_tied = tied;
    return run(setup_of(layout));
  };
  static const StepResult results[2] = {one(false), one(true)};
  return results[is_tied ? 1 : 0];
}

class ContextParallel : public ::testing::TestWithParam<Layout> {};

TEST_P(ContextParallel, FiveStepsEqualOneRank) {
  expect_same_training(run(setup_of(GetParam())), one_rank(GetParam().is_tied), 2e-6);
}

std::vector<Layout> layouts() {
  std::vector<Layout> result;
  for (const int zero : {0, 1, 2, 3}) {
    for (const int cp : {2, 4}) {
      for (const auto& [dp, tp, pp] :
           std::vector<std::tuple<int, int, int>>{{1, 1, 1}, {2, 1, 1}, {1, 2, 1}, {1, 1, 2}}) {
        // Every value of the other choices meets every stage, without all the combinations.
        const int number = zero + cp / 2 + dp + 2 * tp + 3 * pp;
        Layout layout{cp, dp, tp, pp, zero};
        layout.is_tied = number % 2 == 0;
        layout.sequence_parallel = tp == 2 && zero % 2 == 0;
        layout.recompute = static_cast<Recompute>(number % 3);
        layout.inline_streams = (zero + tp) % 2 == 0;
        result.push_back(layout);
      }
    }
    result.push_back({3, 1, 4, 1, zero, true, true, Recompute::kFull});
    result.push_back({2, 2, 2, 2, zero, true, zero % 2 == 0, Recompute::kSelective});
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Layouts, ContextParallel, ::testing::ValuesIn(layouts()),
                         [](const auto& info) { return name_of(info.param); });

TEST(ContextParallelBits, StreamsChangeNothing) {
  Layout layout;
  layout.dp = 2;
  layout.zero = 2;
  ModelSetup setup = setup_of(layout);
  setup.overlap = false;
  const StepResult wanted = run(setup);
  setup.overlap = true;
  for (const bool inline_streams : {true, false, false}) {
    setup.inline_streams = inline_streams;
    const StepResult got = run(setup);
    EXPECT_EQ(got.losses, wanted.losses);
    EXPECT_EQ(got.gradients, wanted.gradients);
    EXPECT_EQ(got.weights, wanted.weights);
  }
}

// A rank plans activations for its own tokens; parameters are whole, and their states are shared.
TEST(ContextParallelMemory, RanksHoldTheirTokens) {
  ModelConfig config = uneven_config(4, 2, false);
  config.hidden_size = 128;
  config.intermediate_size = 256;
  const auto measure = [&](int ranks) {
    MeshShape mesh;
    mesh.context = ranks;
    RuntimeOptions options;
    options.geometry = batch_geometry(1, 1024, 4, DType::kF32, 1, false, ranks);
    options.params.compute = DType::kF32;
    options.params.zero = 1;
    return measure_runtime({}, mesh, ranks - 1, config, options, [](ModelRuntime&) {}).plan;
  };
  const MemoryPlan one = measure(1);
  const MemoryPlan four = measure(4);
  const auto part = [&](MemoryClass memory_class) {
    return static_cast<double>(four.total(memory_class)) /
           static_cast<double>(one.total(memory_class));
  };
  EXPECT_NEAR(part(MemoryClass::kActivations), 0.25, 0.01);
  EXPECT_NEAR(part(MemoryClass::kWeights), 1, 0.01);
  EXPECT_NEAR(part(MemoryClass::kOptimizer), 0.25, 0.01);
}

TEST(ContextParallelMemory, GeometryIsPaddedToEqualPieces) {
  // 2 rows of 35 tokens over 4 ranks with a piece for each of 3 in between: 18 each, 6 between
  // blocks.
  const BatchGeometry geometry = batch_geometry(2, 35, 1, DType::kF32, 3, true, 4);
  EXPECT_EQ(geometry.tokens, 18);
  EXPECT_EQ(geometry.local_tokens, 6);
  EXPECT_EQ(geometry.max_length, 35);
}

}  // namespace
}  // namespace tessera::test
