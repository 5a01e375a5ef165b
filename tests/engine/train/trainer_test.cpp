// Whole runs of the Trainer on CPU ranks: resume to the bit, other layouts, stop requests, bad steps.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>

#include <nlohmann/json.hpp>

#include "checkpoint/safetensors_folder.h"
#include "engine/core/log.h"
#include "engine/train/trainer.h"
#include "parallel/launch.h"
#include "parallel/one_gpu_communicator.h"
#include "tests/support/temp_folder.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;

class TrainerRun : public ::testing::Test {
 protected:
  void SetUp() override {
    log::set_console(false);
    std::ofstream model(folder_.path() / "model.json");
    model << R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 264,
      "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
      "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "max_position_embeddings": 64, "rope_theta": 10000.0,
      "tie_word_embeddings": true, "hidden_act": "silu", "bos_token_id": null, "eos_token_id": 256,
      "torch_dtype": "float32"})";
    std::ofstream text(folder_.path() / "text.txt");
    for (int i = 0; i < 120; ++i) text << "Line " << i << " says that " << i * i << " is the square of " << i << ".\n";
  }
  void TearDown() override { log::set_console(true); }

  // Runs to `max_steps` and returns the exit code; `request_stop_at` > 0 asks for a stop from that step on.
  int train(const std::string& run, int ranks, int max_steps, const std::vector<std::string>& overrides = {},
            const TrainSettings& settings = {}) {
    const std::string text = fmt::format(
        "run: {{dir: {0}/{1}, device: {3}}}\n"
        "model: {{path: {0}/model.json, init: random}}\n"
        "train: {{sequence_length: 16, micro_batch_size: 1, global_batch_size: 4, max_steps: {2}}}\n"
        "optimizer: {{learning_rate: 1e-3}}\n"
        "schedule: {{name: constant, warmup_steps: 1}}\n"
        "data: {{train: [{0}/text.txt], tokenizer: bytes, cache_dir: {0}/cache}}\n"
        "checkpoint: {{every_steps: 3}}\n",
        folder_.path().string(), run, max_steps, device_.kind == DeviceKind::kCuda ? "cuda" : "cpu");
    const RunConfig config = parse_run_config(text, "run.yaml", overrides);
    RunRanksOptions launch;
    launch.world_size = ranks;
    launch.handles_signals = false;
    if (device_.kind == DeviceKind::kCuda) {
      auto groups = std::make_shared<std::vector<std::unique_ptr<Communicator>>>(
          make_one_gpu_communicators(ranks));
      launch.make_world = [groups](const WorldSeed& seed) {
        return std::move((*groups)[static_cast<std::size_t>(seed.rank)]);
      };
    }
    launch.on_failure = [&](const FailureReport& failure) { failure_ = failure.text; };
    return run_ranks(launch, [&](RankContext& rank) {
      const auto context = make_context(device_);
      RunConfig resolved = config;
      resolve(resolved, rank.world_size, false);
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

  TempFolder folder_;
  std::string failure_;
  Device device_;
};

TEST_F(TrainerRun, ResumeAtAnyStepIsBitIdentical) {
  ASSERT_EQ(train("whole", 2, 9, {"parallel.tensor=2"}), 0) << failure_;
  ASSERT_EQ(losses("whole").size(), 9u);
  EXPECT_LT(losses("whole").at(9), losses("whole").at(1));
  for (const int first : {1, 4, 7}) {
    const std::string run = "parts" + std::to_string(first);
    ASSERT_EQ(train(run, 2, first, {"parallel.tensor=2"}), 0) << failure_;
    ASSERT_EQ(train(run, 2, 9, {"parallel.tensor=2"}), 0) << failure_;
    EXPECT_EQ(losses(run), losses("whole")) << first;
    EXPECT_EQ(final_weights(run), final_weights("whole")) << first;
  }
}

TEST_F(TrainerRun, OnAGpuRepeatsAndResumesAreBitIdentical) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  device_.kind = DeviceKind::kCuda;
  for (const int ranks : {1, 2}) {
    const std::string tensor = fmt::format("parallel.tensor={}", ranks);
    const std::string whole = fmt::format("whole{}", ranks);
    ASSERT_EQ(train(whole, ranks, 9, {tensor}), 0) << failure_;
    ASSERT_EQ(train(whole + "again", ranks, 9, {tensor}), 0) << failure_;
    EXPECT_EQ(losses(whole + "again"), losses(whole));
    EXPECT_EQ(final_weights(whole + "again"), final_weights(whole));
    ASSERT_EQ(train(whole + "parts", ranks, 4, {tensor}), 0) << failure_;
    ASSERT_EQ(train(whole + "parts", ranks, 9, {tensor}), 0) << failure_;
    EXPECT_EQ(losses(whole + "parts"), losses(whole));
    EXPECT_EQ(final_weights(whole + "parts"), final_weights(whole));
  }
  for (const auto& [step, loss] : losses("whole1")) {
    EXPECT_NEAR(losses("whole2").at(step), loss, 2e-2 * loss) << step;  // bf16
  }
}

TEST_F(TrainerRun, Fp8LearnsLikeTheComputeFormatAndResumesToTheBit) {
  ASSERT_EQ(train("plain", 1, 12), 0) << failure_;
  for (const auto& [scaling, ranks] : std::vector<std::pair<std::string, int>>{
           {"current", 1}, {"current", 2}, {"blockwise", 1}, {"blockwise", 2}}) {
    const std::vector<std::string> fp8{"precision.fp8=" + scaling,
                                       fmt::format("parallel.tensor={}", ranks)};
    const std::string whole = fmt::format("fp8 {} {}", scaling, ranks);
    ASSERT_EQ(train(whole, ranks, 12, fp8), 0) << failure_;
    ASSERT_EQ(train(whole + " again", ranks, 5, fp8), 0) << failure_;
    ASSERT_EQ(train(whole + " again", ranks, 12, fp8), 0) << failure_;
    EXPECT_EQ(losses(whole + " again"), losses(whole));
    EXPECT_EQ(final_weights(whole + " again"), final_weights(whole));
    EXPECT_NE(losses(whole), losses("plain"));
    for (const auto& [step, loss] : losses("plain")) {
      EXPECT_NEAR(losses(whole).at(step), loss, 0.02 * loss) << step;
    }
    EXPECT_LT(losses(whole).at(12), losses(whole).at(1));
  }
  // Counting what casts lose changes nothing; every quantised layer is told of, on one rank and two.
  for (const auto& [scaling, ranks] : std::vector<std::pair<std::string, int>>{{"current", 2}, {"blockwise", 1}}) {
    const std::string watched = fmt::format("watched {}", scaling);
    ASSERT_EQ(train(watched, ranks, 12,
                    {"precision.fp8=" + scaling, fmt::format("parallel.tensor={}", ranks), "log.fp8_every_steps=5"}),
              0)
        << failure_;
    EXPECT_EQ(losses(watched), losses(fmt::format("fp8 {} {}", scaling, ranks)));
    std::ifstream metrics(folder_.path() / watched / "metrics.jsonl");
    std::vector<int> steps;
    for (std::string line; std::getline(metrics, line);) {
      const auto row = nlohmann::json::parse(line);
      if (row.at("kind") != "fp8") continue;
      steps.push_back(row.at("step"));
      const auto& lost = row.at("lost");
      for (const char* layer : {"self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"}) {
        const auto& shares = lost.at(std::string("model.layers.0.") + layer);
        // Of values that are about normal, e4m3 loses those under 2^-18 of the largest, one in a hundred thousand.
        // The gradient of q at the first token of a document is zero but for round-off, and that is lost.
        EXPECT_LT(shares.at("input").get<double>(), 0.01) << layer;
        EXPECT_LT(shares.at("gradient").get<double>(), layer == std::string("self_attn.q_proj") ? 0.1 : 0.01) << layer;
      }
    }
    EXPECT_EQ(steps, (std::vector<int>{5, 10})) << scaling;
  }
  // FP8 keeps no state: a run in the compute format goes on in it when that is allowed (B42).
  ASSERT_EQ(train("switch", 1, 6), 0) << failure_;
  EXPECT_EQ(train("switch", 1, 12, {"precision.fp8=current"}), 2);
  EXPECT_NE(failure_.find("precision.fp8"), std::string::npos) << failure_;
  TrainSettings settings;
  settings.allowed_changes = {"precision.fp8"};
  ASSERT_EQ(train("switch", 1, 12, {"precision.fp8=current"}, settings), 0) << failure_;
  EXPECT_EQ(losses("switch").at(6), losses("plain").at(6));
  EXPECT_NEAR(losses("switch").at(12), losses("plain").at(12), 0.02 * losses("plain").at(12));
  EXPECT_EQ(train("typo", 1, 3, {"precision.fp8=current", "precision.keep_bf16=[lm_head, layers.7]"}), 2);
  EXPECT_NE(failure_.find("\"layers.7\", which names no layer"), std::string::npos) << failure_;
}

TEST_F(TrainerRun, OtherLayoutsContinueWithTheSameLoss) {
  ASSERT_EQ(train("whole", 1, 8), 0) << failure_;
  ASSERT_EQ(train("parts", 4, 3, {"parallel.tensor=2"}), 0) << failure_;
  ASSERT_EQ(train("parts", 2, 6), 0) << failure_;
  ASSERT_EQ(train("parts", 1, 8), 0) << failure_;
  for (const auto& [step, loss] : losses("whole")) EXPECT_NEAR(losses("parts").at(step), loss, 1e-5 * loss) << step;
}

TEST_F(TrainerRun, ZeroStagesResumeToTheBitAndContinueEachOther) {
  const auto zero = [](int stage) { return fmt::format("parallel.zero={}", stage); };
  ASSERT_EQ(train("one", 1, 8), 0) << failure_;
  for (const int stage : {2, 3}) {
    const std::string whole = fmt::format("whole{}", stage);
    ASSERT_EQ(train(whole, 4, 8, {zero(stage), "parallel.tensor=2"}), 0) << failure_;
    ASSERT_EQ(train(whole + "parts", 4, 5, {zero(stage), "parallel.tensor=2"}), 0) << failure_;
    ASSERT_EQ(train(whole + "parts", 4, 8, {zero(stage), "parallel.tensor=2"}), 0) << failure_;
    EXPECT_EQ(losses(whole + "parts"), losses(whole));
    EXPECT_EQ(final_weights(whole + "parts"), final_weights(whole));
    for (const auto& [step, loss] : losses("one")) EXPECT_NEAR(losses(whole).at(step), loss, 1e-5 * loss) << step;
  }
  // Four ranks, two, with tensor parallelism, one: each goes on where the other stage stopped (B38).
  ASSERT_EQ(train("mixed", 4, 2, {zero(3)}), 0) << failure_;
  ASSERT_EQ(train("mixed", 2, 4, {zero(2)}), 0) << failure_;
  ASSERT_EQ(train("mixed", 4, 6, {zero(3), "parallel.tensor=2"}), 0) << failure_;
  ASSERT_EQ(train("mixed", 2, 7, {zero(0)}), 0) << failure_;
  ASSERT_EQ(train("mixed", 1, 8, {zero(3)}), 0) << failure_;
  for (const auto& [step, loss] : losses("one")) EXPECT_NEAR(losses("mixed").at(step), loss, 1e-5 * loss) << step;
}

TEST_F(TrainerRun, ShardsOfANodeTrainAsThoseOfAll) {
  ASSERT_EQ(train("all", 2, 4, {"parallel.zero=3"}), 0) << failure_;
  ASSERT_EQ(train("node", 2, 4, {"parallel.zero=3", "parallel.shard_group=node"}), 0) << failure_;
  EXPECT_EQ(losses("node"), losses("all"));  // one node
  EXPECT_EQ(final_weights("node"), final_weights("all"));
}

TEST_F(TrainerRun, ZeroThreeEvaluatesAndExportsAsOneRank) {
  const std::vector<std::string> eval = {fmt::format("data.eval=[{}/text.txt]", folder_.path().string()),
                                         "eval.every_steps=2", "eval.at_start=true",
                                         "checkpoint.export.every_steps=2", "precision.compute=bf16"};
  const auto evaluations = [&](const std::string& run) {
    std::map<int, double> result;
    std::ifstream file(folder_.path() / run / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      const auto row = nlohmann::json::parse(line);
      if (row.at("kind") == "eval") result[row.at("step")] = row.at("loss");
    }
    return result;
  };
  ASSERT_EQ(train("one", 1, 2, eval), 0) << failure_;
  std::vector<std::string> sharded = eval;
  sharded.push_back("parallel.zero=3");
  ASSERT_EQ(train("three", 3, 2, [&] {
              auto overrides = sharded;
              overrides.push_back("train.global_batch_size=6");
              return overrides;
            }()), 0) << failure_;
  ASSERT_EQ(train("two", 2, 2, sharded), 0) << failure_;
  ASSERT_EQ(evaluations("one").size(), 2u);
  // The same weights: bf16 sums of other orders alone.
  EXPECT_NEAR(evaluations("two").at(0), evaluations("one").at(0), 1e-3);
  EXPECT_NEAR(evaluations("three").at(0), evaluations("one").at(0), 1e-3);
  EXPECT_NEAR(evaluations("two").at(2), evaluations("one").at(2), 1e-2);
  EXPECT_EQ(final_weights("two").size(), final_weights("one").size());
}

TEST_F(TrainerRun, PipelinesResumeToTheBitAndContinueOtherLayouts) {
  const std::vector<std::string> piped = {"parallel.pipeline=2", "parallel.zero=2"};
  ASSERT_EQ(train("one", 1, 8), 0) << failure_;
  ASSERT_EQ(train("whole", 4, 8, piped), 0) << failure_;
  ASSERT_EQ(train("wholeparts", 4, 4, piped), 0) << failure_;
  ASSERT_EQ(train("wholeparts", 4, 8, piped), 0) << failure_;
  EXPECT_EQ(losses("wholeparts"), losses("whole"));
  EXPECT_EQ(final_weights("wholeparts"), final_weights("whole"));
  EXPECT_EQ(final_weights("whole").size(), final_weights("one").size());
  ASSERT_EQ(train("mixed", 2, 2, {"parallel.pipeline=2"}), 0) << failure_;
  ASSERT_EQ(train("mixed", 1, 4), 0) << failure_;
  ASSERT_EQ(train("mixed", 8, 6, {"parallel.pipeline=2", "parallel.tensor=2", "parallel.zero=3"}), 0) << failure_;
  ASSERT_EQ(train("mixed", 2, 8, {"parallel.tensor=2"}), 0) << failure_;
  for (const auto& [step, loss] : losses("one")) {
    EXPECT_NEAR(losses("whole").at(step), loss, 1e-5 * loss) << step;
    EXPECT_NEAR(losses("mixed").at(step), loss, 1e-5 * loss) << step;
  }
}

// B04 in a pipeline: the last step of an epoch has fewer micro-batches. Evaluations and exports, too.
TEST_F(TrainerRun, PipelinesEvaluateExportAndEndEpochsAsOneRank) {
  const std::vector<std::string> common = {
      fmt::format("data.eval=[{}/text.txt]", folder_.path().string()), "eval.every_steps=20", "eval.at_start=true",
      "train.epochs=1", "train.max_steps=null", "checkpoint.every_steps=50", "checkpoint.export.every_steps=20"};
  const auto evaluations = [&](const std::string& run) {
    std::map<int, double> result;
    std::ifstream file(folder_.path() / run / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      const auto row = nlohmann::json::parse(line);
      if (row.at("kind") == "eval") result[row.at("step")] = row.at("loss");
    }
    return result;
  };
  ASSERT_EQ(train("one", 1, 1, common), 0) << failure_;
  const auto piped = [&](std::vector<std::string> more) {
    more.insert(more.begin(), common.begin(), common.end());
    return more;
  };
  ASSERT_EQ(train("two", 2, 1, piped({"parallel.pipeline=2"})), 0) << failure_;
  ASSERT_EQ(train("gpipe", 4, 1, piped({"parallel.pipeline=2", "parallel.tensor=2",
                                        "parallel.pipeline_schedule=gpipe"})), 0) << failure_;
  ASSERT_GT(losses("one").size(), 40u);
  for (const char* run : {"two", "gpipe"}) {
    ASSERT_EQ(losses(run).size(), losses("one").size());
    for (const auto& [step, loss] : losses("one")) EXPECT_NEAR(losses(run).at(step), loss, 2e-5 * loss) << run << step;
    ASSERT_EQ(evaluations(run).size(), evaluations("one").size());
    for (const auto& [step, loss] : evaluations("one")) {
      EXPECT_NEAR(evaluations(run).at(step), loss, 2e-5 * loss) << run << step;
    }
    EXPECT_TRUE(fs::exists(folder_.path() / run / "exports" / "step-000020" / "model.safetensors"));
  }
  // The exported folder is the trained model: it goes on where the run stopped.
  const SafetensorsFolder one(folder_.path() / "one" / "final");
  const SafetensorsFolder two(folder_.path() / "gpipe" / "final");
  for (const char* name : {"model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight",
                           "model.layers.1.mlp.down_proj.weight", "model.norm.weight"}) {
    const auto values = [&](const SafetensorsFolder& folder) {
      const auto& entry = folder.get(name);
      std::vector<float> result(static_cast<std::size_t>(entry.tensor->bytes() / sizeof(float)));
      entry.file->read_elements(*entry.tensor, 0, static_cast<std::int64_t>(result.size()), result.data());
      return result;
    };
    const auto wanted = values(one);
    const auto got = values(two);
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], wanted[i], 2e-3) << name << " " << i;
  }
}

