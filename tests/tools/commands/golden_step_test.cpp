// One step of `tessera train` on real pre-trained weights against the float64 golden, by every way
// of starting ranks: loss, gradient norms of all and of each tensor, and the weights after AdamW.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include <nlohmann/json.hpp>

#include "checkpoint/safetensors_folder.h"
#include "tests/support/temp_folder.h"
#include "tests/support/test_data.h"
#include "tests/tools/commands/program.h"

namespace tessera::test {
namespace {

using Json = nlohmann::json;

struct Layout {
  const char* name;
  int data;
  int tensor;
  bool sequence_parallel;
  int zero;
  const char* recompute;
};

constexpr Layout kLayouts[] = {
    {"one_rank", 1, 1, false, 0, "none"},
    {"tp2", 1, 2, false, 0, "selective"},
    {"tp2_sp", 1, 2, true, 0, "none"},
    {"tp4_sp_full", 1, 4, true, 0, "full"},
    {"tp8", 1, 8, false, 0, "none"},
    {"tp8_sp_selective", 1, 8, true, 0, "selective"},
    {"dp2", 2, 1, false, 0, "full"},
    {"dp2_zero1", 2, 1, false, 1, "none"},
    {"tp2_dp2_sp_zero1", 2, 2, true, 1, "full"},
    {"tp4_dp2_zero1", 2, 4, false, 1, "selective"},
};

const Json& find_case(const Json& reference, const std::string& name) {
  for (const Json& entry : reference.at("cases")) {
    if (entry.at("name") == name) return entry;
  }
  throw std::runtime_error("no case " + name);
}

class GoldenStep : public ::testing::TestWithParam<std::tuple<Launcher, Layout>> {};

TEST_P(GoldenStep, LossNormsAndUpdateAreTheGoldens) {
  TESSERA_REQUIRE_DATA(reference_path, "golden/stories260K_reference.json");
  TESSERA_REQUIRE_DATA(model_path, "models/stories260K/hf");
  const auto& [launcher, layout] = GetParam();
  if (launcher == Launcher::kMpirun && !has_mpirun()) GTEST_SKIP() << "there is no mpirun";
  Json reference;
  std::ifstream(reference_path) >> reference;
  const TempFolder folder;
  std::ofstream rows(folder / "rows.jsonl");
  for (int i = 0; i < 4; ++i) {
    const Json entry = find_case(reference, "single_doc_" + std::to_string(i));
    rows << Json{{"input_ids", entry.at("input_ids")}, {"labels", entry.at("labels")}}.dump()
         << "\n";
  }
  rows.close();
  const Json wanted = find_case(reference, "accumulate_4_docs_token_normalised");
  const Json update = find_case(reference, "one_adamw_step_on_accumulate_4_docs");
  folder.write(
      "run.yaml",
      fmt::format(R"(
run: {{dir: {0}/run}}
model: {{path: {1}}}
train: {{sequence_length: 256, micro_batch_size: 1, global_batch_size: 4, max_steps: 1}}
optimizer: {{learning_rate: {2}, betas: [{3}, {4}], eps: {5}, weight_decay: {6}, max_grad_norm: {7}}}
schedule: {{name: constant, warmup_steps: 0}}
precision: {{compute: fp32}}
parallel: {{tensor: {8}, sequence_parallel: {9}, zero: {10}}}
memory: {{recompute: {11}}}
data: {{train: [{{path: {0}/rows.jsonl, labels: shifted}}], packing: false, cache_dir: {0}/cache}}
log: {{per_layer: true}}
)",
                  folder.path().string(), model_path.string(), update.at("lr").get<double>(),
                  update.at("beta1").get<double>(), update.at("beta2").get<double>(),
                  update.at("eps").get<double>(), update.at("weight_decay_2d_only").get<double>(),
                  update.at("clip_grad_norm").get<double>(), layout.tensor,
                  layout.sequence_parallel, layout.zero, layout.recompute));
  const Ended ended =
      run_train(launcher, layout.data * layout.tensor, (folder / "run.yaml").string());
  ASSERT_EQ(ended.code, 0) << ended.output;

  Json row;
  std::ifstream(folder / "run/metrics.jsonl") >> row;
  const auto expect_close = [](double got, double target, const std::string& what) {
    EXPECT_NEAR(got, target, 1e-5 * std::fabs(target)) << what;
  };
  EXPECT_EQ(row.at("target_tokens"), wanted.at("tokens"));
  expect_close(row.at("loss"), wanted.at("loss_mean"), "loss");
  expect_close(row.at("grad_norm"), wanted.at("grad_norm"), "gradient norm");
  ASSERT_EQ(row.at("grad_norms").size(), wanted.at("grad_norm_per_tensor").size());
  for (const auto& [name, norm] : wanted.at("grad_norm_per_tensor").items()) {
    expect_close(row.at("grad_norms").at(name), norm, name);
  }
  const SafetensorsFolder weights(folder / "run/final");
  for (const auto& [name, sum] : update.at("weight_sum_after").items()) {
    const auto& entry = weights.get(name);
    std::vector<float> values(static_cast<std::size_t>(entry.tensor->bytes()) / sizeof(float));
    entry.file->read_elements(*entry.tensor, 0, static_cast<std::int64_t>(values.size()),
                              values.data());
    double total = 0;
    double magnitude = 0;
    for (const float v : values) {
      total += v;
      magnitude += std::fabs(v);
    }
    // The sum cancels: the error is relative to the sum of magnitudes.
    EXPECT_NEAR(total, sum.get<double>(), 1e-5 * magnitude) << name;
  }
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<Launcher, Layout>>& info) {
  constexpr const char* kNames[] = {"threads", "processes", "mpirun"};
  return fmt::format("{}_{}", kNames[static_cast<int>(std::get<0>(info.param))],
                     std::get<1>(info.param).name);
}

INSTANTIATE_TEST_SUITE_P(Launches, GoldenStep,
                         ::testing::Combine(::testing::Values(Launcher::kThreads,
                                                              Launcher::kProcesses,
                                                              Launcher::kMpirun),
                                            ::testing::ValuesIn(kLayouts)),
                         name_of);

}  // namespace
}  // namespace tessera::test
