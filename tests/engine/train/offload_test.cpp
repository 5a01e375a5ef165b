// What lies in host memory trains as what stays on the device, to the bit: masters, moments and the
// inputs of blocks, under every layout, overlapped or not. And the plan counts it apart.
#include <gtest/gtest.h>

#include "tests/engine/train/model_harness.h"

namespace tessera::test {
namespace {

struct Layout {
  int pp = 1;
  int dp = 1;
  int tp = 1;
  int zero = 0;
  DType compute = DType::kBF16;
  DType moments = DType::kF32;
  PipelineKind schedule = PipelineKind::k1F1B;
  int chunks = 1;
  bool is_tied = false;
  DeviceKind device = DeviceKind::kCpu;
};

std::string name_of(const Layout& layout) {
  return fmt::format("{}pp{}_dp{}_tp{}_zero{}_{}_moments_{}{}{}",
                     layout.device == DeviceKind::kCuda ? "cuda_" : "", layout.pp, layout.dp,
                     layout.tp, layout.zero, tessera::name_of(layout.compute),
                     tessera::name_of(layout.moments),
                     layout.chunks > 1 ? fmt::format("_chunks{}", layout.chunks) : "",
                     layout.is_tied ? "_tied" : "");
}

std::ostream& operator<<(std::ostream& out, const Layout& layout) { return out << name_of(layout); }

ModelSetup setup_of(const Layout& layout) {
  ModelSetup setup;
  setup.config = uneven_config(7, 2, layout.is_tied);
  setup.device.kind = layout.device;
  setup.mesh.pipeline = layout.pp;
  setup.mesh.data = layout.dp;
  setup.mesh.tensor = layout.tp;
  setup.sequence_parallel = layout.tp > 1;
  setup.zero = layout.zero;
  setup.compute = layout.compute;
  setup.moments = layout.moments;
  setup.schedule = layout.schedule;
  setup.chunks = layout.chunks;
  setup.recompute = Recompute::kFull;
  setup.weight_decay = 0.1f;
  setup.steps = 4;
  return setup;
}

StepResult run(const ModelSetup& setup) {
  const GlobalTensors weights = random_weights(setup.config, 11, 0.2);
  const std::vector<HostBatch> batches =
      random_batches(6, 5, [](int i) { return std::vector<int>{4 + i, 1, 9 - i}; });
  return train_step(
      setup, batches, [&](ModelRuntime& runtime) { set_weights(runtime, weights); }, 1e-2, 1.0);
}

void expect_same_bits(const StepResult& got, const StepResult& wanted, const std::string& what) {
  EXPECT_EQ(got.losses, wanted.losses) << what;
  EXPECT_EQ(got.gradients, wanted.gradients) << what;
  EXPECT_EQ(got.weights, wanted.weights) << what;
  EXPECT_EQ(got.disagreement, "") << what;
}

class Offload : public ::testing::TestWithParam<Layout> {
 protected:
  void SetUp() override {
    if (GetParam().device == DeviceKind::kCuda && cuda_device_count() == 0)
      GTEST_SKIP() << "no CUDA device";
  }
};

TEST_P(Offload, ChangesNoBit) {
  const ModelSetup setup = setup_of(GetParam());
  const StepResult wanted = run(setup);
  EXPECT_LT(wanted.losses.back(), wanted.losses.front());
  for (const bool inputs : {false, true}) {
    for (const bool states : {false, true}) {
      if (!inputs && !states) continue;
      ModelSetup moved = setup;
      moved.offloads_inputs = inputs;
      moved.offloads_moments = moved.offloads_masters = states;
      // Pieces of one block of moments: several to a shard. By workers, a missing wait shows.
      moved.offload_piece = kMomentBlock;
      moved.inline_streams = !states;
      expect_same_bits(run(moved), wanted,
                       fmt::format("inputs {} states {}", inputs, states));
    }
  }
}

std::vector<Layout> layouts() {
  std::vector<Layout> result;
  for (const DeviceKind device : {DeviceKind::kCpu, DeviceKind::kCuda}) {
    const auto add = [&](Layout layout) {
      layout.device = device;
      result.push_back(layout);
    };
    using enum PipelineKind;
    add({});
    add({1, 1, 1, 0, DType::kF32, DType::kBF16});
    add({1, 2, 1, 1, DType::kBF16, DType::kU8, k1F1B, 1, true});
    add({1, 2, 2, 2, DType::kBF16, DType::kBF16});
    add({1, 3, 1, 3, DType::kBF16, DType::kF32, k1F1B, 1, true});
    add({3, 1, 1, 0, DType::kBF16, DType::kF32, k1F1B, 1, true});
    add({2, 2, 1, 3, DType::kF32, DType::kU8, kInterleaved, 3});
    add({2, 1, 2, 1, DType::kBF16, DType::kF32, kGPipe, 1});
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Layouts, Offload, ::testing::ValuesIn(layouts()),
                         [](const auto& info) { return name_of(info.param); });

TEST(OffloadStreams, OneStreamOrSeveralGiveTheSameBits) {
  ModelSetup setup = setup_of({});
  const StepResult wanted = run(setup);
  setup.offloads_inputs = setup.offloads_masters = setup.offloads_moments = true;
  setup.offload_piece = kMomentBlock;
  for (const bool overlap : {false, true}) {
    for (const bool inline_streams : {true, false}) {
      setup.overlap = overlap;
      setup.inline_streams = inline_streams;
      expect_same_bits(run(setup), wanted, fmt::format("{} {}", overlap, inline_streams));
    }
  }
}

// Each class of bytes leaves the device and is counted on the host; what comes back at a time is
// staging.
TEST(OffloadMemory, IsCountedApart) {
  ModelConfig config = uneven_config(4, 2, false);
  config.hidden_size = 64;
  config.intermediate_size = 128;
  RuntimeOptions options;
  options.geometry = batch_geometry(2, 64, 2, DType::kBF16, 1, false);
  options.recompute = Recompute::kFull;
  options.params.offload_piece = 256;
  const auto plan = [&] {
    return measure_runtime({}, {}, 0, config, options, [](ModelRuntime&) {});
  };
  const RuntimeMemory all = plan();
  EXPECT_EQ(all.host, 0u);

  options.params.offloads_masters = true;
  const RuntimeMemory masters = plan();
  EXPECT_EQ(masters.host, all.plan.total(MemoryClass::kMasters));
  EXPECT_EQ(masters.host_plan.total(MemoryKind::kPinnedHost), masters.host);
  EXPECT_EQ(masters.plan.total(MemoryClass::kMasters), 0u);

  options.params.offloads_masters = false;
  options.params.offloads_moments = true;
  const RuntimeMemory moments = plan();
  EXPECT_EQ(moments.host, 2 * masters.host);
  EXPECT_LT(moments.total() + moments.host, all.total() + all.total() / 20);

  options.params.offloads_moments = false;
  options.offloads_inputs = true;
  const RuntimeMemory inputs = plan();
  const std::size_t input = 2 * 64 * 64 * 2;
  EXPECT_EQ(inputs.host, 4 * input);
  EXPECT_EQ(inputs.total(), all.total() - 2 * input) << "two stay, in turns";
}

}  // namespace
}  // namespace tessera::test