TEST_F(TrainerRun, OverlapChangesNoBit) {
  const std::vector<std::string> layout = {"parallel.tensor=2", "parallel.zero=3"};
  ASSERT_EQ(train("on", 4, 4, layout), 0) << failure_;
  std::vector<std::string> serial = layout;
  serial.push_back("parallel.overlap=false");
  ASSERT_EQ(train("off", 4, 2, serial), 0) << failure_;
  ASSERT_EQ(train("off", 4, 4, serial), 0) << failure_;
  std::vector<std::string> copied = layout;
  copied.push_back("parallel.peer_copies=true");
  ASSERT_EQ(train("copied", 4, 4, copied), 0) << failure_;
  for (const char* run : {"off", "copied"}) {
    EXPECT_EQ(losses(run), losses("on"));
    EXPECT_EQ(final_weights(run), final_weights("on"));
  }
}

// Every rank holds a part of each row; a checkpoint holds none of it.
TEST_F(TrainerRun, ContextsResumeToTheBitContinueOtherLayoutsAndEvaluate) {
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), {fmt::format("data.eval=[{}/text.txt]", folder_.path().string()),
                             "eval.every_steps=4", "eval.at_start=true"});
    return more;
  };
  const auto evaluations = [&](const std::string& run) {
    std::map<int, double> result;
    std::ifstream file(folder_.path() / run / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      const auto row = nlohmann::json::parse(line);
      if (row.at("kind") == "eval") result[row.at("step")] = row.at("loss");
    }
    return result;
  };
  // 17 tokens in a row: no number of ranks divides them.
  const std::string odd = "train.sequence_length=17";
  ASSERT_EQ(train("one", 1, 8, with({odd})), 0) << failure_;
  const std::vector<std::string> split = {odd, "parallel.context=2", "parallel.zero=3"};
  ASSERT_EQ(train("whole", 4, 8, with(split)), 0) << failure_;
  ASSERT_EQ(train("parts", 4, 3, with(split)), 0) << failure_;
  ASSERT_EQ(train("parts", 4, 8, with(split)), 0) << failure_;
  EXPECT_EQ(losses("parts"), losses("whole"));
  EXPECT_EQ(final_weights("parts"), final_weights("whole"));
  ASSERT_EQ(train("mixed", 4, 2, with({odd, "parallel.context=4"})), 0) << failure_;
  ASSERT_EQ(train("mixed", 8, 5, with({odd, "parallel.context=2", "parallel.tensor=2",
                                       "parallel.pipeline=2", "parallel.zero=2"})), 0) << failure_;
  ASSERT_EQ(train("mixed", 2, 7, with({odd, "parallel.tensor=2"})), 0) << failure_;
  ASSERT_EQ(train("mixed", 3, 8, with({odd, "parallel.context=3"})), 0) << failure_;
  ASSERT_EQ(losses("one").size(), 8u);
  ASSERT_EQ(evaluations("one").size(), 3u);
  for (const char* run : {"whole", "mixed"}) {
    for (const auto& [step, loss] : losses("one")) {
      EXPECT_NEAR(losses(run).at(step), loss, 1e-5 * loss) << run << step;
    }
    for (const auto& [step, loss] : evaluations("one")) {
      EXPECT_NEAR(evaluations(run).at(step), loss, 1e-5 * loss) << run << step;
    }
  }
}

