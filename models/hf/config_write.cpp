#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "checkpoint/json_text.h"
#include "checkpoint/posix_file.h"
#include "engine/core/error.h"
#include "models/hf/config_io.h"
#include "models/hf/config_keys.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kWho = "config";

std::string_view torch_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kF64:
      return "float64";
    default:
      TESSERA_FAIL(ErrorKind::kUser, "[config] weights in {} cannot be exported", name_of(dtype));
  }
}

std::string_view causal_lm_class(Architecture architecture) {
  switch (architecture) {
    case Architecture::kLlama:
      return "LlamaForCausalLM";
    case Architecture::kMistral:
      return "MistralForCausalLM";
    case Architecture::kQwen2:
      return "Qwen2ForCausalLM";
    case Architecture::kQwen3:
      return "Qwen3ForCausalLM";
  }
  return "";
}

Json token_ids(const std::vector<std::int64_t>& ids) {
  if (ids.empty()) return nullptr;
  return ids.size() == 1 ? Json(ids.front()) : Json(ids);
}

Json optional_id(const std::optional<std::int64_t>& id) { return id ? Json(*id) : Json(nullptr); }

// The one window of all layers that have one; 0 when none has.
std::int64_t common_window(const ModelConfig& model) {
  std::int64_t window = 0;
  for (const std::int64_t layer_window : model.sliding_windows) {
    if (layer_window == 0) continue;
    CHECK_USER(window == 0 || window == layer_window,
               "[config] layers with windows {} and {} cannot be written as model_type {}", window,
               layer_window, name_of(model.architecture));
    window = layer_window;
  }
  return window;
}

void write_windows(Json& json, const ModelConfig& model) {
  const std::int64_t window = common_window(model);
  switch (model.architecture) {
    case Architecture::kLlama:
      return;  // the reading back finds a window that was lost
    case Architecture::kMistral:
      json["sliding_window"] = window == 0 ? Json(nullptr) : Json(window);
      json.erase("layer_types");
      return;
    case Architecture::kQwen2:
    case Architecture::kQwen3:
      break;
  }
  json["use_sliding_window"] = window != 0;
  json["sliding_window"] = window == 0 ? Json(nullptr) : Json(window);
  Json types = Json::array();
  for (std::int64_t i = 0; i < model.num_hidden_layers; ++i) {
    types.push_back(model.sliding_window(i) > 0 ? "sliding_attention" : "full_attention");
  }
  // Releases without layer_types slide from this layer on.
  const auto first = std::find(types.begin(), types.end(), Json("sliding_attention"));
  json["max_window_layers"] = first - types.begin();
  json["layer_types"] = std::move(types);
}

// Sets the keys of `model`; with `old`, only those where the two differ.
void set_changed_keys(Json& json, const ModelConfig& model, const ModelConfig* old) {
  const auto set = [&](const char* key, const auto& member, const Json& value) {
    if (old == nullptr || old->*member != model.*member) json[key] = value;
  };
  set("vocab_size", &ModelConfig::vocab_size, model.vocab_size);
  set("hidden_size", &ModelConfig::hidden_size, model.hidden_size);
  set("intermediate_size", &ModelConfig::intermediate_size, model.intermediate_size);
  set("num_hidden_layers", &ModelConfig::num_hidden_layers, model.num_hidden_layers);
  set("num_attention_heads", &ModelConfig::num_attention_heads, model.num_attention_heads);
  set("num_key_value_heads", &ModelConfig::num_key_value_heads, model.num_key_value_heads);
  set("head_dim", &ModelConfig::head_dim, model.head_dim);
  set("rms_norm_eps", &ModelConfig::rms_norm_eps, model.rms_norm_eps);
  set("max_position_embeddings", &ModelConfig::max_position_embeddings,
      model.max_position_embeddings);
  set("tie_word_embeddings", &ModelConfig::tie_word_embeddings, model.tie_word_embeddings);
  set("initializer_range", &ModelConfig::initializer_range, model.initializer_range);
  set("bos_token_id", &ModelConfig::bos_token_id, optional_id(model.bos_token_id));
  set("eos_token_id", &ModelConfig::eos_token_ids, token_ids(model.eos_token_ids));
  set("pad_token_id", &ModelConfig::pad_token_id, optional_id(model.pad_token_id));
  if (old == nullptr || old->rope != model.rope) write_rope(json, model);
  if (old == nullptr || old->sliding_windows != model.sliding_windows ||
      old->num_hidden_layers != model.num_hidden_layers) {
    write_windows(json, model);
  }
  if (model.file_dtype && (old == nullptr || old->file_dtype != model.file_dtype)) {
    // transformers 5 still reads the older name, and 4 knows no other.
    const bool newer_name = json.contains("dtype");
    if (newer_name) json["dtype"] = torch_name(*model.file_dtype);
    if (!newer_name || json.contains("torch_dtype")) {
      json["torch_dtype"] = torch_name(*model.file_dtype);
    }
  }
  const bool has_bias_keys =
      model.architecture == Architecture::kLlama || model.architecture == Architecture::kQwen3;
  if (has_bias_keys) {
    set("attention_bias", &ModelConfig::attention_qkv_bias, model.attention_qkv_bias);
  }
  if (model.architecture == Architecture::kLlama) {
    set("mlp_bias", &ModelConfig::mlp_bias, model.mlp_bias);
  }
}

