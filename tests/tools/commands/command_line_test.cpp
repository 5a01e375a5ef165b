// The commands as a user joins them: train, go on, verify, export, evaluate, generate, inspect and
// plan; with --json exactly one JSON object on stdout.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/support/temp_folder.h"
#include "tests/support/test_data.h"
#include "tests/tools/commands/program.h"
#include "tests/tools/commands/small_run.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// What `tessera arguments` prints on stdout: one line, one JSON object.
Json json_of(const std::string& arguments) {
  const Ended ended = stdout_of_tessera(arguments);
  EXPECT_EQ(ended.code, 0) << arguments << "\n" << run_tessera(arguments).output;
  EXPECT_EQ(ended.output.find('\n') + 1, ended.output.size()) << ended.output;
  const Json json = Json::parse(ended.output, nullptr, false);
  EXPECT_TRUE(json.is_object()) << ended.output;
  return json.is_object() ? json : Json::object();
}

class CommandLine : public ::testing::Test {
 protected:
  void SetUp() override {
    write_model_and_text(folder_);
    folder_.write("run.yaml", fmt::format(R"(
run: {{dir: {0}/run, device: cpu}}
model: {{path: {0}/model.json, init: random}}
train: {{sequence_length: 16, micro_batch_size: 1, global_batch_size: 4, max_steps: 6}}
optimizer: {{learning_rate: 1e-2}}
schedule: {{name: constant, warmup_steps: 0}}
data: {{train: [{0}/text.txt], tokenizer: bytes, cache_dir: {0}/cache}}
checkpoint: {{every_steps: 2}}
)",
                                          folder_.path().string()));
  }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  Ended train(const std::string& run, const std::string& more = "",
              Launcher launcher = Launcher::kThreads, int ranks = 2) const {
    return run_train(launcher, ranks,
                     fmt::format("{} --set run.dir={} {}", path("run.yaml"), path(run), more));
  }
  // The rows of the steps in metrics.jsonl.
  std::vector<Json> steps(const std::string& run) const {
    std::vector<Json> found;
    std::ifstream metrics(folder_ / (run + "/metrics.jsonl"));
    for (std::string line; std::getline(metrics, line);) {
      const Json row = Json::parse(line);
      if (row.at("kind") == "train") found.push_back(row);
    }
    return found;
  }
  // Their losses as text: equal text is equal bits.
  std::vector<std::string> losses(const std::string& run) const {
    std::vector<std::string> found;
    for (const Json& row : steps(run)) found.push_back(row.at("loss").dump());
    return found;
  }
  std::string weights(const std::string& run) const {
    return read_file(folder_ / (run + "/final/model.safetensors"));
  }

  TempFolder folder_;
};

TEST_F(CommandLine, EveryWayOfStartingRanksGivesTheSameBits) {
  for (const char* layout : {"parallel.tensor=2", "parallel.tensor=1", "parallel.zero=3"}) {
    SCOPED_TRACE(layout);
    const std::string more = fmt::format("--overwrite --set {}", layout);
    Ended ended = train("threads", more);
    ASSERT_EQ(ended.code, 0) << ended.output;
    ASSERT_EQ(losses("threads").size(), 6u);
    // Training has an effect, so equal losses say something.
    EXPECT_LT(std::stod(losses("threads").back()), std::stod(losses("threads").front()) - 0.1);
    ended = train("processes", more, Launcher::kProcesses);
    ASSERT_EQ(ended.code, 0) << ended.output;
    EXPECT_EQ(losses("processes"), losses("threads"));
    EXPECT_TRUE(weights("processes") == weights("threads"));
    if (!has_mpirun()) continue;
    ended = train("mpirun", more, Launcher::kMpirun);
    ASSERT_EQ(ended.code, 0) << ended.output;
    EXPECT_EQ(losses("mpirun"), losses("threads"));
    EXPECT_TRUE(weights("mpirun") == weights("threads"));
  }
}

