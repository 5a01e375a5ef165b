// A request to stop comes when it likes: before the first step, in an evaluation, in a save, twice. The run saves at the
// next step edge, ends with 75, leaves checkpoints that are whole, and the same command goes on to the end.
#include <gtest/gtest.h>

#include <fstream>

#include "tests/support/temp_folder.h"
#include "tests/tools/commands/program.h"
#include "tests/tools/commands/small_run.h"

namespace tessera::test {
namespace {

struct Case {
  const char* name;
  const char* launch;    // options of the run
  const char* settings;  // more of them
  const char* moment;    // a shell condition that is waited for before the signal; $run is the run folder
  const char* signals;   // what is sent to $pid, as shell commands
};

class Stop : public ::testing::TestWithParam<Case> {};

TEST_P(Stop, SavesAndGoesOn) {
  const Case& c = GetParam();
  TempFolder folder;
  write_model_and_text(folder);
  folder.write("run.yaml",
               fmt::format("run: {{device: cpu, dir: {0}/run}}\n"
                           "model: {{path: {0}/model.json, init: random}}\n"
                           "train: {{sequence_length: 32, micro_batch_size: 2, global_batch_size: 4, max_steps: 100000}}\n"
                           "optimizer: {{learning_rate: 1e-3}}\n"
                           "schedule: {{name: constant}}\n"
                           "data: {{train: [{0}/text.txt], tokenizer: bytes, cache_dir: {0}/cache}}\n",
                           folder.path().string()));
  // The program in the background, the signals at the moment, its code as the last line.
  const std::string script = fmt::format(
      "run={0}/run; timeout -k 1 60 '{1}' train {0}/run.yaml {2} {3} > {0}/out.txt 2>&1 & "
      "outer=$!; pid=; for i in $(seq 200); do pid=$(pgrep -P $outer) && break; sleep 0.02; done; "
      "for i in $(seq 1500); do {4} && break; sleep 0.02; done; {5}; wait $outer; echo $?",
      folder.path().string(), TESSERA_PROGRAM, c.launch, c.settings, c.moment, c.signals);
  const std::string command = fmt::format("sh -c '{}' 2>&1", [&] {
    std::string quoted;
    for (const char letter : script) quoted += letter == '\'' ? std::string("'\\''") : std::string(1, letter);
    return quoted;
  }());
  std::string output;
  std::FILE* pipe = popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  char part[512];
  while (std::fgets(part, sizeof part, pipe) != nullptr) output += part;
  pclose(pipe);
  std::ifstream log(folder / "out.txt");
  const std::string text{std::istreambuf_iterator<char>(log), {}};
  EXPECT_EQ(output, "75\n") << text;
  EXPECT_NE(text.find("stopped after step"), std::string::npos) << text;
  // On from there, for two steps more. Before the first step there is nothing to save: a start makes the same again.
  const std::size_t at = text.find("stopped after step ") + std::string("stopped after step ").size();
  const int step = std::atoi(text.c_str() + at);
  if (step > 0) {
    const Ended whole = run_tessera("verify " + (folder / "run").string());
    EXPECT_EQ(whole.code, 0) << whole.output;
  }
  const Ended more = run_tessera(fmt::format("train {} {} {} --set train.max_steps={}", (folder / "run.yaml").string(),
                                             c.launch, c.settings, step + 2));
  EXPECT_EQ(more.code, 0) << more.output;
  EXPECT_EQ(more.output.find(fmt::format("at step {}", step)) != std::string::npos, step > 0) << more.output;
}

constexpr const char* kTwoRanks = "--set run.ranks=2 --set parallel.tensor=2";
constexpr const char* kProcesses = "--launch processes --set run.ranks=2 --set parallel.zero=1";
// Evaluations that last far longer than the steps between them.
constexpr const char* kEvaluates = "--set data.eval_fraction=0.3 --set eval.every_steps=1";
constexpr const char* kSaves = "--set checkpoint.every_steps=1 --set checkpoint.keep_last=3";
INSTANTIATE_TEST_SUITE_P(
    Moments, Stop,
    ::testing::Values(
        Case{"at_once", kTwoRanks, "", "test -s $run/config.yaml", "kill -TERM $pid"},
        Case{"in_an_evaluation", kTwoRanks, kEvaluates, "grep -q eval $run/metrics.jsonl 2>/dev/null", "kill -USR1 $pid"},
        Case{"in_a_save", kProcesses, kSaves, "test -e $run/checkpoints/latest", "kill -TERM $pid"},
        Case{"twice", kProcesses, kSaves, "test -e $run/checkpoints/latest",
             "kill -TERM $pid; sleep 0.05; kill -TERM $pid 2>/dev/null; sleep 0.1; kill -USR1 $pid 2>/dev/null"}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::test
