// Tensor parallelism behind computation: on or off, sent or put, on worker threads or inline, five
// updates of a model have the same bits in every format. (What they are is held to one rank's elsewhere.)
#include <gtest/gtest.h>

#include "tests/engine/train/model_harness.h"

namespace tessera::test {
namespace {

struct Layout {
  int tp = 2;
  int dp = 1;
  int pp = 1;
  int zero = 0;
  DType compute = DType::kF32;
  bool is_quantized = false;
  QuantScaling scaling = QuantScaling::kCurrent;
  Recompute recompute = Recompute::kNone;
  bool has_long_rows = false;  // the MLP goes in chunks
  DeviceKind device = DeviceKind::kCpu;
};

std::string name_of(const Layout& layout) {
  const char* recompute[] = {"", "_selective", "_full"};
  const char* formats = layout.compute == DType::kF32 ? "fp32" : "bf16";
  const char* scaling = layout.scaling == QuantScaling::kCurrent ? "_fp8" : "_fp8_blockwise";
  return fmt::format("{}tp{}_dp{}_pp{}_zero{}_{}{}{}{}",
                     layout.device == DeviceKind::kCuda ? "cuda_" : "", layout.tp, layout.dp,
                     layout.pp, layout.zero, formats, layout.is_quantized ? scaling : "",
                     recompute[static_cast<int>(layout.recompute)],
                     layout.has_long_rows ? "_long" : "");
}

std::ostream& operator<<(std::ostream& out, const Layout& layout) { return out << name_of(layout); }

ModelSetup setup_of(const Layout& layout) {
  ModelSetup setup;
  if (layout.is_quantized) {
    // Sizes that FP8 products take.
    setup.config.vocab_size = 61;
    setup.config.hidden_size = 64;
    setup.config.intermediate_size = 96;
    setup.config.num_hidden_layers = 2;
    setup.config.num_attention_heads = 4;
    setup.config.num_key_value_heads = 4;
    setup.config.head_dim = 16;
    setup.recipe.scaling = layout.scaling;
  } else {
    setup.config = uneven_config(2, 2, false);
  }
  setup.config.max_position_embeddings = 512;
  setup.device.kind = layout.device;
  setup.mesh.tensor = layout.tp;
  setup.mesh.data = layout.dp;
  setup.mesh.pipeline = layout.pp;
  setup.zero = layout.zero;
  setup.compute = layout.compute;
  setup.sequence_parallel = true;
  setup.recompute = layout.recompute;
  if (layout.has_long_rows) setup.mlp_chunk_bytes = 1;
  setup.steps = 5;
  return setup;
}

StepResult run(const Layout& layout, bool overlap, bool inline_streams, bool peer_copies = false) {
  ModelSetup setup = setup_of(layout);
  setup.overlap = overlap;
  setup.peer_copies = peer_copies;
  setup.inline_streams = inline_streams;
  const GlobalTensors weights = random_weights(setup.config, 19, 0.2);
  const auto lengths = [&](int i) {
    return layout.has_long_rows ? std::vector<int>{130 + i, 1, 169 - i}
                                : std::vector<int>{9 + i, 1, 13 - i};
  };
  return train_step(
      setup, random_batches(2, 7, lengths),
      [&](ModelRuntime& runtime) { set_weights(runtime, weights); }, 1e-2, 1.0);
}

class TensorOverlap : public ::testing::TestWithParam<Layout> {
 protected:
  void SetUp() override {
    if (GetParam().device == DeviceKind::kCuda && cuda_device_count() == 0) {
      GTEST_SKIP() << "no CUDA device";
    }
  }
};

// Twice on workers, since a missing wait shows in some runs only.
TEST_P(TensorOverlap, ChangesNoBit) {
  const StepResult wanted = run(GetParam(), false, true);
  EXPECT_LT(wanted.losses.back(), wanted.losses.front());
  for (const bool peer_copies : {false, true}) {
    for (const bool inline_streams : {true, false, false}) {
      const StepResult got = run(GetParam(), true, inline_streams, peer_copies);
      EXPECT_EQ(got.losses, wanted.losses);
      EXPECT_EQ(got.gradients, wanted.gradients);
      EXPECT_EQ(got.weights, wanted.weights);
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
    add({});
    add({4, 1, 1, 0, DType::kF32, false, QuantScaling::kCurrent, Recompute::kSelective});
    add({2, 2, 2, 2, DType::kF32, false, QuantScaling::kCurrent, Recompute::kFull});
    add({4, 2, 1, 3, DType::kBF16});
    add({2, 1, 1, 0, DType::kBF16, false, QuantScaling::kCurrent, Recompute::kFull, true});
    for (const QuantScaling scaling : {QuantScaling::kCurrent, QuantScaling::kBlockwise}) {
      add({2, 1, 1, 0, DType::kF32, true, scaling});
      add({4, 1, 1, 0, DType::kBF16, true, scaling, Recompute::kFull});
    }
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Layouts, TensorOverlap, ::testing::ValuesIn(layouts()),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace tessera::test
