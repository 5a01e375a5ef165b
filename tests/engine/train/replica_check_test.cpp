// Copies that differ by one bit are found, named with their ranks, under every way to hold copies; equal ones pass.
#include "engine/train/replica_check.h"

#include <gtest/gtest.h>

#include "tests/engine/train/model_harness.h"

namespace tessera::test {
namespace {

struct Case {
  const char* name;
  int data, tensor, zero;
  bool tied;
  int rank;               // whose copy is changed
  const char* parameter;  // which
  const char* wanted;     // of the message; null: no other rank has a copy
};

class Replicas : public ::testing::TestWithParam<Case> {};

void flip_a_bit(ModelRuntime& runtime, const std::string& name) {
  ParamStore& params = runtime.params();
  for (int b = 0; b < params.num_buckets(); ++b) {
    for (std::size_t i = 0; i < params.bucket(b).params.size(); ++i) {
      if (params.bucket(b).params[i].name != name) continue;
      // The last element, so that all of a parameter is seen to be read.
      const Tensor weight = params.shards_weights() ? Tensor{} : params.weight({b, static_cast<int>(i)});
      auto* bytes = static_cast<unsigned char*>(weight.data);
      bytes[weight.bytes() - 1] ^= 1;
      return;
    }
  }
  FAIL() << name << " is no parameter";
}

TEST_P(Replicas, ADifferentBitIsNamed) {
  const Case& c = GetParam();
  ModelSetup setup;
  setup.config = uneven_config(2, 2, c.tied);
  setup.mesh.data = c.data;
  setup.mesh.tensor = c.tensor;
  setup.zero = c.zero;
  const auto batches = random_batches(2, 3, [](int) { return std::vector<int>{9}; });
  const GlobalTensors weights = random_weights(setup.config, 5, 0.1);
  std::vector<std::string> failures(static_cast<std::size_t>(c.data * c.tensor));
  train_step(setup, batches, [&](ModelRuntime& runtime) {
    set_weights(runtime, weights);
    const ReplicaCheck check(runtime);
    EXPECT_NO_THROW(check.check(1));
    const int rank = runtime.mesh().world().rank();
    if (rank == c.rank) flip_a_bit(runtime, c.parameter);
    try {
      check.check(2);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kTransient);
      failures[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  int failed = 0;
  for (const std::string& failure : failures) {
    if (failure.empty()) continue;
    ++failed;
    EXPECT_NE(failure.find(fmt::format("after step 2 the copies of {} differ", c.parameter)), std::string::npos) << failure;
    EXPECT_NE(failure.find(c.wanted == nullptr ? "?" : c.wanted), std::string::npos) << failure;
  }
  EXPECT_EQ(failed > 0, c.wanted != nullptr);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, Replicas,
    ::testing::Values(Case{"dp3", 3, 1, 0, true, 2, "model.layers.1.mlp.down_proj.weight", "of 3 data-parallel ranks, 2 differs from 0, 1"},
                      Case{"dp3_zero1", 3, 1, 1, false, 0, "model.embed_tokens.weight", "of 3 data-parallel ranks, 0 differs from 1, 2"},
                      Case{"tp2_norm", 1, 2, 0, true, 1, "model.norm.weight", "of 2 tensor-parallel ranks"},
                      Case{"tp2_dp2", 2, 2, 0, false, 3, "model.layers.0.self_attn.q_proj.weight", "of 2 data-parallel ranks"},
                      Case{"tp2_piece", 1, 2, 0, false, 1, "model.layers.0.mlp.gate_proj.weight", nullptr}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::test
