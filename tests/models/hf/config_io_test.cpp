#include "models/hf/config_io.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/core/error.h"
#include "models/hf/names.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"
#include "tests/support/test_data.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;
using Ids = std::vector<std::int64_t>;
using Parts = std::initializer_list<std::string_view>;
using test::expect_error;

// JSON with ' for ", so that cases stay readable.
Json json(std::string text) {
  std::replace(text.begin(), text.end(), '\'', '"');
  return Json::parse(text);
}

// A small model; `changes` replaces or adds keys.
Json small(const std::string& changes = "{}") {
  Json config = json(R"({'model_type': 'llama', 'vocab_size': 97, 'hidden_size': 96,
      'intermediate_size': 64, 'num_hidden_layers': 4, 'num_attention_heads': 6,
      'num_key_value_heads': 2, 'head_dim': 24, 'max_position_embeddings': 64,
      'rope_theta': 10000.0, 'rms_norm_eps': 1e-5, 'tie_word_embeddings': false,
      'sliding_window': null, 'torch_dtype': 'float32', 'bos_token_id': 1, 'eos_token_id': 2})");
  config.update(json(changes));
  return config;
}

Json small_of(const std::string& type, const std::string& changes = "{}") {
  Json config = small(changes);
  config["model_type"] = type;
  return config;
}

Json without(Json config, const std::string& key) {
  config.erase(key);
  return config;
}

HfConfig parse(const Json& config) { return parse_hf_config(config.dump(), "", "c.json"); }
ModelConfig model_of(const Json& config) { return parse(config).model; }

void refuse(const Json& config, Parts parts) {
  expect_error(ErrorKind::kUser, parts, [&] { parse(config); });
}

// The only warning of `config` holds `part`.
void expect_warning(const Json& config, const std::string& part) {
  const std::vector<std::string> warnings = parse(config).warnings;
  ASSERT_EQ(warnings.size(), 1u) << config;
  EXPECT_NE(warnings[0].find(part), std::string::npos) << warnings[0];
}

// --- real files --------------------------------------------------------------------------------

struct RealConfig {
  const char* folder;
  Architecture architecture;
  std::int64_t head_dim;
  std::int64_t kv_heads;
  bool tied;
  RopeKind rope;
  double theta;
  std::int64_t max_positions;
  std::int64_t parameters;  // as published for the model
};

void PrintTo(const RealConfig& config, std::ostream* out) { *out << config.folder; }

class HfConfigReal : public testing::TestWithParam<RealConfig> {};

TEST_P(HfConfigReal, IsUnderstoodWithoutAWarning) {
  const RealConfig& wanted = GetParam();
  TESSERA_REQUIRE_DATA(path, std::string(wanted.folder));
  const HfConfig config = load_hf_config(path);
  const ModelConfig& model = config.model;
  EXPECT_EQ(model.architecture, wanted.architecture);
  EXPECT_EQ(model.head_dim, wanted.head_dim);
  EXPECT_EQ(model.num_key_value_heads, wanted.kv_heads);
  EXPECT_EQ(model.tie_word_embeddings, wanted.tied);
  EXPECT_EQ(model.rope.kind, wanted.rope);
  EXPECT_EQ(model.rope.theta, wanted.theta);
  EXPECT_EQ(model.max_position_embeddings, wanted.max_positions);
  EXPECT_EQ(parameter_count(model), wanted.parameters);
  EXPECT_FALSE(model.has_sliding_window());
  EXPECT_EQ(model.attention_qkv_bias, wanted.architecture == Architecture::kQwen2);
  EXPECT_FALSE(model.attention_o_bias);
  EXPECT_EQ(model.qk_norm, wanted.architecture == Architecture::kQwen3);
  for (const std::string& warning : config.warnings) ADD_FAILURE() << warning;
}

