// A rank of a real run fails, is killed or sleeps: how the run ends, by each launcher.
#include <gtest/gtest.h>

#include "tests/support/temp_folder.h"
#include "tests/tools/commands/program.h"
#include "tests/tools/commands/small_run.h"

namespace tessera::test {
namespace {

class Faults : public ::testing::TestWithParam<Launcher> {
 protected:
  void SetUp() override {
    if (GetParam() == Launcher::kMpirun && !has_mpirun()) GTEST_SKIP() << "there is no mpirun";
    write_model_and_text(folder_);
    folder_.write("run.yaml", fmt::format(R"(
run: {{dir: {0}/run}}
model: {{path: {0}/model.json, init: random}}
train: {{sequence_length: 16, micro_batch_size: 1, global_batch_size: 4, max_steps: 4}}
optimizer: {{learning_rate: 1e-3}}
schedule: {{name: constant, warmup_steps: 0}}
data: {{train: [{0}/text.txt], tokenizer: bytes, cache_dir: {0}/cache}}
)",
                                          folder_.path().string()));
  }
  // Two ranks of ZeRO 3, so that gathers are under way where a rank fails.
  Ended train(const std::string& fault, const std::string& more = "") const {
    setenv("TESSERA_FAULT", fault.c_str(), 1);
    const Ended ended = run_train(
        GetParam(), 2, (folder_ / "run.yaml").string() + " --overwrite --set parallel.zero=3 " + more);
    unsetenv("TESSERA_FAULT");
    return ended;
  }

  TempFolder folder_;
};

bool says(const Ended& ended, const std::string& text) { return ended.output.find(text) != std::string::npos; }

TEST_P(Faults, ThrowingRankEndsAll) {
  const Ended ended = train("throw@rank=1,step=2");
  EXPECT_EQ(ended.code, 3) << ended.output;
  EXPECT_TRUE(says(ended, "rank 1 fails in step 2")) << ended.output;
}

TEST_P(Faults, KilledRankEndsAll) {
  const Ended ended = train("kill@rank=1,step=2");
  // Threads share the process that is killed; mpirun ends with the signal's code.
  const int code = GetParam() == Launcher::kProcesses ? 4 : 137;
  EXPECT_EQ(ended.code, code) << ended.output;
  EXPECT_TRUE(GetParam() != Launcher::kProcesses || says(ended, "rank 1")) << ended.output;
}

TEST_P(Faults, SleepingRankIsNamed) {
  const Ended ended = train("sleep@rank=1,step=2", "--set faults.collective_timeout=2s");
  EXPECT_EQ(ended.code, 4) << ended.output;
  EXPECT_TRUE(says(ended, "for rank 1")) << ended.output;
}

TEST_P(Faults, RankThatIsNotThereIsRefused) {
  const Ended ended = train("kill@rank=2,step=2");
  EXPECT_EQ(ended.code, 2) << ended.output;
  EXPECT_TRUE(says(ended, "there are 2 ranks")) << ended.output;
}

INSTANTIATE_TEST_SUITE_P(Launchers, Faults,
                         testing::Values(Launcher::kThreads, Launcher::kProcesses, Launcher::kMpirun),
                         [](const auto& info) {
                           return std::string(info.param == Launcher::kThreads     ? "threads"
                                              : info.param == Launcher::kProcesses ? "processes"
                                                                                   : "mpirun");
                         });

}  // namespace
}  // namespace tessera::test
