// One step of `tessera train` on real pre-trained weights against the float64 golden, by every way
// of starting ranks: loss, gradient norms of all and of each tensor, the weights after AdamW;
// packed documents and masked prompts.
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
  int context = 1;

  int ranks() const { return data * tensor * context; }
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
    {"dp2_zero2", 2, 1, false, 2, "none"},
    {"dp2_zero3_full", 2, 1, false, 3, "full"},
    {"tp2_dp2_sp_zero2_selective", 2, 2, true, 2, "selective"},
    {"tp4_dp2_zero3", 2, 4, false, 3, "none"},
    {"cp2", 1, 1, false, 0, "none", 2},
    {"cp2_tp2_sp_zero3_full", 1, 2, true, 3, "full", 2},
};

const Json& find_case(const Json& reference, const std::string& name) {
  for (const Json& entry : reference.at("cases")) {
    if (entry.at("name") == name) return entry;
  }
  throw std::runtime_error("no case " + name);
}

void expect_close(double got, double wanted, const std::string& what) {
  EXPECT_NEAR(got, wanted, 1e-5 * std::fabs(wanted)) << what;
}

// One training step on rows of shifted labels.
class GoldenStep : public ::testing::TestWithParam<std::tuple<Launcher, Layout>> {
 protected:
  void SetUp() override {
    TESSERA_REQUIRE_DATA(reference_path, "golden/stories260K_reference.json");
    TESSERA_REQUIRE_DATA(model_path, "models/stories260K/hf");
    if (std::get<0>(GetParam()) == Launcher::kMpirun && !has_mpirun()) {
      GTEST_SKIP() << "there is no mpirun";
    }
    std::ifstream(reference_path) >> reference_;
    model_path_ = model_path.string();
  }

  Json golden(const std::string& name) const { return find_case(reference_, name); }

  // Tokens [begin, end) of a case as a row of data.
  static Json row_of(const Json& entry, std::size_t begin, std::size_t end) {
    const auto part = [&](const char* key) {
      const auto ids = entry.at(key).get<std::vector<int>>();
      return std::vector<int>(ids.begin() + static_cast<std::ptrdiff_t>(begin),
                              ids.begin() + static_cast<std::ptrdiff_t>(end));
    };
    return Json{{"input_ids", part("input_ids")}, {"labels", part("labels")}};
  }
  static Json row_of(const Json& entry) { return row_of(entry, 0, entry.at("input_ids").size()); }

  // Trains a step and returns its row of metrics.jsonl; null, with a failure, where the run failed.
  Json step(const std::vector<Json>& rows, int sequence_length, int global_batch, bool packing) {
    const auto& [launcher, layout] = GetParam();
    const Json update = golden("one_adamw_step_on_accumulate_4_docs");
    std::ofstream file(folder_ / "rows.jsonl");
    for (const Json& row : rows) file << row.dump() << "\n";
    file.close();
    folder_.write(
        "run.yaml",
        fmt::format(R"(
run: {{dir: {0}/run}}
model: {{path: {1}}}
train: {{sequence_length: {12}, micro_batch_size: 1, global_batch_size: {13}, max_steps: 1}}
optimizer: {{learning_rate: {2}, betas: [{3}, {4}], eps: {5}, weight_decay: {6}, max_grad_norm: {7}}}
schedule: {{name: constant, warmup_steps: 0}}
precision: {{compute: fp32}}
parallel: {{tensor: {8}, sequence_parallel: {9}, zero: {10}, context: {15}}}
memory: {{recompute: {11}}}
data: {{train: [{{path: {0}/rows.jsonl, labels: shifted}}], packing: {14}, cache_dir: {0}/cache}}
log: {{per_layer: true}}
)",
                    folder_.path().string(), model_path_, update.at("lr").get<double>(),
                    update.at("beta1").get<double>(), update.at("beta2").get<double>(),
                    update.at("eps").get<double>(), update.at("weight_decay_2d_only").get<double>(),
                    update.at("clip_grad_norm").get<double>(), layout.tensor,
                    layout.sequence_parallel, layout.zero, layout.recompute, sequence_length,
                    global_batch, packing, layout.context));
    const Ended ended = run_train(launcher, layout.ranks(), (folder_ / "run.yaml").string());
    EXPECT_EQ(ended.code, 0) << ended.output;
    Json row;
    if (ended.code == 0) std::ifstream(folder_ / "run/metrics.jsonl") >> row;
    return row;
  }

  static void expect_loss_and_norm(const Json& row, const Json& wanted) {
    ASSERT_FALSE(row.is_null());
    EXPECT_EQ(row.at("target_tokens"), wanted.at("tokens"));
    expect_close(row.at("loss"), wanted.at("loss_mean"), "loss");
    expect_close(row.at("grad_norm"), wanted.at("grad_norm"), "gradient norm");
  }

  Json reference_;
  std::string model_path_;
  TempFolder folder_;
};