// Exporting an untouched model keeps every key and value of its file.
TEST_P(HfConfigReal, SurvivesAnExport) {
  TESSERA_REQUIRE_DATA(path, std::string(GetParam().folder));
  const HfConfig config = load_hf_config(path);
  const Json before = Json::parse(config.config_text);
  const Json after = Json::parse(format_hf_config(config.model, config.config_text));
  for (const auto& [key, value] : before.items()) {
    ASSERT_TRUE(after.contains(key)) << key;
    EXPECT_EQ(after[key], value) << key;
  }
  // A file written anew says the same.
  const std::string fresh = format_hf_config(config.model);
  EXPECT_EQ(parse_hf_config(fresh, "", "fresh").model, config.model);
}

constexpr auto kLlama = Architecture::kLlama;
constexpr auto kMistral = Architecture::kMistral;
constexpr auto kQwen2 = Architecture::kQwen2;
constexpr auto kQwen3 = Architecture::kQwen3;
constexpr auto kPlain = RopeKind::kDefault;
constexpr auto kRope3 = RopeKind::kLlama3;

// clang-format off: a table
constexpr RealConfig kRealConfigs[] = {
    {"configs/Llama-2-7b-hf", kLlama, 128, 32, false, kPlain, 1e4, 4096, 6738415616},
    {"configs/Llama-2-1.3b-hf-sharded", kLlama, 128, 16, false, kPlain, 1e4, 4096, 1345423360},
    {"configs/Meta-Llama-3-8B", kLlama, 128, 8, false, kPlain, 5e5, 8192, 8030261248},
    {"configs/Llama-3.1-8B-Instruct", kLlama, 128, 8, false, kRope3, 5e5, 131072, 8030261248},
    {"configs/Llama-3.1-70B-Instruct", kLlama, 128, 8, false, kRope3, 5e5, 131072, 70553706496},
    {"configs/Llama-3.1-405B", kLlama, 128, 8, false, kRope3, 5e5, 131072, 405853388800},
    {"configs/Llama-3.2-1B-Instruct", kLlama, 64, 8, true, kRope3, 5e5, 131072, 1235814400},
    {"configs/Llama-3.2-3B-Instruct", kLlama, 128, 8, true, kRope3, 5e5, 131072, 3212749824},
    {"configs/TinyLlama-1.1B-Chat-v1.0", kLlama, 64, 4, false, kPlain, 1e4, 2048, 1100048384},
    {"configs/SmolLM2-135M", kLlama, 64, 3, true, kPlain, 1e5, 8192, 134515008},
    {"configs/GaLore-llama-60m", kLlama, 64, 8, false, kPlain, 1e4, 1024, 58073600},
    {"configs/GaLore-llama-9m", kLlama, 32, 4, false, kPlain, 1e4, 1024, 8995968},
    {"configs/Mistral-7B-Instruct-v0.3", kMistral, 128, 8, false, kPlain, 1e6, 32768, 7248023552},
    {"configs/Qwen2.5-0.5B-Instruct", kQwen2, 64, 2, true, kPlain, 1e6, 32768, 494032768},
    {"configs/Qwen2.5-7B-Instruct", kQwen2, 128, 4, false, kPlain, 1e6, 32768, 7615616512},
    {"configs/Qwen3-0.6B-sft", kQwen3, 128, 8, true, kPlain, 1e6, 40960, 596049920},
    {"configs/Qwen3-8B", kQwen3, 128, 8, false, kPlain, 1e6, 40960, 8190735360},
    {"models/stories260K/hf", kLlama, 8, 4, true, kPlain, 1e4, 512, 260032},
};
// clang-format on

INSTANTIATE_TEST_SUITE_P(Files, HfConfigReal, testing::ValuesIn(kRealConfigs));

TEST(HfConfig, TokensAndTypesOfRealFiles) {
  TESSERA_REQUIRE_DATA(path, "configs");
  const HfConfig instruct = load_hf_config(path / "Llama-3.1-8B-Instruct" / "config.json");
  EXPECT_EQ(instruct.model.eos_token_ids, (Ids{128001, 128008, 128009}));
  EXPECT_EQ(instruct.model.bos_token_id, 128000);
  EXPECT_EQ(instruct.model.pad_token_id, std::nullopt);
  EXPECT_EQ(instruct.model.file_dtype, DType::kBF16);
  EXPECT_EQ(instruct.model.rope.factor, 8.0);
  EXPECT_EQ(instruct.model.rope.original_max_position_embeddings, 8192);
  const ModelConfig galore = load_hf_config(path / "GaLore-llama-9m").model;
  EXPECT_EQ(galore.pad_token_id, std::nullopt) << "-1 is no token";
  EXPECT_EQ(galore.rms_norm_eps, 1e-6);
  EXPECT_EQ(galore.file_dtype, std::nullopt);
}

