// What memory.recompute and memory.offload: auto choose, and what they say about it.
#include "engine/train/memory_choice.h"

#include <gtest/gtest.h>

#include "engine/train/run_setup.h"
#include "tests/support/expect_error.h"

namespace tessera::test {
namespace {

// Wide and shallow enough that every kind of memory counts.
ModelConfig model_of() {
  ModelConfig config;
  config.vocab_size = 512;
  config.hidden_size = 256;
  config.intermediate_size = 1024;
  config.num_hidden_layers = 8;
  config.num_attention_heads = 8;
  config.num_key_value_heads = 4;
  config.head_dim = 32;
  return config;
}

class MemoryChooser : public ::testing::Test {
 protected:
  RunConfig config_of(const std::vector<std::string>& overrides) {
    RunConfig config = parse_run_config(
        "model: {path: model.json, init: random}\n"
        "train: {sequence_length: 2048, micro_batch_size: 4, max_steps: 1}\n"
        "optimizer: {learning_rate: 1e-3}\n"
        "precision: {compute: bf16}\n"
        "data: {train: [text.txt], tokenizer: bytes}\n",
        "run.yaml", overrides);
    resolve(config, 1, false);
    return config;
  }
  MemoryChoice plan(const std::vector<std::string>& overrides, MemoryLimits limits) {
    const RunConfig config = config_of(overrides);
    options_ = runtime_options(config, mesh_, 4);
    return plan_memory(config, model_of(), mesh_, 0, {}, limits, options_);
  }
  std::size_t bytes_of(const std::vector<std::string>& overrides) {
    return plan(overrides, {}).memory.total();
  }
  std::string choice() const { return describe_memory_choice(options_); }

