#include "models/hf/names.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

#include "checkpoint/safetensors_header.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

constexpr std::string_view kModelPrefix = "model.";
constexpr std::size_t kMostListed = 8;

void add_linear(std::vector<HfTensor>& list, const std::string& module, std::int64_t out,
                std::int64_t in, bool bias) {
  list.push_back({module + ".weight", {out, in}});
  if (bias) list.push_back({module + ".bias", {out}});
}

void add_layer(std::vector<HfTensor>& list, const ModelConfig& config, std::int64_t layer) {
  const std::string prefix = layer_prefix(layer);
  const std::string attention = prefix + "self_attn.";
  const std::string mlp = prefix + "mlp.";
  const std::int64_t hidden = config.hidden_size;
  list.push_back({prefix + "input_layernorm.weight", {hidden}});
  add_linear(list, attention + "q_proj", config.query_size(), hidden, config.attention_qkv_bias);
  add_linear(list, attention + "k_proj", config.key_value_size(), hidden,
             config.attention_qkv_bias);
  add_linear(list, attention + "v_proj", config.key_value_size(), hidden,
             config.attention_qkv_bias);
  if (config.qk_norm) {
    list.push_back({attention + "q_norm.weight", {config.head_dim}});
    list.push_back({attention + "k_norm.weight", {config.head_dim}});
  }
  add_linear(list, attention + "o_proj", hidden, config.query_size(), config.attention_o_bias);
  list.push_back({prefix + "post_attention_layernorm.weight", {hidden}});
  add_linear(list, mlp + "gate_proj", config.intermediate_size, hidden, config.mlp_bias);
  add_linear(list, mlp + "up_proj", config.intermediate_size, hidden, config.mlp_bias);
  add_linear(list, mlp + "down_proj", hidden, config.intermediate_size, config.mlp_bias);
}

// Buffers that files of before transformers 4.32 hold beside the weights: recomputed, never read.
bool is_rotary_buffer(std::string_view name) {
  return name.ends_with("rotary_emb.inv_freq") || name.ends_with("rotary_emb.cos_cached") ||
         name.ends_with("rotary_emb.sin_cached");
}

// Tensors of a quantised file, whose names give the method away.
bool is_quantised_part(std::string_view name) {
  for (const std::string_view ending :
       {".qweight", ".qzeros", ".scales", ".g_idx", ".weight.absmax", ".weight.quant_map",
        ".weight_scale", ".weight_scale_inv", ".weight_packed"}) {
    if (name.ends_with(ending)) return true;
  }
  return name.find(".weight.quant_state.") != std::string_view::npos;
}

// Gathers mistakes of one kind and says at most a few of them.
class Listing {
 public:
  explicit Listing(std::string_view title) : title_(title) {}
  void add(std::string item) {
    ++count_;
    if (items_.size() < kMostListed) items_.push_back(std::move(item));
  }
  void append_to(std::string& message) const {
    if (count_ == 0) return;
    message += fmt::format("\n  {} {}: {}", count_, title_, fmt::join(items_, ", "));
    if (count_ > items_.size()) message += fmt::format(" and {} more", count_ - items_.size());
  }

 private:
  std::string_view title_;
  std::size_t count_ = 0;
  std::vector<std::string> items_;
};

// True when both tensors hold the same bytes; compared piece by piece.
bool same_bytes(const SafetensorsFolder::Entry& a, const SafetensorsFolder::Entry& b) {
  if (a.tensor->dtype != b.tensor->dtype || a.tensor->bytes() != b.tensor->bytes()) return false;
  constexpr std::size_t kPiece = std::size_t{4} << 20;
  std::vector<char> bytes_a(std::min<std::uint64_t>(kPiece, a.tensor->bytes()));
  std::vector<char> bytes_b(bytes_a.size());
  for (std::uint64_t at = 0; at < a.tensor->bytes(); at += kPiece) {
    const std::size_t piece = std::min<std::uint64_t>(kPiece, a.tensor->bytes() - at);
    a.file->read_bytes(*a.tensor, at, piece, bytes_a.data());
    b.file->read_bytes(*b.tensor, at, piece, bytes_b.data());
    if (std::memcmp(bytes_a.data(), bytes_b.data(), piece) != 0) return false;
  }
  return true;
}

// Files of the bare decoder (LlamaModel and the like) leave out "model.".
bool lacks_model_prefix(const SafetensorsFolder& folder) {
  return folder.find("embed_tokens.weight") != nullptr && folder.find(kEmbeddingName) == nullptr;
}

std::string name_in_file(const std::string& name, bool without_prefix) {
  const bool strip = without_prefix && name.starts_with(kModelPrefix);
  return strip ? name.substr(kModelPrefix.size()) : name;
}

