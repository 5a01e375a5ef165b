// The ZeRO stages: every layout against one rank over several updates, and what must not change a
// bit: the stream that communication runs on.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/engine/train/model_harness.h"

namespace tessera::test {
namespace {

struct Layout {
  int dp = 1;
  int tp = 1;
  int zero = 0;
  bool sequence_parallel = false;
  Recompute recompute = Recompute::kNone;
  bool is_tied = false;
  std::int64_t bucket_bytes = 0;
  bool inline_streams = true;
  int shard = 0;  // data-parallel ranks that share shards; 0: all
};

std::string name_of(const Layout& layout) {
  const char* recompute[] = {"", "_selective", "_full"};
  return fmt::format("dp{}_tp{}_zero{}{}{}{}{}{}", layout.dp, layout.tp, layout.zero,
                     layout.sequence_parallel ? "_sp" : "",
                     recompute[static_cast<int>(layout.recompute)], layout.is_tied ? "_tied" : "",
                     layout.bucket_bytes > 0 ? fmt::format("_bucket{}", layout.bucket_bytes) : "",
                     layout.inline_streams ? "" : "_workers") +
         (layout.shard > 0 ? fmt::format("_shard{}", layout.shard) : "");
}

std::ostream& operator<<(std::ostream& out, const Layout& layout) { return out << name_of(layout); }

// More micro-batches than any number of ranks here, so that all of them accumulate.
std::vector<HostBatch> batches() {
  return random_batches(7, 5, [](int i) { return std::vector<int>{4 + i, 1, 9 - i}; });
}

ModelSetup setup_of(const Layout& layout) {
  ModelSetup setup;
  // Fewer key/value heads than the largest tp.
  setup.config = uneven_config(3, layout.is_tied ? 1 : 2, layout.is_tied);
  setup.mesh.data = layout.dp;
  setup.mesh.tensor = layout.tp;
  setup.mesh.shard = layout.shard;
  setup.zero = layout.zero;
  setup.sequence_parallel = layout.sequence_parallel;
  setup.recompute = layout.recompute;
  setup.bucket_bytes = layout.bucket_bytes;
  setup.inline_streams = layout.inline_streams;
  setup.weight_decay = 0.1f;
  setup.steps = 5;
  return setup;
}

StepResult run(const ModelSetup& setup) {
  const GlobalTensors weights = random_weights(setup.config, 11, 0.2);
  return train_step(
      setup, batches(), [&](ModelRuntime& runtime) { set_weights(runtime, weights); }, 1e-2, 1.0);
}

const StepResult& one_rank(bool is_tied) {
  static const StepResult results[2] = {run(setup_of({})), [] {
                                          Layout layout;
                                          layout.is_tied = true;
                                          return run(setup_of(layout));
                                        }()};
  return results[is_tied ? 1 : 0];
}

class ZeroStages : public ::testing::TestWithParam<Layout> {};

TEST_P(ZeroStages, FiveStepsEqualOneRank) {
  expect_same_training(run(setup_of(GetParam())), one_rank(GetParam().is_tied), 2e-6);
}

std::vector<Layout> layouts() {
  std::vector<Layout> result;
  for (const int zero : {0, 1, 2, 3}) {
    for (const int dp : {1, 2, 3}) {
      for (const int tp : {1, 2}) {
        // Every value of the other choices meets every stage, without all the combinations.
        Layout layout{dp, tp, zero};
        layout.is_tied = (dp + tp) % 2 == 0;
        layout.sequence_parallel = tp == 2 && dp != 2;
        layout.recompute = static_cast<Recompute>((dp + tp + zero) % 3);
        layout.inline_streams = (dp + tp + zero) % 2 == 0;
        result.push_back(layout);
      }
    }
    for (const std::int64_t bucket_bytes : {std::int64_t{1} << 10, std::int64_t{1} << 30}) {
      result.push_back({3, 1, zero, false, Recompute::kNone, true, bucket_bytes, false});
      result.push_back({2, 2, zero, true, Recompute::kFull, false, bucket_bytes, true});
    }
    result.push_back({2, 4, zero, true, Recompute::kNone, true});
    // Shards within a part of the ranks, as by node.
    result.push_back({4, 1, zero, false, Recompute::kNone, true, 0, false, 2});
    result.push_back({4, 2, zero, true, Recompute::kFull, false, 1024, true, 2});
    result.push_back({6, 1, zero, false, Recompute::kNone, false, 0, true, 3});
    result.push_back({2, 1, zero, false, Recompute::kNone, true, 0, true, 1});
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Layouts, ZeroStages, ::testing::ValuesIn(layouts()),
                         [](const auto& info) { return name_of(info.param); });

// Overlapped or on one stream, by workers or inline: the same collectives, so the same bits. Twice
// in a row, since a missing wait shows in some runs only.
TEST(ZeroOverlap, ChangesNoBit) {
  for (const int zero : {1, 2, 3}) {
    for (const std::int64_t bucket_bytes : {std::int64_t{0}, std::int64_t{1} << 10}) {
      Layout layout{2, 1, zero};
      layout.bucket_bytes = bucket_bytes;
      layout.is_tied = true;
      ModelSetup setup = setup_of(layout);
      setup.overlap = false;
      const StepResult wanted = run(setup);
      for (const bool inline_streams : {true, false, false}) {
        setup.overlap = true;
        setup.inline_streams = inline_streams;
        const StepResult got = run(setup);
        EXPECT_EQ(got.losses, wanted.losses) << "zero " << zero << " bucket " << bucket_bytes;
        EXPECT_EQ(got.gradients, wanted.gradients) << "zero " << zero << " bucket " << bucket_bytes;
        EXPECT_EQ(got.weights, wanted.weights) << "zero " << zero << " bucket " << bucket_bytes;
      }
    }
  }
}

// What a stage saves is what the plan says.
TEST(ZeroMemory, EachStageHoldsLess) {
  ModelConfig config = uneven_config(3, 2, false);
  config.num_hidden_layers = 12;
  config.hidden_size = 256;
  config.intermediate_size = 512;
  MeshShape mesh;
  mesh.data = 4;
  RuntimeOptions options;
  options.geometry = batch_geometry(1, 8, 1, DType::kF32, 1, false);
  options.params.compute = DType::kF32;
  std::size_t weights[4];
  std::size_t gradients[4];
  std::size_t moments[4];
  for (int zero = 0; zero <= 3; ++zero) {
    options.params.zero = zero;
    Capabilities cpu;
    const RuntimeMemory memory =
        measure_runtime(cpu, mesh, 1, config, options, [](ModelRuntime&) {});
    weights[zero] = memory.plan.total(MemoryClass::kWeights);
    gradients[zero] = memory.plan.total(MemoryClass::kGradients);
    moments[zero] = memory.plan.total(MemoryClass::kOptimizer);
  }
  const auto expect_part = [](std::size_t got, double part, std::size_t of) {
    EXPECT_NEAR(static_cast<double>(got), part * static_cast<double>(of),
                0.02 * static_cast<double>(of));
  };
  const double quarter = 0.25;
  const double two_blocks = 2.0 / 12;  // the buffers that blocks share, of nearly everything
  expect_part(moments[1], quarter, moments[0]);
  expect_part(gradients[1], 1, gradients[0]);
  expect_part(weights[2], 1, weights[0]);
  expect_part(gradients[2], quarter + two_blocks, gradients[0]);
  expect_part(gradients[3], quarter + two_blocks, gradients[0]);
  expect_part(weights[3], quarter + two_blocks, weights[0]);
}

}  // namespace
}  // namespace tessera::test
