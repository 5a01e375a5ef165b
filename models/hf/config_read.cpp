#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

#include "checkpoint/json_text.h"
#include "checkpoint/posix_file.h"
#include "engine/core/error.h"
#include "models/hf/config_io.h"
#include "models/hf/config_keys.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kWho = "config";
constexpr std::uint64_t kLargestFile = 16'000'000;

// Defaults of the configuration class of each model_type in transformers 5.
struct Family {
  Architecture architecture;
  std::string_view causal_lm_class;
  std::int64_t max_position_embeddings;
  std::int64_t num_key_value_heads;  // 0: as many as attention heads
  std::int64_t head_dim;             // 0: hidden_size / num_attention_heads
  std::optional<std::int64_t> bos_token_id;
  std::optional<std::int64_t> eos_token_id;
};

constexpr std::array<Family, 4> kFamilies = {{
    {Architecture::kLlama, "LlamaForCausalLM", 2048, 0, 0, 1, 2},
    {Architecture::kMistral, "MistralForCausalLM", 131072, 8, 0, 1, 2},
    {Architecture::kQwen2, "Qwen2ForCausalLM", 32768, 32, 0, std::nullopt, std::nullopt},
    {Architecture::kQwen3, "Qwen3ForCausalLM", 32768, 32, 128, std::nullopt, std::nullopt},
}};

constexpr std::string_view kSupported =
    "supported are llama (Llama 2, 3, 3.1, 3.2, TinyLlama, SmolLM2), mistral, qwen2 (Qwen2, "
    "Qwen2.5) "
    "and qwen3";

// Keys that no forward or backward pass reads: bookkeeping, generation, outputs and other heads.
const std::set<std::string, std::less<>>& keys_without_effect() {
  static const std::set<std::string, std::less<>> keys = {"_attn_implementation",
                                                          "_attn_implementation_autoset",
                                                          "_attn_implementation_internal",
                                                          "_commit_hash",
                                                          "_experts_implementation",
                                                          "_name_or_path",
                                                          "attn_implementation",
                                                          "bad_words_ids",
                                                          "begin_suppress_tokens",
                                                          "cache_implementation",
                                                          "chunk_size_feed_forward",
                                                          "decoder_start_token_id",
                                                          "diversity_penalty",
                                                          "do_sample",
                                                          "early_stopping",
                                                          "encoder_no_repeat_ngram_size",
                                                          "exponential_decay_length_penalty",
                                                          "finetuning_task",
                                                          "forced_bos_token_id",
                                                          "forced_eos_token_id",
                                                          "id2label",
                                                          "is_decoder",
                                                          "is_llama_config",
                                                          "label2id",
                                                          "length_penalty",
                                                          "max_length",
                                                          "min_length",
                                                          "no_repeat_ngram_size",
                                                          "num_beam_groups",
                                                          "num_beams",
                                                          "num_labels",
                                                          "num_return_sequences",
                                                          "output_attentions",
                                                          "output_hidden_states",
                                                          "output_scores",
                                                          "prefix",
                                                          "pretraining_tp",
                                                          "problem_type",
                                                          "remove_invalid_values",
                                                          "repetition_penalty",
                                                          "return_dict",
                                                          "return_dict_in_generate",
                                                          "sep_token_id",
                                                          "suppress_tokens",
                                                          "task_specific_params",
                                                          "temperature",
                                                          "tf_legacy_loss",
                                                          "tokenizer_class",
                                                          "top_k",
                                                          "top_p",
                                                          "torchscript",
                                                          "transformers_version",
                                                          "typical_p",
                                                          "unsloth_fixed",
                                                          "unsloth_version",
                                                          "use_bfloat16",
                                                          "use_cache"};
  return keys;
}

// Keys that would change the computation unless they hold their neutral value (or null).
struct NeutralKey {
  std::string_view key;
  std::string_view neutral;  // as JSON; "null": refused with any value
  std::string_view meaning;
};

