// Pipelines against one rank over several updates, and what must not change a bit: the kind of
// schedule and the streams.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/engine/train/model_harness.h"

namespace tessera::test {
namespace {

struct Layout {
  int pp = 2;
  int dp = 1;
  int tp = 1;
  PipelineKind schedule = PipelineKind::k1F1B;
  int chunks = 1;
  int zero = 0;
  bool is_tied = true;
  Recompute recompute = Recompute::kNone;
  bool inline_streams = true;
};

std::string name_of(const Layout& layout) {
  const char* kinds[] = {"gpipe", "1f1b", "interleaved"};
  const char* recompute[] = {"", "_selective", "_full"};
  return fmt::format("pp{}_dp{}_tp{}_{}_chunks{}_zero{}{}{}{}", layout.pp, layout.dp, layout.tp,
                     kinds[static_cast<int>(layout.schedule)], layout.chunks, layout.zero,
                     layout.is_tied ? "_tied" : "", recompute[static_cast<int>(layout.recompute)],
                     layout.inline_streams ? "" : "_workers");
}

std::ostream& operator<<(std::ostream& out, const Layout& layout) { return out << name_of(layout); }

std::vector<HostBatch> batches(int count) {
  return random_batches(count, 6, [](int i) { return std::vector<int>{2 + i, 1, 11 - i}; });
}

ModelSetup setup_of(const Layout& layout) {
  ModelSetup setup;
  // Seven blocks: no number of stages or chunks here divides them.
  setup.config = uneven_config(7, 2, layout.is_tied);
  setup.mesh.pipeline = layout.pp;
  setup.mesh.data = layout.dp;
  setup.mesh.tensor = layout.tp;
  setup.sequence_parallel = layout.tp > 1;
  setup.schedule = layout.schedule;
  setup.chunks = layout.chunks;
  setup.zero = layout.zero;
  setup.recompute = layout.recompute;
  setup.inline_streams = layout.inline_streams;
  setup.weight_decay = 0.1f;
  setup.steps = 5;
  return setup;
}

StepResult run(const ModelSetup& setup, int micro_batches = 8) {
  const GlobalTensors weights = random_weights(setup.config, 13, 0.2);
  return train_step(
      setup, batches(micro_batches), [&](ModelRuntime& runtime) { set_weights(runtime, weights); },
      1e-2, 0.5);
}

const StepResult& one_rank(bool is_tied) {
  const auto one = [](bool tied) {
    Layout layout;
    layout.pp = 1;
    layout.is_tied = tied;
    return run(setup_of(layout));
  };
  static const StepResult results[2] = {one(false), one(true)};
  return results[is_tied ? 1 : 0];
}

class Pipelines : public ::testing::TestWithParam<Layout> {};

// B11: one norm over all stages. B13: the tied matrix on both ends has both gradients, counts once
// and stays the same.
TEST_P(Pipelines, FiveStepsEqualOneRank) {
  const StepResult& wanted = one_rank(GetParam().is_tied);
  expect_same_training(run(setup_of(GetParam())), wanted, 3e-6);
  EXPECT_GT(wanted.grad_norm, 0.5) << "nothing was clipped";
}

std::vector<Layout> layouts() {
  using enum PipelineKind;
  std::vector<Layout> result;
  int number = 0;
  for (const auto& [schedule, pp, chunks] :
       std::vector<std::tuple<PipelineKind, int, int>>{{kGPipe, 2, 1},
                                                       {k1F1B, 2, 1},
                                                       {k1F1B, 3, 1},
                                                       {k1F1B, 7, 1},
                                                       {kInterleaved, 2, 3},
                                                       {kInterleaved, 3, 2}}) {
    for (const int zero : {0, 1, 2, 3}) {
      Layout layout;
      layout.pp = pp;
      layout.schedule = schedule;
      layout.chunks = chunks;
      layout.zero = zero;
      layout.dp = zero == 0 ? 1 : 2;
      layout.tp = pp == 2 && zero % 2 == 1 ? 2 : 1;
      layout.is_tied = number % 2 == 0;
      layout.recompute = static_cast<Recompute>(number % 3);
      layout.inline_streams = (number / 2) % 2 == 0;
      result.push_back(layout);
      ++number;
    }
    ++number;
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Layouts, Pipelines, ::testing::ValuesIn(layouts()),
                         [](const auto& info) { return name_of(info.param); });

TEST(PipelineBits, SchedulesOfTheSameCutAndStreamsChangeNothing) {
  Layout layout;
  layout.pp = 3;
  ModelSetup setup = setup_of(layout);
  setup.overlap = false;
  const StepResult wanted = run(setup, 5);
  for (const PipelineKind schedule :
       {PipelineKind::kGPipe, PipelineKind::k1F1B, PipelineKind::kInterleaved}) {
    for (const bool inline_streams : {true, false}) {
      setup.schedule = schedule;
      setup.inline_streams = inline_streams;
      setup.overlap = true;
      const StepResult got = run(setup, 5);
      EXPECT_EQ(got.losses, wanted.losses) << static_cast<int>(schedule);
      EXPECT_EQ(got.gradients, wanted.gradients) << static_cast<int>(schedule);
      EXPECT_EQ(got.weights, wanted.weights) << static_cast<int>(schedule);
    }
  }
}

TEST(PipelineBits, FewMicroBatchesFillNoPipelineAndStillCount) {
  for (const int count : {1, 2}) {
    Layout whole;
    whole.pp = 1;
    const StepResult wanted = run(setup_of(whole), count);
    for (const auto& [pp, chunks] : {std::pair{5, 1}, {2, 3}}) {
      Layout layout;
      layout.pp = pp;
      layout.chunks = chunks;
      if (chunks > 1) layout.schedule = PipelineKind::kInterleaved;
      const StepResult got = run(setup_of(layout), count);
      for (std::size_t i = 0; i < wanted.losses.size(); ++i) {
        EXPECT_NEAR(got.losses[i], wanted.losses[i], 3e-6 * wanted.losses[i])
            << pp << " step " << i + 1;
      }
    }
  }
}

// A stage plans its own blocks, and activations for the micro-batches that it keeps.
TEST(PipelineMemory, StagesHoldTheirBlocks) {
  ModelConfig config = uneven_config(7, 2, false);
  config.num_hidden_layers = 16;
  config.hidden_size = 128;
  config.intermediate_size = 256;
  MeshShape mesh;
  mesh.pipeline = 4;
  RuntimeOptions options;
  options.geometry = batch_geometry(1, 64, 1, DType::kF32, 1, false);
  options.params.compute = DType::kF32;
  options.pipeline.micro_batches = 8;
  const auto measure = [&](int rank) {
    return measure_runtime({}, mesh, rank, config, options, [](ModelRuntime&) {}).plan;
  };
  const auto first = static_cast<double>(measure(0).total(MemoryClass::kActivations));
  const auto third = static_cast<double>(measure(2).total(MemoryClass::kActivations));
  EXPECT_GT(first, 1.7 * third);  // four micro-batches in flight against two
  EXPECT_LT(first, 2.1 * third);
  std::size_t weights = 0;
  for (int rank = 0; rank < 4; ++rank) weights += measure(rank).total(MemoryClass::kWeights);
  mesh.pipeline = 1;
  const std::size_t whole = measure(0).total(MemoryClass::kWeights);
  EXPECT_EQ(weights, whole);
}

}  // namespace
}  // namespace tessera::test