// --- the two generations of rope keys ----------------------------------------------------------

TEST(HfConfig, RopeKeysOfBothGenerationsAgree) {
  const std::string scaling =
      "'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, "
      "'original_max_position_embeddings': 16";
  const ModelConfig a = model_of(
      small("{'rope_theta': 500000, 'rope_scaling': {'type': 'llama3', " + scaling + "}}"));
  const ModelConfig b = model_of(
      small("{'rope_theta': 5e5, 'rope_scaling': {'rope_type': 'llama3', " + scaling + "}}"));
  const ModelConfig c = model_of(
      without(small("{'rope_parameters': {'rope_type': 'llama3', 'rope_theta': 500000.0, " +
                    scaling + "}}"),
              "rope_theta"));
  EXPECT_EQ(a.rope.kind, RopeKind::kLlama3);
  EXPECT_EQ(a.rope, b.rope);
  EXPECT_EQ(a.rope, c.rope);
  EXPECT_EQ(a.rope.theta, 500000.0);
}

TEST(HfConfig, OuterOriginalLengthWins) {
  const auto original = [](const std::string& changes) {
    return model_of(small(changes)).rope.original_max_position_embeddings;
  };
  const std::string yarn =
      "'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': "
      "32}";
  EXPECT_EQ(original("{" + yarn + "}"), 32);
  EXPECT_EQ(original("{'original_max_position_embeddings': 16, " + yarn + "}"), 16);
  EXPECT_EQ(original("{'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0}}"), 64);
}

TEST(HfConfig, RopeMistakesAreRefusedByName) {
  const auto refuse_scaling = [](const std::string& scaling, Parts parts) {
    refuse(small("{'rope_scaling': " + scaling + "}"), parts);
  };
  for (const std::string kind : {"longrope", "su", "mrope", "ntk", "proportional", "Llama3", ""}) {
    refuse_scaling("{'rope_type': '" + kind + "', 'factor': 2.0}",
                   {"rope_type", kind, "supported are default, linear"});
    refuse_scaling("{'type': '" + kind + "', 'factor': 2.0}", {"rope_type", kind});
  }
  refuse_scaling("{'factor': 2.0}", {"rope_scaling has no rope_type"});
  refuse_scaling("{'rope_type': 'linear'}", {"rope_scaling.factor is missing"});
  refuse_scaling("{'rope_type': 'linear', 'factor': null}", {"rope_scaling.factor is null"});
  refuse_scaling("{'rope_type': 'linear', 'factor': '2'}", {"rope_scaling.factor", "a number"});
  refuse_scaling("{'rope_type': 'linear', 'factor': 0.5}", {"factor is 0.5"});
  refuse_scaling("{'rope_type': 'llama3', 'factor': 8.0}",
                 {"low_freq_factor is missing", "high_freq_factor is missing"});
  refuse_scaling("{'rope_type': 'linear', 'type': 'dynamic', 'factor': 2.0}",
                 {"rope_type", "linear", "dynamic"});
  refuse_scaling("{'rope_type': 'linear', 'factor': 2.0, 'mrope_section': [1, 2]}",
                 {"rope_scaling.mrope_section"});
  refuse_scaling("{'full_attention': {'rope_type': 'default'}}",
                 {"full_attention", "per layer type"});
  refuse_scaling("'linear'", {"rope_scaling", "wanted an object"});
  refuse(small("{'rope_scaling': {'rope_type': 'linear', 'factor': 2.0},"
               " 'rope_parameters': {'rope_type': 'linear', 'factor': 4.0}}"),
         {"rope_parameters", "rope_scaling", "differ"});
  refuse(small("{'rope_parameters': {'rope_type': 'default', 'rope_theta': 5e5}}"),
         {"rope_theta is 10000", "500000"});
  refuse(small("{'partial_rotary_factor': 0.5}"), {"partial_rotary_factor is 0.5"});
  EXPECT_TRUE(parse(small("{'partial_rotary_factor': 1.0}")).warnings.empty());
  expect_warning(small("{'rope_scaling': {'rope_type': 'linear', 'factor': 2.0, 'beta_fast': 32}}"),
                 "rope_scaling.beta_fast has no effect");
}