// Llama 3 70B in small: the ratios of its sizes, a tenth of its blocks. 64 ranks on inline streams,
// with two key/value heads for four tensor-parallel ranks.
TEST_F(TrainerRun, SixtyFourRanksEqualOneAndContinueElsewhere) {
  std::ofstream(folder_.path() / "llama70b.json")
      << R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 264,
      "hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 8, "num_attention_heads": 16,
      "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-05, "max_position_embeddings": 8192,
      "rope_theta": 500000.0, "tie_word_embeddings": false, "hidden_act": "silu", "bos_token_id": null,
      "eos_token_id": 256, "torch_dtype": "float32"})";
  const auto with = [&](std::vector<std::string> more) {
    more.push_back(fmt::format("model.path={}/llama70b.json", folder_.path().string()));
    more.push_back("train.global_batch_size=16");
    return more;
  };
  ASSERT_EQ(train("one", 1, 8, with({})), 0) << failure_;
  ASSERT_EQ(train("many", 64, 5, with({"parallel.pipeline=4", "parallel.tensor=4"})), 0) << failure_;
  ASSERT_EQ(train("many", 16, 7, with({"parallel.pipeline=2", "parallel.virtual_stages=2", "parallel.tensor=2",
                                       "parallel.zero=3"})), 0) << failure_;
  ASSERT_EQ(train("many", 1, 8, with({})), 0) << failure_;
  ASSERT_EQ(losses("many").size(), 8u);
  EXPECT_LT(losses("one").at(8), losses("one").at(1));
  for (const auto& [step, loss] : losses("one")) EXPECT_NEAR(losses("many").at(step), loss, 1e-5 * loss) << step;
}