TEST_F(CommandLine, ARunGoesOnUnderAnotherLauncherToTheSameBits) {
  ASSERT_EQ(train("whole").code, 0);
  for (const Launcher launcher : {Launcher::kThreads, Launcher::kProcesses, Launcher::kMpirun}) {
    if (launcher == Launcher::kMpirun && !has_mpirun()) continue;
    ASSERT_EQ(train("parts", "--overwrite --set train.max_steps=3").code, 0);
    EXPECT_EQ(losses("parts").size(), 3u);
    const Ended second = train("parts", "", launcher);
    ASSERT_EQ(second.code, 0) << second.output;
    EXPECT_EQ(losses("parts"), losses("whole"));
    EXPECT_TRUE(weights("parts") == weights("whole"));
    const Ended done = train("parts", "", launcher);
    EXPECT_EQ(done.code, 0) << done.output;
    EXPECT_EQ(losses("parts").size(), 6u);
  }
  // Another learning rate is another run, until the user says otherwise.
  const std::string change = "--set optimizer.betas=[0.8,0.9] --set train.max_steps=7";
  const Ended refused = train("whole", change);
  EXPECT_EQ(refused.code, 2) << refused.output;
  EXPECT_NE(refused.output.find("optimizer.betas"), std::string::npos) << refused.output;
  const Ended allowed = train("whole", change + " --allow-change optimizer.betas");
  EXPECT_EQ(allowed.code, 0) << allowed.output;
  EXPECT_EQ(train("whole", change + " --resume never").code, 2);
}

// Ten rows of different lengths in steps of four, so that an epoch ends with a step of two. What a
// step trains on depends on neither the ranks nor where the run was taken up.
TEST_F(CommandLine, RowsAndTheirOrderOutliveAChangeOfDataParallelSize) {
  std::string text;
  for (int i = 0; i < 10; ++i) {
    text += fmt::format("{{\"text\": \"{}\"}}\n",
                        std::string(static_cast<std::size_t>(3 + i), static_cast<char>('a' + i)));
  }
  folder_.write("ten.jsonl", text);
  const std::string rows =
      fmt::format("--set 'data.train=[{}]' --set data.packing=false", path("ten.jsonl"));
  const auto until = [&](int step) { return fmt::format("{} --set train.max_steps={}", rows, step); };
  ASSERT_EQ(train("whole", until(9), Launcher::kThreads, 1).code, 0);
  ASSERT_EQ(train("parts", until(2), Launcher::kThreads, 1).code, 0);
  ASSERT_EQ(train("parts", until(5), Launcher::kProcesses, 4).code, 0);
  ASSERT_EQ(train("parts", until(7), Launcher::kThreads, 2).code, 0);
  ASSERT_EQ(train("parts", until(9), Launcher::kProcesses, 1).code, 0);
  const std::vector<Json> whole = steps("whole");
  const std::vector<Json> parts = steps("parts");
  ASSERT_EQ(whole.size(), 9u);
  ASSERT_EQ(parts.size(), 9u);
  for (std::size_t i = 0; i < 9; ++i) {
    EXPECT_EQ(parts[i].at("step"), whole[i].at("step"));
    EXPECT_EQ(parts[i].at("epoch"), whole[i].at("epoch"));
    EXPECT_EQ(parts[i].at("target_tokens"), whole[i].at("target_tokens"));
    EXPECT_EQ(parts[i].at("tokens_total"), whole[i].at("tokens_total"));
    const double loss = whole[i].at("loss");
    EXPECT_NEAR(parts[i].at("loss").get<double>(), loss, 1e-5 * loss) << "step " << i + 1;
  }
  // Round by round the ranks take the rows of the step in its order; -1 stands for none.
  const auto taken = [&](int ranks) {
    const Json data =
        json_of(fmt::format("inspect data {} {} --ranks --step 1-9 --json --set run.ranks={}",
                            path("run.yaml"), until(9), ranks));
    std::vector<std::vector<int>> order;
    for (const Json& step : data.at("steps")) {
      order.emplace_back();
      const Json& of_rank = step.at("ranks");
      for (std::size_t round = 0; round < of_rank.at(0).size(); ++round) {
        for (const Json& rounds : of_rank) {
          for (const int row : rounds.at(round)) {
            if (row >= 0) order.back().push_back(row);
          }
        }
      }
      EXPECT_EQ(Json(order.back()), step.at("rows"));
    }
    return order;
  };
  const auto alone = taken(1);
  ASSERT_EQ(alone.size(), 9u);
  for (const int ranks : {2, 4}) EXPECT_EQ(taken(ranks), alone) << ranks;
}