// --- families ----------------------------------------------------------------------------------

TEST(HfConfig, OtherModelsAreRefusedWithWhatIsSupported) {
  for (const std::string type : {"gemma2", "gemma3_text", "phi3", "mixtral", "qwen2_moe",
                                 "qwen3_moe", "deepseek_v3", "gpt2", "llama4", "Llama", ""}) {
    refuse(small_of(type),
           {"c.json", "model_type", type, "supported are llama", "mistral", "qwen3"});
  }
  const Json nameless = without(small(), "model_type");
  refuse(nameless, {"no model_type", "supported are"});
  const auto of_class = [](Json config, const std::string& name) {
    config["architectures"] = std::vector<std::string>{name};
    return config;
  };
  EXPECT_EQ(model_of(of_class(nameless, "MistralForCausalLM")).architecture, kMistral);
  refuse(of_class(nameless, "FalconForCausalLM"), {"FalconForCausalLM"});
  for (const std::string name :
       {"LlamaForSequenceClassification", "LlamaModel", "MistralForCausalLM"}) {
    refuse(of_class(small(), name), {name, "LlamaForCausalLM"});
  }
  EXPECT_EQ(model_of(of_class(small(), "LLaMAForCausalLM")).architecture, kLlama);
}

TEST(HfConfig, BiasesFollowTheFamily) {
  const ModelConfig llama = model_of(small("{'attention_bias': true, 'mlp_bias': true}"));
  EXPECT_TRUE(llama.attention_qkv_bias && llama.attention_o_bias && llama.mlp_bias);
  const ModelConfig qwen2 = model_of(small_of("qwen2"));
  EXPECT_TRUE(qwen2.attention_qkv_bias);
  EXPECT_FALSE(qwen2.attention_o_bias || qwen2.mlp_bias || qwen2.qk_norm);
  const ModelConfig qwen3 = model_of(small_of("qwen3", "{'attention_bias': true}"));
  EXPECT_TRUE(qwen3.attention_qkv_bias && qwen3.attention_o_bias && qwen3.qk_norm);
  for (const char* type : {"mistral", "qwen2", "qwen3"}) {
    refuse(small_of(type, "{'mlp_bias': true}"), {"mlp_bias"});
  }
  refuse(small_of("mistral", "{'attention_bias': true}"), {"attention_bias"});
  expect_warning(small_of("qwen2", "{'attention_bias': false}"), "attention_bias");
}

// B50.
TEST(HfConfig, HeadDim) {
  EXPECT_EQ(model_of(small()).head_dim, 24);
  EXPECT_EQ(model_of(without(small(), "head_dim")).head_dim, 16);
  EXPECT_EQ(model_of(small("{'head_dim': null}")).head_dim, 16);
  refuse(without(small("{'num_attention_heads': 7, 'num_key_value_heads': 7}"), "head_dim"),
         {"hidden_size 96", "head_dim is missing"});
  const Json qwen3 = without(small_of("qwen3"), "head_dim");
  EXPECT_EQ(model_of(qwen3).head_dim, 128) << "the default of transformers' Qwen3Config";
  expect_warning(qwen3, "head_dim is missing");
}

TEST(HfConfig, MissingKeyValueHeads) {
  EXPECT_EQ(model_of(without(small(), "num_key_value_heads")).num_key_value_heads, 6);
  const Json mistral =
      small_of("mistral", "{'num_attention_heads': 16, 'num_key_value_heads': null}");
  EXPECT_EQ(model_of(mistral).num_key_value_heads, 16);
  EXPECT_EQ(model_of(without(mistral, "num_key_value_heads")).num_key_value_heads, 8)
      << "the default of MistralConfig";
}

Ids windows(const std::string& type, const std::string& changes) {
  return model_of(small_of(type, changes)).sliding_windows;
}

