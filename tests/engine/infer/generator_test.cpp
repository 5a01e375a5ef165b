// Generation through the KV cache: an independent float64 program's greedy text, tensor parallelism, prompts
// longer than one prefill, and the rules of sampling.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>

#include <nlohmann/json.hpp>

#include "engine/infer/generator.h"
#include "models/hf/config_io.h"
#include "models/weights.h"
#include "tests/support/test_data.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

class StoriesGenerator : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    TESSERA_REQUIRE_DATA(model, "models/stories260K/hf");
    model_ = model;
    config_ = load_hf_config(model).model;
    folder_ = std::make_unique<SafetensorsFolder>(model);
    names_ = match_hf_tensors(config_, *folder_);
  }

  std::vector<std::int32_t> generate(const std::vector<std::int32_t>& prompt, std::int64_t count,
                                     int tensor) const {
    std::vector<std::int32_t> result;
    std::mutex mutex;
    auto communicators = make_thread_communicators(tensor, 60);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < tensor; ++rank) {
      threads.emplace_back([&, rank] {
        const auto context = make_context(Device{});
        MeshShape shape;
        shape.tensor = tensor;
        const ProcessMesh mesh(std::move(communicators[static_cast<std::size_t>(rank)]), shape);
        GeneratorOptions options;
        options.max_length = static_cast<std::int64_t>(prompt.size()) + count;
        options.compute = DType::kF32;
        Generator generator(*context, mesh, config_, options);
        load_weights(generator.runtime(), *folder_, names_);
        const auto tokens = generator.generate(prompt, count, {}, SamplingOptions{});
        const std::lock_guard lock(mutex);
        if (rank == 0) result = tokens;
      });
    }
    for (std::thread& thread : threads) thread.join();
    return result;
  }

  std::filesystem::path model_;
  ModelConfig config_;
  std::unique_ptr<SafetensorsFolder> folder_;
  HfNameMap names_;
};

TEST_P(StoriesGenerator, GreedyTextEqualsTheFloat64Program) {
  Json golden;
  std::ifstream(std::string(TESSERA_SOURCE_DIR) + "/tests/engine/infer/golden_greedy_stories260K.json") >> golden;
  std::size_t checked = 0;
  for (const Json& entry : golden.at("cases")) {
    const auto prompt = entry.at("prompt_ids").get<std::vector<std::int32_t>>();
    const auto wanted = entry.at("generated_ids").get<std::vector<std::int32_t>>();
    ASSERT_GE(wanted.size(), 200u);
    EXPECT_EQ(generate(prompt, static_cast<std::int64_t>(wanted.size()), GetParam()), wanted);
    ++checked;
  }
  EXPECT_GE(checked, 1u);
}

INSTANTIATE_TEST_SUITE_P(Tensor, StoriesGenerator, ::testing::Values(1, 2),
                         [](const auto& info) { return "tp" + std::to_string(info.param); });

TEST(Sampling, GreedyTakesTheLargestAndTheFirstAmongEquals) {
  const std::vector<float> logits = {1.0f, 3.0f, 2.0f, 3.0f};
  EXPECT_EQ(sample_token(logits, SamplingOptions{}, 0), 1);
}

TEST(Sampling, FrequenciesFollowTheSoftmax) {
  const std::vector<float> logits = {0.0f, std::log(2.0f), std::log(5.0f)};  // probabilities 1/8, 2/8, 5/8
  SamplingOptions options;
  options.temperature = 1.0;
  std::map<std::int32_t, int> counts;
  constexpr int kDraws = 8000;
  for (int i = 0; i < kDraws; ++i) ++counts[sample_token(logits, options, static_cast<std::uint64_t>(i))];
  // Five standard deviations of a binomial.
  for (const auto& [token, p] : {std::pair{0, 0.125}, {1, 0.25}, {2, 0.625}}) {
    EXPECT_NEAR(counts[token], kDraws * p, 5 * std::sqrt(kDraws * p * (1 - p))) << token;
  }
}

TEST(Sampling, TopKAndTopPKeepTheMostLikely) {
  const std::vector<float> logits = {0.0f, std::log(2.0f), std::log(5.0f)};
  SamplingOptions options;
  options.temperature = 1.0;
  options.top_k = 1;
  for (std::uint64_t i = 0; i < 100; ++i) EXPECT_EQ(sample_token(logits, options, i), 2);
  options.top_k = 0;
  options.top_p = 0.7;
  for (std::uint64_t i = 0; i < 200; ++i) EXPECT_NE(sample_token(logits, options, i), 0);
}

TEST(Sampling, RefusesValuesOutOfRange) {
  SamplingOptions options;
  options.top_p = 0;
  EXPECT_THROW(validate(options), Error);
  options = {};
  options.temperature = -1;
  EXPECT_THROW(validate(options), Error);
  EXPECT_THROW(sample_token(std::vector<float>{NAN, 1.0f}, SamplingOptions{}, 0), Error);
}

}  // namespace
}  // namespace tessera
