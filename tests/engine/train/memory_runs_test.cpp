// Whole runs that save memory: state in host memory and moments of 8 bits train, save and resume as
// they should, and may be switched on at a resume.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint_reader.h"
#include "engine/core/log.h"
#include "engine/train/trainer.h"
#include "parallel/launch.h"
#include "parallel/one_gpu_communicator.h"
#include "tests/support/temp_folder.h"

namespace tessera::test {
namespace {

using Overrides = std::vector<std::string>;

class MemoryRuns : public ::testing::TestWithParam<DeviceKind> {
 protected:
  void SetUp() override {
    if (GetParam() == DeviceKind::kCuda && cuda_device_count() == 0)
      GTEST_SKIP() << "no CUDA device";
    log::set_console(false);
    std::ofstream model(folder_.path() / "model.json");
    model << R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 264,
      "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
      "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "max_position_embeddings": 64,
      "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu",
      "bos_token_id": null, "eos_token_id": 256, "torch_dtype": "float32"})";
    std::ofstream text(folder_.path() / "text.txt");
    for (int i = 0; i < 120; ++i)
      text << "Line " << i << " says that " << i * i << " is the square of " << i << ".\n";
  }
  void TearDown() override { log::set_console(true); }

  int train(const std::string& run, int ranks, int max_steps, const Overrides& overrides = {},
            const TrainSettings& settings = {}) {
    const bool on_gpu = GetParam() == DeviceKind::kCuda;
    const std::string text = fmt::format(
        "run: {{dir: {0}/{1}, device: {3}}}\n"
        "model: {{path: {0}/model.json, init: random}}\n"
        "train: {{sequence_length: 16, micro_batch_size: 1, global_batch_size: 4, max_steps: {2}}}\n"
        "optimizer: {{learning_rate: 3e-3}}\n"
        "schedule: {{name: constant, warmup_steps: 1}}\n"
        "precision: {{compute: bf16}}\n"
        "data: {{train: [{0}/text.txt], tokenizer: bytes, cache_dir: {0}/cache}}\n"
        "checkpoint: {{every_steps: 3}}\n",
        folder_.path().string(), run, max_steps, on_gpu ? "cuda" : "cpu");
    const RunConfig config = parse_run_config(text, "run.yaml", overrides);
    RunRanksOptions launch;
    launch.world_size = ranks;
    launch.handles_signals = false;
    if (on_gpu) {
      auto groups = std::make_shared<std::vector<std::unique_ptr<Communicator>>>(
          make_one_gpu_communicators(ranks));
      launch.make_world = [groups](const WorldSeed& seed) {
        return std::move((*groups)[static_cast<std::size_t>(seed.rank)]);
      };
    }
    launch.on_failure = [&](const FailureReport& failure) { failure_ = failure.text; };
    return run_ranks(launch, [&](RankContext& rank) {
      const auto context = make_context(Device{GetParam(), 0});
      RunConfig resolved = config;
      resolve(resolved, rank.world_size, on_gpu);
      Trainer trainer(std::move(resolved), settings, std::move(rank.world), *context, rank.control);
      return trainer.run();
    });
  }