TEST(HfConfig, SlidingWindowOfMistral) {
  EXPECT_EQ(windows("mistral", "{'sliding_window': 8}"), (Ids{8, 8, 8, 8}));
  EXPECT_EQ(windows("mistral", "{'sliding_window': null}"), Ids{});
  const Json silent = without(small_of("mistral"), "sliding_window");
  EXPECT_EQ(model_of(silent).sliding_windows, Ids(4, 4096)) << "the default of MistralConfig";
  expect_warning(silent, "sliding_window is missing");
  refuse(small_of("mistral", "{'sliding_window': 0}"), {"sliding_window is 0"});
}

TEST(HfConfig, SlidingWindowsOfQwen) {
  const std::string first_slides =
      "'layer_types': ['sliding_attention', 'full_attention', 'full_attention', 'full_attention']";
  for (const char* type : {"qwen2", "qwen3"}) {
    const auto of = [&](const std::string& rest) {
      return windows(type, "{'sliding_window': 8, 'use_sliding_window': true" + rest + "}");
    };
    EXPECT_EQ(windows(type, "{'sliding_window': 8, 'use_sliding_window': false}"), Ids{});
    EXPECT_EQ(windows(type, "{'sliding_window': 8}"), Ids{}) << "not in use unless it says so";
    EXPECT_EQ(of(", 'max_window_layers': 3"), (Ids{0, 0, 0, 8}));
    EXPECT_EQ(of(", 'max_window_layers': 0"), (Ids{8, 8, 8, 8}));
    EXPECT_EQ(of(""), Ids{}) << "max_window_layers is 28 by default";
    EXPECT_EQ(of(", 'max_window_layers': 3, " + first_slides), (Ids{8, 0, 0, 0}))
        << "layer_types wins";
    refuse(small_of(type, "{'sliding_window': 8, " + first_slides + "}"),
           {"layer_types", "use_sliding_window is false"});
    refuse(small_of(type, "{'use_sliding_window': true, " + first_slides + "}"),
           {"layer_types", "sliding_window is null"});
  }
  refuse(small_of("qwen2", "{'layer_types': ['full_attention']}"), {"layer_types", "list of 4"});
  refuse(small_of("qwen2",
                  "{'layer_types': ['linear_attention', 'full_attention',"
                  " 'full_attention', 'full_attention']}"),
         {"layer_types", "linear_attention"});
}

TEST(HfConfig, LlamaHasNoWindow) {
  EXPECT_EQ(windows("llama", "{'sliding_window': 8}"), Ids{});
  expect_warning(small("{'sliding_window': 8}"), "sliding_window 8 has no effect");
  refuse(small("{'sliding_window': 8, 'use_sliding_window': true}"), {"use_sliding_window"});
}

// --- keys --------------------------------------------------------------------------------------

TEST(HfConfig, KeysThatChangeTheResultAreRefusedUnlessNeutral) {
  const std::pair<const char*, const char*> refused[] = {
      {"attention_dropout", "0.1"},
      {"hidden_act", "'gelu'"},
      {"rope_interleaved", "true"},
      {"num_local_experts", "8"},
      {"num_experts", "64"},
      {"final_logit_softcapping", "30.0"},
      {"query_pre_attn_scalar", "256"},
      {"is_encoder_decoder", "true"},
      {"pruned_heads", "{'0': [1]}"},
      {"embedding_multiplier", "12.0"},
      {"vision_config", "{}"},
      {"torch_dtype", "'float8_e4m3fn'"},
  };
  for (const auto& [key, value] : refused) {
    refuse(small(std::string("{'") + key + "': " + value + "}"), {key});
  }
  refuse(small("{'quantization_config': {'quant_method': 'gptq', 'bits': 4}}"),
         {"quantization_config", "gptq"});
  EXPECT_TRUE(parse(small("{'attention_dropout': 0.0, 'hidden_act': 'swish', 'pruned_heads': {},"
                          " 'rope_interleaved': false, 'num_local_experts': null,"
                          " 'is_encoder_decoder': false, 'embedding_multiplier': 1.0,"
                          " 'quantization_config': null, 'use_cache': true, 'pretraining_tp': 2,"
                          " 'transformers_version': '9.9', 'id2label': {'0': 'LABEL_0'}}"))
                  .warnings.empty());
}

