// `tessera diff` of runs that are equal, that differ from the start, and that part later.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/temp_folder.h"
#include "tests/tools/commands/program.h"
#include "tests/tools/commands/small_run.h"

namespace tessera::test {
namespace {

class Diff : public ::testing::Test {
 protected:
  void SetUp() override { write_model_and_text(folder_); }
  void train(const std::string& name, const std::string& arguments = "") {
    folder_.write("run.yaml",
                  fmt::format("run: {{device: cpu}}\n"
                              "model: {{path: {0}/model.json, init: random}}\n"
                              "train: {{sequence_length: 32, micro_batch_size: 1, global_batch_size: 2, max_steps: 6}}\n"
                              "optimizer: {{learning_rate: 1e-2}}\n"
                              "data: {{train: [{0}/text.txt], tokenizer: bytes, cache_dir: {0}/cache}}\n"
                              "checkpoint: {{every_steps: 3}}\n",
                              folder_.path().string()));
    const Ended ended = run_tessera(fmt::format("train {} --set run.dir={} {}", (folder_ / "run.yaml").string(),
                                                (folder_ / name).string(), arguments));
    ASSERT_EQ(ended.code, 0) << ended.output;
  }
  nlohmann::json diff(const std::string& a, const std::string& b, int code) {
    const Ended ended = stdout_of_tessera(fmt::format("diff {} {} --json", (folder_ / a).string(), (folder_ / b).string()));
    EXPECT_EQ(ended.code, code) << ended.output;
    return nlohmann::json::parse(ended.output, nullptr, false);
  }
  TempFolder folder_;
};

TEST_F(Diff, EqualRunsAreEqualHoweverTheyWereStarted) {
  train("a", "--set run.ranks=2 --set parallel.tensor=2");
  train("b", "--launch processes --set run.ranks=2 --set parallel.tensor=2 --set log.per_layer=true");
  const nlohmann::json json = diff("a", "b", 0);
  EXPECT_EQ(json.at("steps").at("common"), 6);
  EXPECT_EQ(json.at("train").size(), 0u);
  EXPECT_GT(json.at("checkpoint").at("tensors"), 30);
  EXPECT_EQ(json.at("checkpoint").at("step"), 6);
  std::string keys;
  for (const auto& key : json.at("config")) keys += key.at("key").get<std::string>() + ";";
  EXPECT_NE(keys.find("log.per_layer;"), std::string::npos) << keys;
  const Ended text = run_tessera(fmt::format("diff {} {}", (folder_ / "a").string(), (folder_ / "b").string()));
  EXPECT_EQ(text.code, 0);
  EXPECT_NE(text.output.find("the runs are equal"), std::string::npos) << text.output;
}

TEST_F(Diff, NamesTheStepAndTheTensorWhereRunsPart) {
  train("a");
  train("b", "--set train.max_steps=3");  // its learning rate falls sooner
  train("c", "--set train.seed=7");
  const nlohmann::json other = diff("a", "c", 1);
  EXPECT_EQ(other.at("train").at("loss").at("first_step"), 1);
  EXPECT_EQ(other.at("equal"), false);
  const nlohmann::json& tensors = other.at("checkpoint").at("different");
  ASSERT_GT(tensors.size(), 10u);
  // The order of the model, weights first.
  EXPECT_EQ(tensors[0].at("name"), "weight/model.embed_tokens.weight");
  for (const auto& tensor : tensors) {
    EXPECT_GT(tensor.at("elements").get<std::int64_t>(), 0);
    EXPECT_LE(tensor.at("elements").get<std::int64_t>(), tensor.at("of").get<std::int64_t>());
    EXPECT_GT(tensor.at("largest").get<double>(), 0);
  }
  // Steps that one run alone has are no difference by themselves, and the checkpoint compared is the common one.
  const nlohmann::json part = diff("a", "b", 1);
  EXPECT_EQ(part.at("train").at("learning_rate").at("first_step"), 2);
  EXPECT_EQ(part.at("train").at("loss").at("first_step"), 3);
  EXPECT_EQ(part.at("steps").at("common"), 3);
  EXPECT_EQ(part.at("steps").at("only_a"), 3);
  EXPECT_EQ(part.at("checkpoint").at("step"), 3);
}

TEST_F(Diff, RefusesWhatIsNoRun) {
  folder_.write("file", "x");
  const std::string folder = folder_.path().string();
  for (const auto& [a, text] : std::vector<std::pair<std::string, std::string>>{
           {folder + "/nothing", "is no run folder"}, {folder + "/file", "is no run folder"}, {folder, "holds no config.yaml"}}) {
    const Ended ended = run_tessera(fmt::format("diff {} {}", a, folder));
    EXPECT_EQ(ended.code, 2) << ended.output;
    EXPECT_NE(ended.output.find(text), std::string::npos) << ended.output;
  }
}

}  // namespace
}  // namespace tessera::test