TEST_F(CommandLine, WhatWasTrainedCanBeVerifiedExportedEvaluatedAndAsked) {
  ASSERT_EQ(train("run").code, 0);
  EXPECT_EQ(run_tessera("verify " + path("run")).code, 0);
  const Json checkpoint = json_of(fmt::format("inspect checkpoint {} --json", path("run")));
  EXPECT_EQ(checkpoint.value("step", 0), 6);
  EXPECT_EQ(checkpoint.value("ranks", 0), 2);

  const Ended written = run_tessera(
      fmt::format("export --checkpoint {} --output {} --dtype fp32", path("run"), path("hf")));
  ASSERT_EQ(written.code, 0) << written.output;
  EXPECT_TRUE(read_file(folder_ / "hf/model.safetensors") == weights("run"));
  EXPECT_EQ(run_tessera("verify " + path("hf")).code, 0);
  const Json model = json_of(fmt::format("inspect model {} --json", path("hf")));
  // 264 * 32 tied, two blocks of 32*32*2 + 16*32*2 + 3*32*48 + 2*32, a last norm of 32.
  EXPECT_EQ(model.value("parameters", 0), 264 * 32 + 2 * (3072 + 4608 + 64) + 32);
  EXPECT_EQ(model.at("tensors").size(), 20u);
  EXPECT_NE(stdout_of_tessera("inspect model " + path("hf")).output.find("weights: 20 tensors in 1 file"),
            std::string::npos);
  // A configuration alone is a model, too.
  fs::create_directory(folder_ / "bare");
  fs::copy(folder_ / "hf/config.json", folder_ / "bare/config.json");
  const Ended bare = stdout_of_tessera("inspect model " + path("bare"));
  EXPECT_EQ(bare.code, 0);
  EXPECT_NE(bare.output.find("weights: none in this folder"), std::string::npos) << bare.output;

  const std::string eval = fmt::format(
      "eval --model {} --data {} --device cpu --sequence-length 16", path("hf"), path("text.txt"));
  const Json loss = json_of(eval + " --json");
  EXPECT_EQ(loss.value("target_tokens", 0), 4544);
  EXPECT_LT(loss.value("loss", 9.0), std::stod(losses("run").front()));
  EXPECT_NEAR(loss.value("perplexity", 0.0), std::exp(loss.value("loss", 0.0)), 1e-6);
  const Json by_two = json_of(eval + " --json --tensor 2 --data-parallel 2");
  EXPECT_NEAR(by_two.value("loss", 0.0), loss.value("loss", 9.0), 1e-6);
  EXPECT_EQ(by_two.value("target_tokens", 0), 4544);

  const std::string generate = fmt::format(
      "generate --model {} --prompt 'Line 1' --max-new-tokens 12 --ignore-eos --device cpu",
      path("hf"));
  const Json answer = json_of(generate + " --json");
  EXPECT_EQ(answer.at("prompt_ids"), Json({'L', 'i', 'n', 'e', ' ', '1'}));
  EXPECT_EQ(answer.at("ids").size(), 12u);
  EXPECT_EQ(json_of(generate + " --json --tensor 2").at("ids"), answer.at("ids"));
  EXPECT_NE(stdout_of_tessera(generate).output.find(answer.at("text").get<std::string>()),
            std::string::npos);
}

TEST_F(CommandLine, VerifySaysNoToDamage) {
  ASSERT_EQ(train("run").code, 0);
  for (const auto& entry :
       fs::recursive_directory_iterator(folder_ / "run/checkpoints/step-000006")) {
    if (entry.path().extension() != ".safetensors") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const char last = static_cast<char>(file.get());
    file.seekp(-1, std::ios::end);
    file.put(static_cast<char>(last ^ 1));
    break;
  }
  const Ended ended = run_tessera("verify " + path("run"));
  EXPECT_EQ(ended.code, 1) << ended.output;
  EXPECT_NE(ended.output.find("step-000006"), std::string::npos) << ended.output;
  EXPECT_EQ(run_tessera("verify " + path("nowhere")).code, 2);
}

TEST_F(CommandLine, PlansAndDataAreToldBeforeARun) {
  const Json plan =
      json_of(fmt::format("plan {} --gpu cpu --gpus-per-node 2 --json", path("run.yaml")));
  EXPECT_FALSE(plan.empty());
  const Json data = json_of(fmt::format("inspect data {} --json", path("run.yaml")));
  EXPECT_EQ(data.value("rows_per_epoch", 0), 284);
  EXPECT_EQ(data.value("steps_per_epoch", 0), 71);
  const Ended dry = train("dry", "--dry-run");
  EXPECT_EQ(dry.code, 0) << dry.output;
  EXPECT_FALSE(fs::exists(folder_ / "dry/metrics.jsonl"));
}