TEST(HfConfig, UnknownKeysBecomeWarnings) {
  expect_warning(small("{'my_note': 3}"), "my_note is not known");
  expect_warning(small("{'auto_map': {'AutoModel': 'x.Y'}}"), "auto_map");
}

TEST(HfConfig, AllMistakesComeAtOnce) {
  refuse(without(small("{'hidden_size': '96', 'attention_dropout': 0.5, 'rms_norm_eps': true}"),
                 "vocab_size"),
         {"c.json", "vocab_size is missing", "hidden_size is \"96\"", "attention_dropout",
          "rms_norm_eps"});
}

TEST(HfConfig, BrokenFilesAreRefused) {
  for (const char* text :
       {"", "[]", "3", "{", "{\"vocab_size\": NaN}", "{\"a\":1,\"a\":2}", "null"}) {
    expect_error(ErrorKind::kUser, {"c.json"}, [&] { parse_hf_config(text, "", "c.json"); });
  }
  for (const std::string size :
       {"0", "-4", "1e300", "1.5", "18446744073709551615", "true", "[1]"}) {
    refuse(small("{'num_hidden_layers': " + size + "}"), {"num_hidden_layers"});
  }
  EXPECT_EQ(model_of(small("{'vocab_size': 97.0}")).vocab_size, 97);
  const test::TempFolder folder;
  expect_error(ErrorKind::kUser, {"config.json"}, [&] { load_hf_config(folder.path()); });
}

TEST(HfConfig, TokenIds) {
  EXPECT_EQ(model_of(small("{'eos_token_id': [2, 5]}")).eos_token_ids, (Ids{2, 5}));
  EXPECT_EQ(model_of(small("{'eos_token_id': null}")).eos_token_ids, Ids{});
  EXPECT_EQ(model_of(without(small_of("qwen2"), "eos_token_id")).eos_token_ids, Ids{});
  EXPECT_EQ(model_of(without(small(), "eos_token_id")).eos_token_ids, Ids{2});
  const HfConfig config =
      parse_hf_config(small().dump(), R"({"eos_token_id":[7,8],"top_p":0.9})", "c");
  EXPECT_EQ(config.stop_token_ids, (Ids{7, 8}));
  EXPECT_EQ(config.model.eos_token_ids, Ids{2});
}

// --- export ------------------------------------------------------------------------------------

TEST(HfConfigExport, SetsOnlyWhatChanged) {
  const Json original = small("{'_name_or_path': 'me/mine', 'my_note': {'kept': true}}");
  ModelConfig model = model_of(original);
  model.vocab_size = 128;
  model.tie_word_embeddings = true;
  model.file_dtype = DType::kBF16;
  model.eos_token_ids = {2, 9};
  Json wanted = original;
  wanted.update(
      json("{'vocab_size': 128, 'tie_word_embeddings': true, 'torch_dtype': 'bfloat16',"
           " 'eos_token_id': [2, 9], 'architectures': ['LlamaForCausalLM'],"
           " 'hidden_act': 'silu'}"));
  EXPECT_EQ(Json::parse(format_hf_config(model, original.dump())), wanted);
}

TEST(HfConfigExport, KeepsTheGenerationOfKeys) {
  const Json newer =
      without(without(small("{'dtype': 'float32',"
                            " 'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0}}"),
                      "torch_dtype"),
              "rope_theta");
  ModelConfig model = model_of(newer);
  model.file_dtype = DType::kF16;
  model.rope.kind = RopeKind::kYarn;
  model.rope.factor = 4.0;
  model.rope.original_max_position_embeddings = 16;
  const Json after = Json::parse(format_hf_config(model, newer.dump()));
  EXPECT_EQ(after["dtype"], "float16");
  EXPECT_FALSE(after.contains("torch_dtype"));
  EXPECT_FALSE(after.contains("rope_scaling"));
  EXPECT_FALSE(after.contains("rope_theta"));
  EXPECT_EQ(after["rope_parameters"],
            json("{'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 16,"
                 " 'rope_theta': 10000.0}"));
}