// Every stage decides alike, from a loss that only the last one computes.
TEST_F(TrainerRun, StagesAgreeOnBadStepsAndOnStopping) {
  const std::vector<std::string> bad = {"parallel.pipeline=2", "parallel.zero=3", "optimizer.learning_rate=1e30",
                                        "optimizer.max_grad_norm=0"};
  EXPECT_EQ(train("bad", 4, 6, bad), 3);
  EXPECT_NE(failure_.find("not finite"), std::string::npos) << failure_;
  std::vector<std::string> skip = bad;
  skip.push_back("faults.nan=skip");
  EXPECT_EQ(train("skip", 4, 6, skip), 0) << failure_;
  EXPECT_EQ(losses("skip").size(), 6u);
  ASSERT_EQ(train("whole", 2, 5, {"parallel.pipeline=2"}), 0) << failure_;
  EXPECT_EQ(train("run", 2, 5, {"parallel.pipeline=2", "run.time_limit=0s"}), 75) << failure_;
  EXPECT_EQ(train("run", 2, 5, {"parallel.pipeline=2"}), 0) << failure_;
  EXPECT_EQ(final_weights("run"), final_weights("whole"));
}

// B24: the error of a rank in the middle of a pipeline is what all of them end with.
TEST_F(TrainerRun, AStageWithoutRoomEndsTheOthers) {
  // The first stage keeps more micro-batches than the last and does not fit; the last would.
  EXPECT_EQ(train("fits", 2, 1, {"parallel.pipeline=2", "memory.limit=2M"}), 0) << failure_;
  EXPECT_EQ(train("run", 2, 1, {"parallel.pipeline=2", "memory.limit=100K"}), 1);
  EXPECT_NE(failure_.find("[memory] rank"), std::string::npos) << failure_;
}