TEST_P(GoldenStep, LossNormsAndUpdateAreTheGoldens) {
  std::vector<Json> rows;
  for (int i = 0; i < 4; ++i) rows.push_back(row_of(golden("single_doc_" + std::to_string(i))));
  const Json row = step(rows, 256, 4, false);
  const Json wanted = golden("accumulate_4_docs_token_normalised");
  expect_loss_and_norm(row, wanted);
  if (row.is_null()) return;
  ASSERT_EQ(row.at("grad_norms").size(), wanted.at("grad_norm_per_tensor").size());
  for (const auto& [name, norm] : wanted.at("grad_norm_per_tensor").items()) {
    expect_close(row.at("grad_norms").at(name), norm, name);
  }
  const SafetensorsFolder weights(folder_ / "run/final");
  const Json update = golden("one_adamw_step_on_accumulate_4_docs");
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
    // The sum cancels: the error is relative to the sum of magnitudes. At 1e-5 a step without
    // weight decay would pass; fp32 stays below 4e-7.
    EXPECT_NEAR(total, sum.get<double>(), 1e-6 * magnitude) << name;
  }
  // The loss of the new weights sees a tenth of the decay and a thousandth of the learning rate.
  const Ended after = stdout_of_tessera(
      fmt::format("eval --model {} --data {} --labels shifted --sequence-length 256 --json "
                  "--device cpu --compute fp32",
                  (folder_ / "run/final").string(), (folder_ / "rows.jsonl").string()));
  ASSERT_EQ(after.code, 0);
  const double loss_after = update.at("loss_mean_after");
  EXPECT_NEAR(Json::parse(after.output).at("loss").get<double>(), loss_after, 2e-6 * loss_after);
}

// One packed row on one data-parallel rank; where there are more, the others have none to add.
// Rows that share a step with padding, on a covering choice of the layouts.
class GoldenRows : public GoldenStep {};

TEST_P(GoldenRows, PackedDocumentsAreIsolated) {
  const Json wanted = golden("packed_3_docs_isolated");
  const auto positions = wanted.at("position_ids").get<std::vector<int>>();
  std::vector<Json> rows;
  std::size_t begin = 0;
  for (std::size_t end = 1; end <= positions.size(); ++end) {
    if (end < positions.size() && positions[end] != 0) continue;
    rows.push_back(row_of(wanted, begin, end));
    begin = end;
  }
  ASSERT_EQ(rows.size(), 3u);
  // A multiple of every tensor size: the row is filled up by two tokens.
  expect_loss_and_norm(step(rows, 736, std::get<1>(GetParam()).data, true), wanted);
}

TEST_P(GoldenRows, MaskedPromptAddsNothing) {
  const Json wanted = golden("prompt_masked_first_60");
  expect_loss_and_norm(step({row_of(wanted)}, 256, std::get<1>(GetParam()).data, false), wanted);
}

// Context-parallel ranks hold pieces of a row; what is printed is in the row's order.
TEST(Evaluation, TokenLossesAreInTheOrderOfTokens) {
  TESSERA_REQUIRE_DATA(reference_path, "golden/stories260K_reference.json");
  TESSERA_REQUIRE_DATA(model_path, "models/stories260K/hf");
  TempFolder folder;
  Json reference;
  std::ifstream(reference_path) >> reference;
  std::ofstream file(folder / "rows.jsonl");
  for (int i = 0; i < 4; ++i) {
    const Json entry = find_case(reference, "single_doc_" + std::to_string(i));
    file << Json{{"input_ids", entry.at("input_ids")}, {"labels", entry.at("labels")}}.dump() << "\n";
  }
  file.close();
  // 251 tokens in a row: no number of ranks divides them.
  const auto losses = [&](const std::string& options) {
    const Ended ended = stdout_of_tessera(
        fmt::format("eval --model {} --data {} --labels shifted --sequence-length 251 --json "
                    "--token-losses --device cpu --compute fp32 {}",
                    model_path.string(), (folder / "rows.jsonl").string(), options));
    EXPECT_EQ(ended.code, 0);
    return Json::parse(ended.output).at("token_losses").get<std::vector<double>>();
  };
  const std::vector<double> wanted = losses("");
  ASSERT_EQ(wanted.size(), 4u * 251);
  for (const char* options : {"--context 2 --micro-batch-size 2", "--context 3 --tensor 2"}) {
    const std::vector<double> got = losses(options);
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 5e-5) << options << i;
  }
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<Launcher, Layout>>& info) {
  constexpr const char* kNames[] = {"threads", "processes", "mpirun"};
  return fmt::format("{}_{}", kNames[static_cast<int>(std::get<0>(info.param))],
                     std::get<1>(info.param).name);
}

// Threads have every layout in tests/engine/train/golden_test.cpp, without the command around them.
INSTANTIATE_TEST_SUITE_P(Launches, GoldenStep,
                         ::testing::Combine(::testing::Values(Launcher::kProcesses,
                                                              Launcher::kMpirun),
                                            ::testing::ValuesIn(kLayouts)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Threads, GoldenStep,
                         ::testing::Combine(::testing::Values(Launcher::kThreads),
                                            ::testing::Values(kLayouts[0], kLayouts[8], kLayouts[14])),
                         name_of);
INSTANTIATE_TEST_SUITE_P(
    Launches, GoldenRows,
    ::testing::Combine(::testing::Values(Launcher::kProcesses, Launcher::kMpirun),
                       ::testing::Values(kLayouts[1], kLayouts[5], kLayouts[8], kLayouts[11],
                                         kLayouts[15])),
    name_of);

}  // namespace
}  // namespace tessera::test