TEST(HfConfigExport, EveryFamilyAndRopeSurvivesAFreshFile) {
  const std::string scalings[] = {
      "null", "{'type': 'linear', 'factor': 2.0}", "{'type': 'dynamic', 'factor': 2.0}",
      "{'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,"
      " 'original_max_position_embeddings': 16}",
      "{'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 16,"
      " 'attention_factor': 1.5, 'beta_fast': 16.0, 'beta_slow': 2.0, 'mscale': 1.0,"
      " 'mscale_all_dim': 0.5, 'truncate': false}"};
  const std::string windowed =
      "'sliding_window': 8, 'use_sliding_window': true, 'max_window_layers': 1";
  const std::string biased = "'attention_bias': true";
  const std::string changes[] = {
      "'sliding_window': null", windowed, biased,
      "'tie_word_embeddings': true, 'eos_token_id': [1, 2], 'pad_token_id': 0"};
  int written = 0;
  for (const std::string type : {"llama", "mistral", "qwen2", "qwen3"}) {
    for (const std::string& scaling : scalings) {
      for (const std::string& change : changes) {
        if (type == "llama" && change == windowed) continue;
        if (type == "mistral" && change == biased) continue;
        const ModelConfig model =
            model_of(small_of(type, "{'rope_scaling': " + scaling + ", " + change + "}"));
        const std::string text = format_hf_config(model);
        const HfConfig read_back = parse_hf_config(text, "", "fresh");
        EXPECT_EQ(read_back.model, model) << text;
        EXPECT_TRUE(read_back.warnings.empty()) << text;
        EXPECT_EQ(Json::parse(text)["head_dim"], 24);
        EXPECT_TRUE(Json::parse(text).contains("architectures"));
        ++written;
      }
    }
  }
  EXPECT_EQ(written, 70);
}

TEST(HfConfigExport, WhatAFamilyCannotSayIsRefused) {
  const auto cannot = [](const char* type, void (*change)(ModelConfig&)) {
    ModelConfig model = model_of(small_of(type));
    change(model);
    expect_error(ErrorKind::kUser, {"[config]", type}, [&] { format_hf_config(model); });
  };
  cannot("llama", [](ModelConfig& m) { m.sliding_windows = {8, 8, 8, 8}; });
  cannot("llama", [](ModelConfig& m) { m.qk_norm = true; });
  cannot("llama", [](ModelConfig& m) { m.attention_qkv_bias = true; });
  cannot("mistral", [](ModelConfig& m) { m.sliding_windows = {0, 8, 8, 8}; });
  cannot("qwen2", [](ModelConfig& m) { m.attention_qkv_bias = false; });
  cannot("qwen3", [](ModelConfig& m) { m.sliding_windows = {0, 4, 8, 8}; });
  cannot("qwen3", [](ModelConfig& m) { m.rope.partial_rotary_factor = 0.5; });
  ModelConfig none = model_of(small());
  none.sliding_windows = {0, 0, 0, 0};
  EXPECT_NO_THROW(format_hf_config(none));
}

TEST(HfConfigExport, WritesBothFiles) {
  const test::TempFolder folder;
  folder.write("config.json", small("{'my_note': 1}").dump());
  folder.write("generation_config.json", "{\"eos_token_id\": [2, 3], \"temperature\": 0.6}");
  const HfConfig source = load_hf_config(folder.path());
  EXPECT_EQ(source.stop_token_ids, (Ids{2, 3}));
  write_hf_config(folder / "a/b", source.model, &source);
  EXPECT_EQ(test::read_file(folder / "a/b/generation_config.json"),
            test::read_file(folder / "generation_config.json"));
  EXPECT_EQ(Json::parse(test::read_file(folder / "a/b/config.json"))["my_note"], 1);
  write_hf_config(folder / "scratch", source.model);
  EXPECT_EQ(Json::parse(test::read_file(folder / "scratch/generation_config.json")),
            json("{'bos_token_id': 1, 'eos_token_id': 2}"));
  EXPECT_EQ(load_hf_config(folder / "scratch").model, source.model);
}

}  // namespace
}  // namespace tessera