  // Loss of each step; the last row of a step wins.
  std::map<int, double> losses(const std::string& run) const {
    std::map<int, double> result;
    std::ifstream file(folder_.path() / run / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      const auto row = nlohmann::json::parse(line);
      if (row.at("kind") == "train") result[row.at("step")] = row.at("loss");
    }
    return result;
  }
  std::string final_weights(const std::string& run) const {
    std::ifstream file(folder_.path() / run / "final" / "model.safetensors", std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void expect_same_run(const std::string& got, const std::string& wanted) const {
    EXPECT_EQ(losses(got), losses(wanted)) << got;
    EXPECT_EQ(final_weights(got), final_weights(wanted)) << got;
  }

  TempFolder folder_;
  std::string failure_;
};

TEST_P(MemoryRuns, OffloadedRunsAreThoseOnTheDeviceAndResumeEachOther) {
  const Overrides moved{"memory.recompute=full", "memory.offload=[activations, optimizer, masters]"};
  for (const auto& [ranks, layout] : std::vector<std::pair<int, Overrides>>{
           {1, {}}, {2, {"parallel.zero=3"}}, {2, {"parallel.pipeline=2"}}}) {
    const std::string name = fmt::format("{} {}", ranks, layout.empty() ? "plain" : layout.front());
    Overrides moved_here = moved;
    moved_here.insert(moved_here.end(), layout.begin(), layout.end());
    ASSERT_EQ(train(name, ranks, 8, layout), 0) << failure_;
    ASSERT_EQ(train(name + " moved", ranks, 8, moved_here), 0) << failure_;
    expect_same_run(name + " moved", name);
    // Interrupted, and each time continued the other way.
    ASSERT_EQ(train(name + " parts", ranks, 2, moved_here), 0) << failure_;
    ASSERT_EQ(train(name + " parts", ranks, 5, layout), 0) << failure_;
    ASSERT_EQ(train(name + " parts", ranks, 8, moved_here), 0) << failure_;
    expect_same_run(name + " parts", name);
  }
}

TEST_P(MemoryRuns, EightBitMomentsLearnLikeFp32AndResumeToTheBit) {
  const Overrides codes{"precision.optimizer_states=int8"};
  ASSERT_EQ(train("fp32", 1, 40), 0) << failure_;
  ASSERT_EQ(train("codes", 1, 40, codes), 0) << failure_;
  EXPECT_NE(losses("codes"), losses("fp32"));
  EXPECT_LT(losses("fp32").at(40), 0.75 * losses("fp32").at(1));
  // An update's direction is about 13% noise (moment_format_test), a few hundredths of the progress
  // since the first step: 0.05 of at most the whole fall.
  const double fall = losses("fp32").at(1) - losses("fp32").at(40);
  for (const auto& [step, loss] : losses("fp32")) {
    EXPECT_NEAR(losses("codes").at(step), loss, 0.05 * fall) << step;
  }
  for (const int first : {1, 17}) {
    const std::string parts = fmt::format("parts{}", first);
    ASSERT_EQ(train(parts, 1, first, codes), 0) << failure_;
    ASSERT_EQ(train(parts, 1, 40, codes), 0) << failure_;
    expect_same_run(parts, "codes");
  }
  const Overrides offloaded{"precision.optimizer_states=int8", "memory.offload=[optimizer]"};
  ASSERT_EQ(train("offloaded", 1, 17, offloaded), 0) << failure_;
  ASSERT_EQ(train("offloaded", 1, 40, offloaded), 0) << failure_;
  expect_same_run("offloaded", "codes");
}

// Shards end between blocks, so other layouts have the same codes of nearly everything and, with the
// same noise, the same course: what differs is the rounding of their sums.
TEST_P(MemoryRuns, EightBitMomentsContinueUnderOtherLayouts) {
  const auto with = [](Overrides layout) {
    layout.emplace_back("precision.optimizer_states=int8");
    return layout;
  };
  ASSERT_EQ(train("one", 1, 12, with({})), 0) << failure_;
  ASSERT_EQ(train("mixed", 2, 3, with({"parallel.zero=3"})), 0) << failure_;
  ASSERT_EQ(train("mixed", 4, 6, with({"parallel.tensor=2", "parallel.zero=1"})), 0) << failure_;
  ASSERT_EQ(train("mixed", 2, 9, with({"parallel.pipeline=2"})), 0) << failure_;
  ASSERT_EQ(train("mixed", 1, 12, with({})), 0) << failure_;
  for (const auto& [step, loss] : losses("one")) {
    EXPECT_NEAR(losses("mixed").at(step), loss, 1e-2 * loss) << step;  // bf16
  }
  // From fp32 moments, which then lose their lower bits, by permission.
  ASSERT_EQ(train("switch", 1, 6), 0) << failure_;
  EXPECT_EQ(train("switch", 1, 12, with({})), 2);
  EXPECT_NE(failure_.find("precision.optimizer_states"), std::string::npos) << failure_;
  TrainSettings settings;
  settings.allowed_changes = {"precision.optimizer_states"};
  ASSERT_EQ(train("switch", 1, 12, with({}), settings), 0) << failure_;
  EXPECT_NEAR(losses("switch").at(12), losses("one").at(12), 0.05 * losses("one").at(12));
}

// A checkpoint holds what the codes stand for, whatever layout reads it next.
TEST_P(MemoryRuns, CheckpointsHoldEightBitMomentsAsBf16) {
  ASSERT_EQ(train("codes", 1, 3, {"precision.optimizer_states=int8"}), 0) << failure_;
  const CheckpointReader reader(folder_.path() / "codes" / "checkpoints" / "step-000003");
  int moments = 0;
  for (const auto& [name, tensor] : reader.index().tensors) {
    if (!name.starts_with("adam_")) continue;
    EXPECT_EQ(tensor.dtype, DType::kBF16) << name;
    ++moments;
  }
  EXPECT_EQ(moments, 2 * (3 * 9 + 2));
}

// The same limit on every rank, so that all choose alike, and a run that changed its mind resumes.
TEST_P(MemoryRuns, ALimitMakesRanksRecomputeAlike) {
  const Overrides layout{"parallel.tensor=2"};
  ASSERT_EQ(train("free", 2, 4, layout), 0) << failure_;
  ASSERT_EQ(train("short", 2, 4, {"parallel.tensor=2", "memory.limit=1"}), 1);
  EXPECT_NE(failure_.find("memory.offload: auto"), std::string::npos) << failure_;
  ASSERT_EQ(train("full", 2, 4, {"parallel.tensor=2", "memory.recompute=full"}), 0) << failure_;
  expect_same_run("full", "free");
}

INSTANTIATE_TEST_SUITE_P(Devices, MemoryRuns,
                         ::testing::Values(DeviceKind::kCpu, DeviceKind::kCuda),
                         [](const auto& info) {
                           return info.param == DeviceKind::kCpu ? "cpu" : "cuda";
                         });

}  // namespace
}  // namespace tessera::test
