// What a run leaves behind: saves by the minute, the best evaluation's checkpoint, event files,
// norms.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include <nlohmann/json.hpp>

#include "checkpoint/crc32c.h"
#include "tests/support/temp_folder.h"
#include "tests/tools/commands/program.h"
#include "tests/tools/commands/small_run.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;

class RunOutputs : public ::testing::Test {
 protected:
  void SetUp() override {
    write_model_and_text(folder_);
    folder_.write("run.yaml", fmt::format(R"(
run: {{dir: {0}/run}}
model: {{path: {0}/model.json, init: random}}
train: {{sequence_length: 16, micro_batch_size: 1, global_batch_size: 4, max_steps: 6}}
optimizer: {{learning_rate: 1e-3}}
schedule: {{name: constant, warmup_steps: 0}}
data: {{train: [{0}/text.txt], eval: [{0}/text.txt], tokenizer: bytes, cache_dir: {0}/cache}}
eval: {{max_batches: 2}}
checkpoint: {{keep_last: 0}}
)",
                                          folder_.path().string()));
  }
  Ended train(const std::string& more, Launcher launcher = Launcher::kThreads,
              int ranks = 2) const {
    return run_train(launcher, ranks, (folder_ / "run.yaml").string() + " " + more);
  }
  bool has_save(int step) const {
    return fs::exists(folder_ / fmt::format("run/checkpoints/step-{:06}", step));
  }

  TempFolder folder_;
};

// Rank 0's clock decides; every rank saves behind the same step.
TEST_F(RunOutputs, SavesByTheMinuteAreAgreed) {
  for (const Launcher launcher : {Launcher::kThreads, Launcher::kProcesses}) {
    const Ended ended =
        train("--overwrite --set checkpoint.every_minutes=1e-9 --set parallel.tensor=2", launcher);
    ASSERT_EQ(ended.code, 0) << ended.output;
    for (const int step : {2, 4, 6}) EXPECT_TRUE(has_save(step)) << step << "\n" << ended.output;
    EXPECT_FALSE(has_save(1));
    EXPECT_FALSE(has_save(3));
  }
}

TEST_F(RunOutputs, TheBestEvaluationIsSavedAndKept) {
  const Ended ended = train(
      "--set eval.every_steps=1 --set eval.keep_best=true --set checkpoint.keep_last=1 "
      "--set train.max_steps=4");
  ASSERT_EQ(ended.code, 0) << ended.output;
  int best = 0;
  double lowest = 1e9;
  std::ifstream metrics(folder_ / "run/metrics.jsonl");
  for (std::string line; std::getline(metrics, line);) {
    const auto row = nlohmann::json::parse(line);
    if (row.at("kind") != "eval" || row.at("loss").get<double>() >= lowest) continue;
    lowest = row.at("loss");
    best = row.at("step");
  }
  EXPECT_GT(best, 0);
  EXPECT_TRUE(has_save(best)) << best << "\n" << ended.output;
  EXPECT_TRUE(has_save(4));
}

TEST_F(RunOutputs, EventFilesHoldWholeRecordsWithTheirChecksums) {
  ASSERT_EQ(train("--set log.per_layer=true").code, 0);
  std::string bytes;
  for (const auto& entry : fs::directory_iterator(folder_ / "run/tensorboard"))
    bytes += read_file(entry.path());
  const auto masked = [](const char* data, std::size_t size) {
    const std::uint32_t crc = crc32c(data, size);
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
  };
  std::size_t at = 0;
  int records = 0;
  while (at < bytes.size()) {
    std::uint64_t length = 0;
    std::uint32_t crc = 0;
    ASSERT_LE(at + 12, bytes.size());
    std::memcpy(&length, &bytes[at], 8);
    std::memcpy(&crc, &bytes[at + 8], 4);
    ASSERT_EQ(crc, masked(&bytes[at], 8));
    ASSERT_LE(at + 16 + length, bytes.size());
    std::memcpy(&crc, &bytes[at + 12 + length], 4);
    ASSERT_EQ(crc, masked(&bytes[at + 12], length));
    at += 16 + length;
    ++records;
  }
  EXPECT_EQ(records, 1 + 6 + 1);  // version, steps, evaluation at the end
  for (const char* tag : {"brain.Event:2", "train/loss", "train/grad_norm", "train/learning_rate",
                          "train/tokens_per_second", "eval/loss", "grad_norm/model.norm.weight"}) {
    EXPECT_NE(bytes.find(tag), std::string::npos) << tag;
  }
  fs::remove_all(folder_ / "run");
  ASSERT_EQ(train("--set log.tensorboard=false").code, 0);
  EXPECT_FALSE(fs::exists(folder_ / "run/tensorboard"));
}

// The squares of the parameters' norms add up to that of all, under every way of cutting them.
TEST_F(RunOutputs, NormsOfParametersMakeUpTheWhole) {
  for (const char* layout :
       {"--set parallel.tensor=2", "--set parallel.pipeline=2", "--set parallel.zero=3"}) {
    const Ended ended = train(
        fmt::format("--overwrite --set log.per_layer=true --set train.max_steps=1 {}", layout));
    ASSERT_EQ(ended.code, 0) << ended.output;
    std::ifstream metrics(folder_ / "run/metrics.jsonl");
    std::string line;
    std::getline(metrics, line);
    const auto row = nlohmann::json::parse(line);
    double sum = 0;
    for (const auto& [name, norm] : row.at("grad_norms").items())
      sum += norm.get<double>() * norm.get<double>();
    const double whole = row.at("grad_norm");
    EXPECT_NEAR(std::sqrt(sum), whole, 1e-5 * whole) << layout;
  }
}

}  // namespace
}  // namespace tessera::test