TEST_F(CommandLine, TheFileThatInitWritesIsAccepted) {
  const std::string init = fmt::format("init --model {} --data {} -o {}", path("model.json"),
                                       path("text.txt"), path("written.yaml"));
  ASSERT_EQ(run_tessera(init).code, 0);
  EXPECT_EQ(run_tessera(init).code, 2);  // it is there already
  const Ended ended = run_train(
      Launcher::kThreads, 1,
      fmt::format(
          "{} --dry-run --set run.dir={} --set model.init=random --set data.tokenizer=bytes "
          "--set train.epochs=null --set train.max_steps=1 --set train.sequence_length=16 "
          "--set train.global_batch_size=1 --set data.cache_dir={}",
          path("written.yaml"), path("fresh"), path("cache")));
  EXPECT_EQ(ended.code, 0) << ended.output;
}

TEST_F(CommandLine, MistakenCommandsEndWithTwoAndNothingOnStdout) {
  for (const std::string& arguments :
       {std::string(), std::string("nosuch"), std::string("train"), std::string("eval --json"),
        std::string("eval --labels sideways"), "generate --json --model " + path("nowhere"),
        "eval --json --model " + path("nowhere") + " --data " + path("text.txt"),
        "inspect model --json " + path("nowhere"), "plan --json " + path("nowhere.yaml"),
        "export --checkpoint " + path("nowhere") + " --output " + path("hf")}) {
    SCOPED_TRACE(arguments);
    const Ended out = stdout_of_tessera(arguments);
    EXPECT_EQ(out.code, 2);
    EXPECT_EQ(out.output, "");
    EXPECT_NE(run_tessera(arguments).output, "");
  }
}

TEST_F(CommandLine, AMistakeIsNamedInOneLine) {
  for (const auto& [arguments, wanted] : std::vector<std::pair<std::string, std::string>>{
           {"", "[tessera] no command is given; use train, plan"},
           {"trian x.yaml", "[tessera] trian is not a command; did you mean train?"},
           {"train", "[tessera train] config is required"},
           {"train --overwrit", "[tessera train] --overwrit is not an option; did you mean --overwrite?"},
           {"train a b", "[tessera train] b is one argument too many"},
           {"inspect modl x", "[tessera inspect] modl is not a command; did you mean model?"},
           {"eval --labels sideways", "[tessera eval] --labels: sideways"}}) {
    const Ended ended = run_tessera(arguments);
    EXPECT_EQ(ended.code, 2) << arguments;
    EXPECT_EQ(ended.output.find("error: " + wanted), 0u) << ended.output;
    EXPECT_EQ(ended.output.find('\n') + 1, ended.output.size()) << ended.output;
  }
  EXPECT_EQ(stdout_of_tessera("--version").output.find("tessera "), 0u);
  EXPECT_EQ(stdout_of_tessera("train --help").code, 0);
}

// The golden has labels that are shifted already: it is detected, whatever the ranks.
TEST_F(CommandLine, EvalOfRealWeightsIsTheGoldenUnderEveryLayout) {
  TESSERA_REQUIRE_DATA(reference_path, "golden/stories260K_reference.json");
  TESSERA_REQUIRE_DATA(model_path, "models/stories260K/hf");
  Json reference;
  std::ifstream(reference_path) >> reference;
  double wanted = 0;
  std::ofstream rows(folder_ / "rows.jsonl");
  for (const Json& entry : reference.at("cases")) {
    const std::string name = entry.at("name");
    if (name == "accumulate_4_docs_token_normalised") wanted = entry.at("loss_mean");
    if (name.rfind("single_doc_", 0) != 0) continue;
    rows << Json{{"input_ids", entry.at("input_ids")}, {"labels", entry.at("labels")}}.dump()
         << "\n";
  }
  rows.close();
  ASSERT_GT(wanted, 0);
  for (const int tensor : {1, 2, 4, 8}) {
    for (const int data : {1, 2}) {
      const Json got = json_of(
          fmt::format("eval --model {} --data {} --json --device cpu --compute fp32 --tensor {} "
                      "--data-parallel {}",
                      model_path.string(), path("rows.jsonl"), tensor, data));
      EXPECT_NEAR(got.value("loss", 0.0), wanted, 1e-5 * wanted) << tensor << " x " << data;
      EXPECT_EQ(got.value("target_tokens", 0), 990);
    }
  }
}

}  // namespace
}  // namespace tessera::test