TEST_F(TrainerRun, MorePiecesThanBlocksAreRefused) {
  EXPECT_EQ(train("run", 3, 3, {"parallel.pipeline=3"}), 2);
  EXPECT_NE(failure_.find("2 blocks"), std::string::npos) << failure_;
}

TEST_F(TrainerRun, AChangedKeyIsRefusedUnlessAllowed) {
  ASSERT_EQ(train("run", 1, 3), 0) << failure_;
  EXPECT_EQ(train("run", 1, 6, {"optimizer.learning_rate=2e-3"}), 2);
  EXPECT_NE(failure_.find("optimizer.learning_rate"), std::string::npos) << failure_;
  TrainSettings settings;
  settings.allowed_changes = {"optimizer.learning_rate"};
  EXPECT_EQ(train("run", 1, 6, {"optimizer.learning_rate=2e-3"}, settings), 0) << failure_;
}

TEST_F(TrainerRun, ACompleteRunSaysSoAndChangesNothing) {
  ASSERT_EQ(train("run", 1, 3), 0) << failure_;
  const std::string weights = final_weights("run");
  EXPECT_EQ(train("run", 1, 3), 0) << failure_;
  EXPECT_EQ(final_weights("run"), weights);
  EXPECT_EQ(losses("run").size(), 3u);
}