constexpr std::array kNeutralKeys = {
    NeutralKey{"add_cross_attention", "false", "cross attention"},
    NeutralKey{"attention_chunk_size", "null", "chunked attention"},
    NeutralKey{"attention_dropout", "0", "dropout of attention weights; set it to 0"},
    NeutralKey{"attention_multiplier", "null", "scaled attention (Granite)"},
    NeutralKey{"attn_logit_softcapping", "null", "soft-capped attention (Gemma)"},
    NeutralKey{"attn_temperature_tuning", "false", "attention temperature (Llama 4)"},
    NeutralKey{"audio_config", "null", "audio input"},
    NeutralKey{"clip_qkv", "null", "clipped q, k and v"},
    NeutralKey{"cross_attention_hidden_size", "null", "cross attention"},
    NeutralKey{"embedding_multiplier", "1", "scaled embeddings"},
    NeutralKey{"final_logit_softcapping", "null", "soft-capped logits (Gemma)"},
    NeutralKey{"first_k_dense_replace", "null", "mixture of experts"},
    NeutralKey{"is_encoder_decoder", "false", "an encoder"},
    NeutralKey{"kv_lora_rank", "null", "latent attention (DeepSeek)"},
    NeutralKey{"logit_scale", "1", "scaled logits"},
    NeutralKey{"logits_scaling", "1", "scaled logits"},
    NeutralKey{"moe_intermediate_size", "null", "mixture of experts"},
    NeutralKey{"n_routed_experts", "null", "mixture of experts"},
    NeutralKey{"no_rope_layers", "null", "layers without rotary embedding"},
    NeutralKey{"num_experts", "null", "mixture of experts"},
    NeutralKey{"num_experts_per_tok", "null", "mixture of experts"},
    NeutralKey{"num_local_experts", "null", "mixture of experts"},
    NeutralKey{"pruned_heads", "{}", "pruned attention heads"},
    NeutralKey{"q_lora_rank", "null", "latent attention (DeepSeek)"},
    NeutralKey{"qk_layernorm", "false", "norms on q and k"},
    NeutralKey{"quantization_config", "null", "quantised weights; use the 16-bit model"},
    NeutralKey{"query_pre_attn_scalar", "null", "scaled attention (Gemma)"},
    NeutralKey{"residual_multiplier", "1", "scaled residuals (Granite)"},
    NeutralKey{"rope_interleaved", "false", "interleaved rotary pairs"},
    NeutralKey{"rotary_dim", "null", "partial rotary embedding"},
    NeutralKey{"rotary_pct", "null", "partial rotary embedding"},
    NeutralKey{"scale_depth", "null", "scaled residuals (MiniCPM)"},
    NeutralKey{"scale_emb", "null", "scaled embeddings (MiniCPM)"},
    NeutralKey{"text_config", "null", "a model of several modalities"},
    NeutralKey{"tie_encoder_decoder", "false", "an encoder"},
    NeutralKey{"use_mrope", "false", "rotary embedding in several dimensions"},
    NeutralKey{"use_qk_norm", "false", "norms on q and k"},
    NeutralKey{"vision_config", "null", "image input"},
};

// model_type decides; architectures alone does in files too old to have it.
const Family& find_family(ConfigKeys& keys, const std::string& where) {
  const std::optional<std::string> model_type = keys.text("model_type");
  const Json* classes = keys.take("architectures");
  std::string class_name;
  if (classes != nullptr && classes->is_array() && !classes->empty() && (*classes)[0].is_string()) {
    class_name = (*classes)[0].get<std::string>();
  }
  if (class_name == "LLaMAForCausalLM")
    class_name = "LlamaForCausalLM";  // before transformers 4.28
  const Family* family = nullptr;
  for (const Family& candidate : kFamilies) {
    if (model_type ? *model_type == name_of(candidate.architecture)
                   : class_name == candidate.causal_lm_class) {
      family = &candidate;
    }
  }
  CHECK_USER(model_type || !class_name.empty(), "[config] {} has no model_type; {}", where,
             kSupported);
  CHECK_USER(family != nullptr, "[config] {}: {} {} is not supported; {}", where,
             model_type ? "model_type" : "architecture", model_type ? *model_type : class_name,
             kSupported);
  CHECK_USER(class_name.empty() || class_name == family->causal_lm_class,
             "[config] {}: architecture {} is not supported; model_type {} is read as {}", where,
             class_name, name_of(family->architecture), family->causal_lm_class);
  return *family;
}

