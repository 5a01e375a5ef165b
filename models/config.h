// ModelConfig: the shape of one Llama-style decoder, whatever file it came from. models/hf reads
// and writes it as a Hugging Face config.json; nothing else in the engine knows those spellings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/dtype.h"

namespace tessera {

enum class Architecture {
  kLlama,    // Llama 1, 2, 3, 3.1, 3.2, TinyLlama, SmolLM2
  kMistral,  // Llama with an optional sliding window on every layer
  kQwen2,    // Llama with biases on q, k and v (Qwen2, Qwen2.5)
  kQwen3,    // Llama with RMSNorm on each head of q and k
};

// The spelling of `model_type` in a config.json: "llama", "mistral", "qwen2", "qwen3".
std::string_view name_of(Architecture architecture);

enum class RopeKind { kDefault, kLinear, kDynamic, kLlama3, kYarn };

// The spelling of `rope_type`: "default", "linear", "dynamic", "llama3", "yarn".
std::string_view name_of(RopeKind kind);

// Rotary position embedding; models/rope.h turns it into frequencies. Members that a kind does not
// read keep their default.
struct RopeConfig {
  RopeKind kind = RopeKind::kDefault;
  double theta = 10000.0;
  double factor = 1.0;  // every kind but default
  // The length the model saw before its context was stretched: llama3 and yarn read it from the
  // file, dynamic takes max_position_embeddings. Never the training run's sequence length.
  std::int64_t original_max_position_embeddings = 0;
  double low_freq_factor = 1.0;            // llama3
  double high_freq_factor = 4.0;           // llama3
  std::optional<double> attention_factor;  // yarn: wins over mscale and the default
  std::optional<double> mscale;            // yarn: used only when both are given and not zero
  std::optional<double> mscale_all_dim;
  double beta_fast = 32.0;             // yarn
  double beta_slow = 1.0;              // yarn
  bool truncate = true;                // yarn: round the ends of the ramp to whole dims
  double partial_rotary_factor = 1.0;  // share of a head's dims, from the first, that rotate

  friend bool operator==(const RopeConfig&, const RopeConfig&) = default;
};

struct ModelConfig {
  Architecture architecture = Architecture::kLlama;
  std::int64_t vocab_size = 0;  // rows of the embedding; may exceed the tokenizer's size
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;  // need not be hidden_size / num_attention_heads
  double rms_norm_eps = 1e-6;
  std::int64_t max_position_embeddings = 0;
  bool tie_word_embeddings = false;
  double initializer_range = 0.02;
  bool attention_qkv_bias = false;
  bool attention_o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;  // RMSNorm over head_dim on q and k, before the rotation
  // Per layer: 0 sees every earlier token; w > 0 sees the w newest tokens, itself counted
  // (key > query - w, as in transformers). Empty: every layer sees all.
  std::vector<std::int64_t> sliding_windows;
  RopeConfig rope;
  std::optional<std::int64_t> bos_token_id;
  std::vector<std::int64_t> eos_token_ids;  // in the file's order; the first one ends documents
  std::optional<std::int64_t> pad_token_id;
  std::optional<DType> file_dtype;  // element type of the weights as published

  std::int64_t sliding_window(std::int64_t layer) const {
    return sliding_windows.empty() ? 0 : sliding_windows[static_cast<std::size_t>(layer)];
  }
  bool has_sliding_window() const {
    for (const std::int64_t window : sliding_windows) {
      if (window > 0) return true;
    }
    return false;
  }
  std::int64_t query_size() const { return num_attention_heads * head_dim; }
  std::int64_t key_value_size() const { return num_key_value_heads * head_dim; }

  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;
};

// Everything wrong with `config` as sentences ("num_attention_heads 6 is not a multiple of
// num_key_value_heads 4"); empty when the model can be built.
std::vector<std::string> find_problems(const ModelConfig& config);

// Throws one kUser error listing all of find_problems(); `where` names the file or section.
void validate(const ModelConfig& config, const std::string& where);

}  // namespace tessera
