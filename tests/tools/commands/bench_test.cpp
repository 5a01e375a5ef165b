// `tessera bench` as a user runs it on CPU ranks.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/temp_folder.h"
#include "tests/tools/commands/program.h"
#include "tests/tools/commands/small_run.h"

namespace tessera::test {
namespace {

TEST(BenchStep, MeasuresARunsStepsInBothModesWithoutLeavingAnything) {
  TempFolder folder;
  write_model_and_text(folder);
  folder.write("run.yaml", fmt::format("run: {{device: cpu, ranks: 2, dir: {0}/run}}\n"
                                       "model: {{path: {0}/model.json, init: random}}\n"
                                       "train: {{sequence_length: 32, micro_batch_size: 2, "
                                       "gradient_accumulation_steps: 3, max_steps: 5}}\n"
                                       "optimizer: {{learning_rate: 1e-3}}\n"
                                       "schedule: {{warmup_steps: 4}}\n"
                                       "parallel: {{tensor: 2}}\n",
                                       folder.path().string()));
  const Ended ended =
      stdout_of_tessera("bench step " + (folder / "run.yaml").string() +
                        " --steps 4 --warmup 1 --trace-steps 1 --soak-seconds 0.05 --both-modes --json");
  ASSERT_EQ(ended.code, 0) << ended.output;
  const nlohmann::json json = nlohmann::json::parse(ended.output);
  EXPECT_EQ(json.at("ranks"), 2);
  EXPECT_EQ(json.at("tokens_per_step"), 32 * 2 * 3);
  EXPECT_EQ(json.at("fp8_gemm_share"), 0);
  ASSERT_EQ(json.at("modes").size(), 2u);
  for (const nlohmann::json& mode : json.at("modes")) {
    const double seconds = mode.at("step_seconds");
    EXPECT_NEAR(mode.at("tokens_per_second").get<double>(), 192 / seconds, 1e-6 * 192 / seconds);
    EXPECT_LE(mode.at("fastest_seconds"), seconds);
    EXPECT_GE(mode.at("slowest_seconds"), seconds);
    EXPECT_EQ(mode.at("skipped_steps"), 0);
    EXPECT_GT(mode.at("planned_bytes"), 0);
    EXPECT_EQ(mode.at("planned_bytes"), mode.at("used_bytes"));
    EXPECT_NEAR(mode.at("share_of_bound").get<double>(), json.at("bound_seconds").get<double>() / seconds, 1e-9);
    EXPECT_FALSE(mode.at("trace_problem").get<std::string>().empty());
  }
  EXPECT_NE(json.at("modes")[0].at("reproducible"), json.at("modes")[1].at("reproducible"));
  EXPECT_FALSE(std::filesystem::exists(folder / "run"));
}

TEST(BenchStep, RefusesWhatIsNoWork) {
  const Ended nothing = run_tessera("bench step 2b");
  EXPECT_EQ(nothing.code, 2);
  EXPECT_NE(nothing.output.find("[bench] 2b is neither 1b nor 8b nor a configuration file"), std::string::npos)
      << nothing.output;
  EXPECT_EQ(run_tessera("bench step 1b --steps 0").code, 2);
  EXPECT_EQ(run_tessera("bench step").code, 2);
  EXPECT_EQ(run_tessera("bench").code, 2);
}

TEST(BenchCollectives, TimesEveryOperationAndCountsTheBus) {
  for (const char* launch : {"threads", "processes"}) {
    const Ended ended = stdout_of_tessera(fmt::format(
        "bench collectives --device cpu --ranks 3 --from 3KiB --to 60KiB --json --launch {}", launch));
    ASSERT_EQ(ended.code, 0) << launch << ended.output;
    const nlohmann::json json = nlohmann::json::parse(ended.output);
    EXPECT_EQ(json.at("ranks"), 3);
    ASSERT_EQ(json.at("results").size(), 5u * 3);  // 3, 12 and 48 KiB
    for (const nlohmann::json& result : json.at("results")) {
      const std::string op = result.at("op");
      const double factor = op == "all_reduce" ? 4.0 / 3 : op == "send_recv" ? 1.0 : 2.0 / 3;
      const double wanted = factor * result.at("bytes").get<double>() / result.at("seconds").get<double>();
      EXPECT_NEAR(result.at("bus_bytes_per_second").get<double>(), wanted, 1e-6 * wanted) << op;
      EXPECT_EQ(result.at("bytes").get<int>() % (3 * 1024), 0) << op;
    }
  }
}

TEST(BenchCollectives, RefusesSizesAndRanksThatMeasureNothing) {
  EXPECT_EQ(run_tessera("bench collectives --device cpu --ranks 1").code, 2);
  EXPECT_EQ(run_tessera("bench collectives --device cpu --from 1MiB --to 1KiB").code, 2);
  const Ended text = run_tessera("bench collectives --device cpu --from many");
  EXPECT_EQ(text.code, 2);
  EXPECT_NE(text.output.find("--from is many, expected a size such as 1MiB"), std::string::npos) << text.output;
}

}  // namespace
}  // namespace tessera::test