void read_sizes(ConfigKeys& keys, const Family& family, ModelConfig& model,
                std::vector<std::string>& warnings) {
  model.vocab_size = keys.required_integer("vocab_size");
  model.hidden_size = keys.required_integer("hidden_size");
  model.intermediate_size = keys.required_integer("intermediate_size");
  model.num_hidden_layers = keys.required_integer("num_hidden_layers");
  model.num_attention_heads = keys.required_integer("num_attention_heads");

  const std::int64_t default_kv_heads =
      keys.has("num_key_value_heads") || family.num_key_value_heads == 0
          ? model.num_attention_heads
          : family.num_key_value_heads;
  model.num_key_value_heads = keys.integer("num_key_value_heads").value_or(default_kv_heads);

  const std::int64_t even_share =
      model.num_attention_heads > 0 ? model.hidden_size / model.num_attention_heads : 0;
  const bool class_default = !keys.has("head_dim") && family.head_dim != 0;
  const std::optional<std::int64_t> head_dim = keys.integer("head_dim");
  model.head_dim = head_dim.value_or(class_default ? family.head_dim : even_share);
  if (class_default && family.head_dim != even_share) {
    warnings.push_back(
        fmt::format("head_dim is missing; taken as {}, the default of model_type {} "
                    "(hidden_size / num_attention_heads would be {})",
                    family.head_dim, name_of(family.architecture), even_share));
  }
  if (!head_dim && !class_default && model.num_attention_heads > 0 &&
      model.hidden_size % model.num_attention_heads != 0) {
    keys.problem(
        fmt::format("hidden_size {} is not a multiple of num_attention_heads {} and "
                    "head_dim is missing",
                    model.hidden_size, model.num_attention_heads));
  }

  // Before transformers 4.28 the key had another name.
  const std::optional<std::int64_t> old_name = keys.integer("max_sequence_length");
  const std::optional<std::int64_t> length = keys.integer("max_position_embeddings");
  model.max_position_embeddings =
      length.value_or(old_name.value_or(family.max_position_embeddings));
  if (length && old_name && *length != *old_name) {
    warnings.push_back(
        fmt::format("max_sequence_length {} has no effect beside "
                    "max_position_embeddings {}",
                    *old_name, *length));
  }
  model.rms_norm_eps = keys.number("rms_norm_eps").value_or(1e-6);
  model.initializer_range = keys.number("initializer_range").value_or(0.02);
  model.tie_word_embeddings = keys.boolean("tie_word_embeddings").value_or(false);
  const std::string activation = keys.text("hidden_act").value_or("silu");
  if (activation != "silu" && activation != "swish") {
    keys.problem(fmt::format("hidden_act is {}, supported is silu", activation));
  }
}

void read_biases(ConfigKeys& keys, ModelConfig& model, std::vector<std::string>& warnings) {
  const std::optional<bool> attention = keys.boolean("attention_bias");
  const std::optional<bool> mlp = keys.boolean("mlp_bias");
  const std::string_view type = name_of(model.architecture);
  switch (model.architecture) {
    case Architecture::kLlama:
      model.attention_qkv_bias = model.attention_o_bias = attention.value_or(false);
      model.mlp_bias = mlp.value_or(false);
      return;
    case Architecture::kQwen3:
      model.qk_norm = true;
      model.attention_qkv_bias = model.attention_o_bias = attention.value_or(false);
      break;
    case Architecture::kQwen2:
      model.attention_qkv_bias = true;  // in the model's code, not in its file
      if (attention && !*attention) {
        warnings.push_back(
            "attention_bias false has no effect: qwen2 models have biases on q, k "
            "and v");
      }
      break;
    case Architecture::kMistral:
      if (attention.value_or(false)) {
        keys.problem("attention_bias is true, but mistral models have no attention bias");
      }
      break;
  }
  if (mlp.value_or(false)) {
    keys.problem(fmt::format("mlp_bias is true, but {} models have no bias in the MLP", type));
  }
}