TEST_F(TrainerRun, ATimeLimitSavesAndTheNextRunGoesOn) {
  ASSERT_EQ(train("whole", 1, 5), 0) << failure_;
  EXPECT_EQ(train("run", 1, 5, {"run.time_limit=0s"}), 75) << failure_;
  EXPECT_EQ(train("run", 1, 5), 0) << failure_;
  EXPECT_EQ(final_weights("run"), final_weights("whole"));
}

TEST_F(TrainerRun, WhatDoesNotFitIsRefusedBeforeAStep) {
  EXPECT_EQ(train("run", 1, 3, {"memory.limit=64K"}), 1);
  EXPECT_NE(failure_.find("[memory]"), std::string::npos) << failure_;
  EXPECT_FALSE(fs::exists(folder_.path() / "run" / "metrics.jsonl"));
}

TEST_F(TrainerRun, AnImpossibleLayoutNamesTheNumbers) {
  EXPECT_EQ(train("run", 3, 3, {"parallel.tensor=3"}), 2);
  EXPECT_NE(failure_.find("num_attention_heads 4"), std::string::npos) << failure_;
}

// Saves that are kept, exports, rows and lengths are what the keys say.
TEST_F(TrainerRun, SavesExportsAndRowsFollowTheirKeys) {
  ASSERT_EQ(train("run", 1, 6,
                  {"checkpoint.every_steps=1", "checkpoint.keep_last=2", "checkpoint.keep_every=3",
                   "checkpoint.export.every_steps=4", "log.every_steps=4"}),
            0)
      << failure_;
  for (const int step : {1, 2, 3, 4, 5, 6}) {
    const std::string name = fmt::format("step-{:06}", step);
    EXPECT_EQ(fs::exists(folder_.path() / "run/checkpoints" / name), step % 3 == 0 || step >= 5)
        << step;
    EXPECT_EQ(fs::exists(folder_.path() / "run/exports" / name / "config.json"), step == 4) << step;
    EXPECT_EQ(losses("run").count(step) == 1, step == 4 || step == 6) << step;
  }
}