void check_tied_head(const ModelConfig& config, const SafetensorsFolder& folder,
                     const std::string& embedding_name, TiedDuplicate tied, HfNameMap& map,
                     std::string& problem) {
  const SafetensorsFolder::Entry* head = folder.find(kLmHeadName);
  const SafetensorsFolder::Entry* embedding = folder.find(embedding_name);
  if (!config.tie_word_embeddings || head == nullptr || embedding == nullptr) return;
  if (tied == TiedDuplicate::kCompare && !same_bytes(*head, *embedding)) {
    problem = fmt::format(
        "\n  tie_word_embeddings is true, but {} differs from {}. Set "
        "tie_word_embeddings to false in config.json to use both",
        kLmHeadName, embedding_name);
    return;
  }
  map.notes.push_back(
      fmt::format("{} is a copy of the tied embedding and is not read again", kLmHeadName));
}

}  // namespace

std::string layer_prefix(std::int64_t layer) { return fmt::format("model.layers.{}.", layer); }

std::vector<HfTensor> hf_tensors(const ModelConfig& config) {
  std::vector<HfTensor> list;
  list.push_back({std::string(kEmbeddingName), {config.vocab_size, config.hidden_size}});
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    add_layer(list, config, layer);
  }
  list.push_back({std::string(kFinalNormName), {config.hidden_size}});
  if (!config.tie_word_embeddings) {
    list.push_back({std::string(kLmHeadName), {config.vocab_size, config.hidden_size}});
  }
  return list;
}

std::int64_t parameter_count(const ModelConfig& config) {
  std::int64_t total = 0;
  for (const HfTensor& tensor : hf_tensors(config)) {
    std::int64_t numel = 1;
    for (const std::int64_t dim : tensor.shape) numel *= dim;
    total += numel;
  }
  return total;
}

std::vector<SafetensorsSpec> export_specs(const ModelConfig& config, DType dtype) {
  std::vector<SafetensorsSpec> specs;
  for (HfTensor& tensor : hf_tensors(config)) {
    specs.push_back({std::move(tensor.name), dtype, std::move(tensor.shape)});
  }
  return specs;
}

HfNameMap match_hf_tensors(const ModelConfig& config, const SafetensorsFolder& folder,
                           TiedDuplicate tied) {
  HfNameMap map;
  Listing missing("missing");
  Listing wrong_shape("of the wrong shape");
  Listing wrong_dtype("not in floating point");
  Listing unexpected("unexpected");
  std::string tied_problem;
  std::string hint;

  const bool without_prefix = lacks_model_prefix(folder);
  if (without_prefix) map.notes.push_back("names in the file lack the leading \"model.\"");
  std::set<std::string, std::less<>> known;
  for (const HfTensor& tensor : hf_tensors(config)) {
    const std::string name = name_in_file(tensor.name, without_prefix);
    known.insert(name);
    map.file_name_of.emplace(tensor.name, name);
    const SafetensorsFolder::Entry* entry = folder.find(name);
    if (entry == nullptr) {
      missing.add(name);
      if (tensor.name == kLmHeadName) {
        hint +=
            "\n  If the output matrix is the embedding, set tie_word_embeddings to true in "
            "config.json";
      }
      continue;
    }
    if (entry->tensor->shape != tensor.shape) {
      wrong_shape.add(fmt::format("{} [{}] instead of [{}]", name,
                                  fmt::join(entry->tensor->shape, ", "),
                                  fmt::join(tensor.shape, ", ")));
    }
    if (!entry->tensor->dtype || !is_floating(*entry->tensor->dtype)) {
      wrong_dtype.add(fmt::format("{} ({})", name, entry->tensor->stored_dtype));
    }
  }
  check_tied_head(config, folder, name_in_file(std::string(kEmbeddingName), without_prefix), tied,
                  map, tied_problem);
  bool quantised = false;
  for (const auto& [name, entry] : folder.entries()) {
    if (known.contains(name) || is_rotary_buffer(name)) continue;
    if (config.tie_word_embeddings && name == kLmHeadName) continue;
    quantised = quantised || is_quantised_part(name);
    unexpected.add(printable_name(name));
  }
  if (quantised) hint += "\n  The file holds quantised weights; use the 16-bit model";

  std::string mistakes;
  missing.append_to(mistakes);
  wrong_shape.append_to(mistakes);
  wrong_dtype.append_to(mistakes);
  unexpected.append_to(mistakes);
  mistakes += tied_problem;
  CHECK_USER(mistakes.empty(), "[model] the tensors of {} do not fit its config.json:{}{}",
             folder.path().string(), mistakes, hint);
  return map;
}

}  // namespace tessera