  MeshShape mesh_;
  RuntimeOptions options_;
};

TEST_F(MemoryChooser, TakesTheFirstThatFitsAndSaysWhy) {
  const std::size_t none = bytes_of({"memory.recompute=none"});
  const std::size_t selective = bytes_of({"memory.recompute=selective"});
  const std::size_t full = bytes_of({"memory.recompute=full"});
  ASSERT_GT(none, selective);
  ASSERT_GT(selective, full);
  MemoryLimits limits;
  const auto mib = [](std::size_t bytes) {
    return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
  };
  limits.device = none;
  EXPECT_EQ(plan({}, limits).memory.total(), none);
  EXPECT_EQ(choice(), "none");
  limits.device = none - 1;
  EXPECT_EQ(plan({}, limits).memory.total(), selective);
  EXPECT_EQ(choice(), "selective");
  limits.device = selective - 1;
  const MemoryChoice chosen = plan({}, limits);
  EXPECT_EQ(chosen.memory.total(), full);
  EXPECT_EQ(choice(), "full");
  EXPECT_EQ(chosen.reason, fmt::format("recompute full: with none {}, with selective {} would be "
                                       "needed, {} of {} are taken",
                                       mib(none), mib(selective), mib(full), mib(limits.device)));
  limits.device = full - 1;
  expect_error(ErrorKind::kAnswerNo, {"memory.offload: auto", mib(full), "1 bytes too few"},
               [&] { plan({}, limits); });
  EXPECT_EQ(plan({}, {}).reason, "recompute none: how much memory is free is not known");
  EXPECT_EQ(plan({"memory.recompute=none"}, {}).reason, "");
}

TEST_F(MemoryChooser, MovesToTheHostWhatIsAllowedAndNeeded) {
  const std::vector<std::string> allowed{"memory.offload=auto"};
  const std::size_t full = bytes_of({"memory.recompute=full"});
  const auto with = [&](const std::string& list) {
    return bytes_of({"memory.recompute=full", "memory.offload=" + list});
  };
  const std::size_t inputs = with("[activations]");
  const std::size_t moments = with("[activations, optimizer]");
  const std::size_t masters = with("[activations, optimizer, masters]");
  ASSERT_GT(full, inputs);
  ASSERT_GT(inputs, moments);
  ASSERT_GT(moments, masters);
  MemoryLimits limits;
  limits.device = full;
  plan(allowed, limits);
  EXPECT_EQ(choice(), "full");
  limits.device = full - 1;
  plan(allowed, limits);
  EXPECT_EQ(choice(), "full offload activations");
  limits.device = inputs - 1;
  EXPECT_GT(plan(allowed, limits).memory.host, 0u);
  EXPECT_EQ(choice(), "full offload activations, optimizer");
  limits.device = moments - 1;
  const MemoryChoice most = plan(allowed, limits);
  EXPECT_EQ(choice(), "full offload activations, optimizer, masters");
  EXPECT_EQ(most.memory.total(), masters);
  EXPECT_NE(most.reason.find("full offload activations, optimizer "), std::string::npos)
      << most.reason;
  limits.host = most.memory.host - 1;
  expect_error(ErrorKind::kAnswerNo, {"to host memory", "memory.offload"},
               [&] { plan(allowed, limits); });
  limits.host = 0;
  limits.device = masters - 1;
  expect_error(ErrorKind::kAnswerNo, {"MiB are available, 1 bytes too few"}, [&] { plan(allowed, limits); });
  EXPECT_EQ(plan_least_memory(config_of(allowed), model_of(), mesh_, 0, {}, options_).memory.total(),
            masters);
}

TEST_F(MemoryChooser, LeavesWhatIsFixed) {
  MemoryLimits limits;
  limits.device = bytes_of({"memory.recompute=none"}) - 1;
  plan({"memory.recompute=none", "memory.offload=auto"}, limits);
  EXPECT_EQ(choice(), "none offload optimizer");
  plan({"memory.offload=[optimizer]"}, limits);
  EXPECT_EQ(choice(), "none offload optimizer");
  // The inputs of blocks lie on the host only where they are what is kept.
  plan({"memory.offload=[activations, masters]"}, {});
  EXPECT_EQ(choice(), "none offload masters");
}

TEST_F(MemoryChooser, RefusesWhatContradictsItself) {
  expect_error(ErrorKind::kUser, {"memory.offload lists activations", "memory.recompute none"}, [&] {
    validate(config_of({"memory.offload=[activations]", "memory.recompute=none"}));
  });
  expect_error(ErrorKind::kUser, {"lists masters, but there are none"}, [&] {
    validate(config_of({"memory.offload=[masters]", "precision.master_weights=none"}));
  });
  expect_error(ErrorKind::kUser, {"memory.mlp_chunk"},
               [&] { validate(config_of({"memory.mlp_chunk=0B"})); });
}

// The largest rows of the larger models on one GPU of 141 GB, from the plan; and no part of an MLP's
// activations whole.
TEST(LongRowsPlan, EightBillionParametersAt128kTokensFit) {
  ModelConfig config;
  config.vocab_size = 128256;
  config.hidden_size = 4096;
  config.intermediate_size = 14336;
  config.num_hidden_layers = 32;
  config.num_attention_heads = 32;
  config.num_key_value_heads = 8;
  config.head_dim = 128;
  config.max_position_embeddings = 131072;
  Capabilities h200;
  h200.target = DeviceKind::kCuda;
  h200.sm_arch = 90;
  h200.sm_count = 132;
  h200.gemm_workspace = std::size_t{64} << 20;
  RuntimeOptions options;
  options.geometry = batch_geometry(1, 131072, 1, DType::kBF16, 1, false);
  options.params.fp32_masters = false;
  options.params.gradients = options.params.moments = DType::kBF16;
  options.recompute = Recompute::kFull;
  const auto measure = [&] {
    return measure_runtime(h200, {}, 0, config, options,
                           [](ModelRuntime& runtime) { dry_run_step(runtime, {}); });
  };
  const RuntimeMemory memory = measure();
  EXPECT_LT(memory.total(), std::size_t{138} << 30);
  for (const MemoryPlan::Entry& entry : memory.plan.entries) {
    if (entry.memory_class != MemoryClass::kActivations) continue;
    EXPECT_LE(entry.bytes, std::size_t{3} << 29) << entry.name;  // qkv: 1.5 GiB
  }
  options.offloads_inputs = true;
  const RuntimeMemory moved = measure();
  EXPECT_EQ(moved.host, std::size_t{32} << 30);
  EXPECT_EQ(moved.total(), memory.total() - (std::size_t{30} << 30));
}

}  // namespace
}  // namespace tessera::test