TEST_F(TrainerRun, TokensAndEpochsSetTheLength) {
  ASSERT_EQ(train("tokens", 1, 9, {"train.max_steps=null", "train.max_tokens=320"}), 0) << failure_;
  EXPECT_EQ(losses("tokens").size(), 5u);  // 320 tokens of 4 rows of 16
  ASSERT_EQ(train("epochs", 1, 9, {"train.max_steps=null", "train.epochs=0.1"}), 0) << failure_;
  std::ifstream file(folder_.path() / "epochs/metrics.jsonl");
  double epoch = 0;
  for (std::string line; std::getline(file, line);) epoch = nlohmann::json::parse(line).at("epoch");
  EXPECT_GE(epoch, 0.1);
  EXPECT_LT(epoch, 0.1 + 1.5 / static_cast<double>(losses("epochs").size()));
}

TEST_F(TrainerRun, AStepThatIsNotFiniteEndsTheRunOrIsSkipped) {
  const std::vector<std::string> diverging = {"optimizer.learning_rate=1e30",
                                              "schedule.warmup_steps=0"};
  ASSERT_EQ(train("stop", 1, 6, diverging), 3);
  EXPECT_NE(failure_.find("faults.nan: skip"), std::string::npos) << failure_;
  std::vector<std::string> skipping = diverging;
  skipping.push_back("faults.nan=skip");
  ASSERT_EQ(train("skip", 1, 6, skipping), 0) << failure_;
  std::ifstream file(folder_.path() / "skip/metrics.jsonl");
  int rows = 0, skipped = 0;
  for (std::string line; std::getline(file, line); ++rows)
    skipped += nlohmann::json::parse(line).value("skipped", false) ? 1 : 0;
  EXPECT_EQ(rows, 6);
  EXPECT_GT(skipped, 0);
  EXPECT_LT(skipped, 6);
}