// layer_types as a flag per layer; empty when the key is absent or wrong.
std::vector<bool> read_layer_types(ConfigKeys& keys, std::int64_t num_layers) {
  const Json* types = keys.take("layer_types");
  if (types == nullptr) return {};
  std::vector<bool> sliding;
  if (!types->is_array() || static_cast<std::int64_t>(types->size()) != num_layers) {
    keys.problem(fmt::format("layer_types is {}, wanted a list of {} layer types", brief(*types),
                             num_layers));
    return {};
  }
  for (const Json& type : *types) {
    if (type != "full_attention" && type != "sliding_attention") {
      keys.problem(
          fmt::format("layer_types holds {}, supported are full_attention and "
                      "sliding_attention",
                      brief(type)));
      return {};
    }
    sliding.push_back(type == "sliding_attention");
  }
  return sliding;
}

void read_windows(ConfigKeys& keys, ModelConfig& model, std::vector<std::string>& warnings) {
  const bool has_window_key = keys.has("sliding_window");
  std::optional<std::int64_t> window = keys.integer("sliding_window");
  const std::optional<bool> use_window = keys.boolean("use_sliding_window");
  const std::optional<std::int64_t> first_layer = keys.integer("max_window_layers");
  std::vector<bool> types = read_layer_types(keys, model.num_hidden_layers);
  const bool any_type = std::find(types.begin(), types.end(), true) != types.end();
  const bool all_types = std::find(types.begin(), types.end(), false) == types.end();
  if (model.num_hidden_layers <= 0 || model.num_hidden_layers > 1'000'000)
    return;  // said elsewhere
  const auto layers = static_cast<std::size_t>(model.num_hidden_layers);

  if (window && *window <= 0) {
    keys.problem(fmt::format("sliding_window is {}, wanted null or at least 1", *window));
    return;
  }
  if (model.architecture == Architecture::kLlama) {
    if (any_type)
      keys.problem("layer_types holds sliding_attention, but llama models have no window");
    if (use_window.value_or(false)) {
      keys.problem("use_sliding_window is true, but llama models have no window");
    } else if (window) {
      warnings.push_back(
          fmt::format("sliding_window {} has no effect: llama models have no window", *window));
    }
    return;
  }
  if (model.architecture == Architecture::kMistral) {
    if (!has_window_key) {
      window = 4096;
      warnings.push_back(
          "sliding_window is missing; taken as 4096, the default of model_type mistral");
    }
    // transformers does not read layer_types here: what it would mean must be what happens.
    if (!types.empty() && (window ? !all_types : any_type)) {
      keys.problem(
          "layer_types differs from what sliding_window gives every layer of a mistral "
          "model");
    }
    if (window) model.sliding_windows.assign(layers, *window);
    return;
  }
  const bool in_use = use_window.value_or(false);
  if (!in_use) {
    if (any_type)
      keys.problem("layer_types holds sliding_attention, but use_sliding_window is false");
    return;
  }
  if (!has_window_key) window = 4096;
  if (!window) {
    if (any_type) keys.problem("layer_types holds sliding_attention, but sliding_window is null");
    return;
  }
  if (types.empty()) {
    for (std::size_t i = 0; i < layers; ++i) {
      types.push_back(static_cast<std::int64_t>(i) >= first_layer.value_or(28));
    }
  }
  if (std::find(types.begin(), types.end(), true) == types.end()) return;
  for (const bool sliding : types) model.sliding_windows.push_back(sliding ? *window : 0);
}

std::optional<DType> read_dtype(ConfigKeys& keys) {
  const std::optional<std::string> newer = keys.text("dtype");
  const std::optional<std::string> older = keys.text("torch_dtype");
  const std::optional<std::string> name = newer ? newer : older;
  if (newer && older && *newer != *older) {
    keys.problem(fmt::format("dtype is {} but torch_dtype is {}", *newer, *older));
  }
  if (!name) return {};
  const std::string_view plain =
      name->starts_with("torch.") ? std::string_view(*name).substr(6) : std::string_view(*name);
  if (plain == "float32") return DType::kF32;
  if (plain == "bfloat16") return DType::kBF16;
  if (plain == "float16") return DType::kF16;
  if (plain == "float64") return DType::kF64;
  if (plain == "auto") return {};
  keys.problem(fmt::format("{} is {}, supported are float32, bfloat16, float16 and float64",
                           newer ? "dtype" : "torch_dtype", *name));
  return {};
}