// A key whose absence would leave another reader to a default that need not be ours.
void add_essential_keys(Json& json, const ModelConfig& model) {
  const auto add = [&](const char* key, const Json& value) {
    if (!json.contains(key)) json[key] = value;
  };
  add("architectures", Json::array({causal_lm_class(model.architecture)}));
  add("model_type", name_of(model.architecture));
  add("max_position_embeddings", model.max_position_embeddings);
  add("rms_norm_eps", model.rms_norm_eps);
  add("tie_word_embeddings", model.tie_word_embeddings);
  add("hidden_act", "silu");
  if (model.head_dim * model.num_attention_heads != model.hidden_size ||
      model.architecture == Architecture::kQwen3) {
    add("head_dim", model.head_dim);
  }
}

}  // namespace

std::string format_hf_config(const ModelConfig& model, std::string_view original_text) {
  validate(model, "the model to export");
  ModelConfig wanted = model;
  if (!model.has_sliding_window()) wanted.sliding_windows.clear();  // the one spelling of "none"
  Json json = Json::object();
  if (original_text.empty()) {
    set_changed_keys(json, wanted, nullptr);
    json["attention_dropout"] = 0.0;
    json["use_cache"] = true;
    add_essential_keys(json, model);
    json = Json(nlohmann::json(json));  // sorted by key, as transformers writes a file
  } else {
    json = parse_json_text(original_text, "the original config.json", kWho);
    const ModelConfig old = parse_hf_config(original_text, "", "the original config.json").model;
    CHECK_USER(old.architecture == model.architecture,
               "[config] the model is {}, its original config.json is {}",
               name_of(model.architecture), name_of(old.architecture));
    set_changed_keys(json, wanted, &old);
    add_essential_keys(json, model);
  }
  std::string text = json.dump(2) + "\n";
  ModelConfig read_back = parse_hf_config(text, "", "the exported config.json").model;
  if (!model.file_dtype) read_back.file_dtype.reset();
  CHECK_USER(read_back == wanted,
             "[config] this combination of biases, norms, windows and rope settings does not exist "
             "as model_type {} and cannot be exported",
             name_of(model.architecture));
  return text;
}

void write_hf_config(const std::filesystem::path& folder, const ModelConfig& model,
                     const HfConfig* source) {
  const std::string text = format_hf_config(model, source != nullptr ? source->config_text : "");
  std::string generation = source != nullptr ? source->generation_text : "";
  if (generation.empty()) {
    Json json = Json::object();
    if (model.bos_token_id) json["bos_token_id"] = *model.bos_token_id;
    if (!model.eos_token_ids.empty()) json["eos_token_id"] = token_ids(model.eos_token_ids);
    if (model.pad_token_id) json["pad_token_id"] = *model.pad_token_id;
    generation = json.dump(2) + "\n";
  }
  create_folders(folder, kWho);
  replace_file(folder / "config.json", text, kWho);
  replace_file(folder / "generation_config.json", generation, kWho);
}

}  // namespace tessera
