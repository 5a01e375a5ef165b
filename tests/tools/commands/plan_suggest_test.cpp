// `tessera plan --suggest` as a user runs it: what it suggests is possible, fits, and is what `tessera plan` says.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/temp_folder.h"
#include "tests/tools/commands/program.h"

namespace tessera::test {
namespace {

struct Model {
  const char* name;
  int hidden, ffn, layers, heads;
};
constexpr Model k70B{"70b", 8192, 28672, 80, 64};
constexpr Model k405B{"405b", 16384, 53248, 126, 128};

class PlanSuggest : public ::testing::Test {
 protected:
  std::string config_of(const Model& model) {
    folder_.write("model.json",
                  fmt::format(R"({{"architectures": ["LlamaForCausalLM"], "model_type": "llama",
      "vocab_size": 128256, "hidden_size": {}, "intermediate_size": {}, "num_hidden_layers": {},
      "num_attention_heads": {}, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-05,
      "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": false,
      "hidden_act": "silu", "torch_dtype": "bfloat16"}})",
                              model.hidden, model.ffn, model.layers, model.heads));
    folder_.write("run.yaml",
                  fmt::format("model: {{path: {0}/model.json, init: random}}\n"
                              "train: {{sequence_length: 8192, micro_batch_size: 1, global_batch_size: 512, "
                              "max_steps: 10}}\n"
                              "optimizer: {{learning_rate: 1e-4}}\n"
                              "data: {{train: [\"synthetic:4x8192\"], tokenizer: bytes}}\n",
                              folder_.path().string()));
    return (folder_ / "run.yaml").string();
  }
  TempFolder folder_;
};

TEST_F(PlanSuggest, SuggestionsFitAsThePlanSays) {
  for (const auto& [model, nodes, fits] : std::vector<std::tuple<Model, int, bool>>{
           {k70B, 1, false}, {k70B, 8, true}, {k70B, 64, true}, {k405B, 1, false}, {k405B, 64, true}}) {
    const std::string where = fmt::format("{} on {} nodes", model.name, nodes);
    const std::string plan = fmt::format("plan {} --gpu h200-sxm --nodes {} --json", config_of(model), nodes);
    const Ended ended = stdout_of_tessera(plan + " --suggest");
    ASSERT_EQ(ended.code, fits ? 0 : 1) << where << ended.output;
    const nlohmann::json json = nlohmann::json::parse(ended.output);
    ASSERT_EQ(json.at("suggestions").size(), fits ? 3u : 0u) << where;
    if (!fits) {
      EXPECT_GT(json.at("smallest").at("memory"), std::int64_t{139} << 30) << where;
      continue;
    }
    double last = 1e30;
    for (const nlohmann::json& layout : json.at("suggestions")) {
      EXPECT_EQ(layout.at("data").get<int>() * layout.at("tensor").get<int>() * layout.at("pipeline").get<int>() *
                    layout.at("context").get<int>(),
                8 * nodes)
          << where;
      EXPECT_LE(layout.at("memory"), std::int64_t{139} << 30) << where;
      const double rate = layout.at("tokens_per_second_per_gpu");
      EXPECT_LE(rate, last) << where;
      last = rate;
      // No faster than the products of the model alone would be.
      const double flops = 6.0 * model.layers * (4.0 * model.hidden * model.hidden / 2 + 3.0 * model.hidden * model.ffn);
      EXPECT_LT(rate, 670e12 / flops * 1.05) << where;
      EXPECT_GT(rate, 0.2 * 670e12 / flops) << where;
    }
    // The first, planned by itself.
    std::string flags;
    for (const nlohmann::json& set : json.at("suggestions")[0].at("set")) {
      flags += " --set " + set.get<std::string>();
    }
    const Ended planned = stdout_of_tessera(plan + flags);
    ASSERT_EQ(planned.code, 0) << where << planned.output;
    EXPECT_EQ(nlohmann::json::parse(planned.output).at("memory").at("total"),
              json.at("suggestions")[0].at("memory"))
        << where;
  }
}

TEST_F(PlanSuggest, SaysWhatIsMissingAndRefusesWhatIsUnknown) {
  const std::string config = config_of(k70B);
  const Ended none = run_tessera("plan " + config + " --gpu h100-sxm --suggest");
  EXPECT_EQ(none.code, 1);
  EXPECT_NE(none.output.find("none fits: the smallest, tensor 8"), std::string::npos) << none.output;
  const Ended cpu = run_tessera("plan " + config + " --gpu cpu --suggest");
  EXPECT_EQ(cpu.code, 2);
  EXPECT_NE(cpu.output.find("--suggest needs a GPU whose rates are known"), std::string::npos) << cpu.output;
  const Ended odd = run_tessera("plan " + config + " --nodes 8 --suggest --set train.global_batch_size=509");
  EXPECT_EQ(odd.code, 2) << odd.output;
}

}  // namespace
}  // namespace tessera::test