void read_token_ids(ConfigKeys& keys, const Family& family, ModelConfig& model) {
  model.bos_token_id =
      keys.has("bos_token_id") ? keys.integer("bos_token_id") : family.bos_token_id;
  if (keys.has("eos_token_id")) {
    model.eos_token_ids = keys.integers("eos_token_id");
  } else if (family.eos_token_id) {
    model.eos_token_ids = {*family.eos_token_id};
  }
  model.pad_token_id = keys.integer("pad_token_id");
  // -1 was "none" in the first releases.
  if (model.pad_token_id && *model.pad_token_id < 0) model.pad_token_id.reset();
  if (model.bos_token_id && *model.bos_token_id < 0) model.bos_token_id.reset();
  std::erase_if(model.eos_token_ids, [](std::int64_t id) { return id < 0; });
}

// Whatever nothing above has read.
void read_leftovers(ConfigKeys& keys, std::vector<std::string>& warnings) {
  for (const NeutralKey& entry : kNeutralKeys) {
    const Json* value = keys.take(entry.key);
    if (value == nullptr || *value == Json::parse(entry.neutral)) continue;
    std::string shown = brief(*value);
    if (entry.key == "quantization_config" && value->is_object() &&
        value->contains("quant_method")) {
      shown = fmt::format("{{quant_method: {}}}", brief((*value)["quant_method"]));
    }
    keys.problem(fmt::format("{} is {}: {} is not supported", entry.key, shown, entry.meaning));
  }
  if (const Json* code = keys.take("auto_map"); code != nullptr) {
    warnings.push_back(
        "auto_map names code of its own, which is not run: the model is read as its "
        "model_type");
  }
  for (const std::string& key : keys.unused()) {
    if (!keys_without_effect().contains(key)) {
      warnings.push_back(fmt::format("{} is not known and was not used", key));
    }
  }
}

std::vector<std::int64_t> read_stop_ids(std::string_view generation_text, const std::string& where,
                                        const ModelConfig& model) {
  if (generation_text.empty()) return model.eos_token_ids;
  const std::string name = where + " (generation_config.json)";
  const Json json = parse_json_text(generation_text, name, kWho);
  CHECK_USER(json.is_object(), "[config] {} is not a JSON object", name);
  std::vector<std::string> problems;
  ConfigKeys keys(json, "", problems);
  const std::vector<std::int64_t> ids = keys.integers("eos_token_id");
  CHECK_USER(problems.empty(), "[config] {}: {}", name, fmt::join(problems, "; "));
  return ids.empty() ? model.eos_token_ids : ids;
}

}  // namespace

HfConfig parse_hf_config(std::string_view config_text, std::string_view generation_text,
                         const std::string& where) {
  const Json json = parse_json_text(config_text, where, kWho);
  CHECK_USER(json.is_object(), "[config] {} is {}, wanted a JSON object", where, brief(json));
  HfConfig result;
  result.config_text = config_text;
  result.generation_text = generation_text;
  std::vector<std::string> problems;
  ConfigKeys keys(json, "", problems);
  const Family& family = find_family(keys, where);
  ModelConfig& model = result.model;
  model.architecture = family.architecture;
  read_sizes(keys, family, model, result.warnings);
  read_biases(keys, model, result.warnings);
  read_windows(keys, model, result.warnings);
  model.rope = read_rope(keys, model.max_position_embeddings, problems, result.warnings);
  read_token_ids(keys, family, model);
  model.file_dtype = read_dtype(keys);
  read_leftovers(keys, result.warnings);
  if (problems.empty()) problems = find_problems(model);
  CHECK_USER(problems.empty(), "[config] {}: {}", where, fmt::join(problems, "; "));
  result.stop_token_ids = read_stop_ids(generation_text, where, model);
  return result;
}

HfConfig load_hf_config(const std::filesystem::path& path) {
  std::error_code ignored;
  const bool is_folder = std::filesystem::is_directory(path, ignored);
  const std::filesystem::path file = is_folder ? path / "config.json" : path;
  const std::filesystem::path generation = file.parent_path() / "generation_config.json";
  const std::string text = read_text_file(file, kLargestFile, kWho);
  std::string generation_text;
  if (std::filesystem::exists(generation, ignored)) {
    generation_text = read_text_file(generation, kLargestFile, kWho);
  }
  return parse_hf_config(text, generation_text, file.string());
}

}  // namespace tessera