TEST_F(TrainerRun, SavedWeightsAloneStartARunButDoNotContinueOne) {
  const std::vector<std::string> weights = {"checkpoint.contents=weights"};
  ASSERT_EQ(train("run", 1, 3, weights), 0) << failure_;
  ASSERT_EQ(train("run", 1, 6, weights), 2);
  EXPECT_NE(failure_.find("model.from_checkpoint"), std::string::npos) << failure_;
  const std::string from = (folder_.path() / "run/checkpoints/step-000003").string();
  ASSERT_EQ(train("next", 1, 3, {"model.init=pretrained", "model.from_checkpoint=" + from}), 0)
      << failure_;
  EXPECT_LT(losses("next").at(1), losses("run").at(1));
}

TEST_F(TrainerRun, ABrokenSaveIsPassedOver) {
  ASSERT_EQ(train("run", 1, 6), 0) << failure_;
  fs::resize_file(folder_.path() / "run/checkpoints/step-000006/rank-00000.safetensors", 100);
  const std::map<int, double> before = losses("run");
  ASSERT_EQ(train("run", 1, 6), 0) << failure_;
  EXPECT_EQ(losses("run"), before);
  std::ifstream file(folder_.path() / "run/metrics.jsonl");
  int rows = 0;
  for (std::string line; std::getline(file, line);) ++rows;
  EXPECT_EQ(rows, 6 + 3);  // steps 4 to 6 once more
}

}  // namespace
}  // namespace tessera::test
