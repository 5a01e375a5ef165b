#include "models/config.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "engine/core/error.h"
#include "models/rope.h"

namespace tessera {
namespace {

// Far above any model, low enough that a product of two of them stays in 63 bits.
constexpr std::int64_t kLargestSize = std::int64_t{1} << 31;

class Problems {
 public:
  template <typename... Args>
  void require(bool condition, fmt::format_string<Args...> format, Args&&... args) {
    if (!condition) found_.push_back(fmt::format(format, std::forward<Args>(args)...));
  }
  // False when the size cannot be used in further checks.
  bool require_size(const char* name, std::int64_t value) {
    const bool good = value >= 1 && value < kLargestSize;
    require(good, "{} is {}, wanted a number from 1 to {}", name, value, kLargestSize - 1);
    return good;
  }
  void require_positive(const char* name, double value) {
    require(std::isfinite(value) && value > 0, "{} is {}, wanted a positive number", name, value);
  }
  std::vector<std::string> take() { return std::move(found_); }

 private:
  std::vector<std::string> found_;
};

void check_rope(const ModelConfig& config, Problems& problems) {
  const RopeConfig& rope = config.rope;
  problems.require_positive("rope theta", rope.theta);
  const bool good_share = std::isfinite(rope.partial_rotary_factor) &&
                          rope.partial_rotary_factor > 0 && rope.partial_rotary_factor <= 1;
  problems.require(good_share, "partial_rotary_factor is {}, wanted a number above 0 and up to 1",
                   rope.partial_rotary_factor);
  if (good_share) {
    const std::int64_t dims = rotary_dim(rope, config.head_dim);
    problems.require(dims >= 2 && dims % 2 == 0,
                     "{} dims of each head rotate (head_dim {} times partial_rotary_factor {}); "
                     "wanted an even number",
                     dims, config.head_dim, rope.partial_rotary_factor);
    problems.require(rope.kind != RopeKind::kDynamic || dims > 2,
                     "rope_type dynamic needs more than 2 rotating dims, head_dim is {}",
                     config.head_dim);
  }
  if (rope.kind == RopeKind::kDefault) return;
  const std::string_view kind = name_of(rope.kind);
  problems.require(std::isfinite(rope.factor) && rope.factor >= 1,
                   "rope factor is {} (rope_type {}), wanted a number of at least 1", rope.factor,
                   kind);
  if (rope.kind == RopeKind::kLinear) return;
  problems.require(rope.original_max_position_embeddings >= 1,
                   "rope original_max_position_embeddings is {} (rope_type {}), wanted at least 1",
                   rope.original_max_position_embeddings, kind);
  if (rope.kind == RopeKind::kLlama3) {
    problems.require_positive("rope low_freq_factor", rope.low_freq_factor);
    problems.require(
        std::isfinite(rope.high_freq_factor) && rope.high_freq_factor > rope.low_freq_factor,
        "rope high_freq_factor {} must be above low_freq_factor {}", rope.high_freq_factor,
        rope.low_freq_factor);
  }
  if (rope.kind == RopeKind::kYarn) {
    problems.require(rope.theta > 1, "rope theta is {}, yarn wants a number above 1", rope.theta);
    problems.require_positive("rope beta_slow", rope.beta_slow);
    problems.require(std::isfinite(rope.beta_fast) && rope.beta_fast >= rope.beta_slow,
                     "rope beta_fast {} must not be below beta_slow {}", rope.beta_fast,
                     rope.beta_slow);
    if (rope.attention_factor) {
      problems.require_positive("rope attention_factor", *rope.attention_factor);
    }
    for (const std::optional<double>& scale : {rope.mscale, rope.mscale_all_dim}) {
      problems.require(!scale || (std::isfinite(*scale) && *scale >= 0),
                       "rope mscale and mscale_all_dim must not be negative, got {}",
                       scale.value_or(0));
    }
  }
}

}  // namespace

std::string_view name_of(Architecture architecture) {
  switch (architecture) {
    case Architecture::kLlama:
      return "llama";
    case Architecture::kMistral:
      return "mistral";
    case Architecture::kQwen2:
      return "qwen2";
    case Architecture::kQwen3:
      return "qwen3";
  }
  return "unknown";
}

std::string_view name_of(RopeKind kind) {
  switch (kind) {
    case RopeKind::kDefault:
      return "default";
    case RopeKind::kLinear:
      return "linear";
    case RopeKind::kDynamic:
      return "dynamic";
    case RopeKind::kLlama3:
      return "llama3";
    case RopeKind::kYarn:
      return "yarn";
  }
  return "unknown";
}

std::vector<std::string> find_problems(const ModelConfig& config) {
  Problems problems;
  problems.require_size("vocab_size", config.vocab_size);
  problems.require_size("hidden_size", config.hidden_size);
  problems.require_size("intermediate_size", config.intermediate_size);
  problems.require_size("num_hidden_layers", config.num_hidden_layers);
  const bool heads = problems.require_size("num_attention_heads", config.num_attention_heads);
  const bool kv_heads = problems.require_size("num_key_value_heads", config.num_key_value_heads);
  problems.require_size("max_position_embeddings", config.max_position_embeddings);
  if (heads && kv_heads) {
    problems.require(config.num_attention_heads % config.num_key_value_heads == 0,
                     "num_attention_heads {} is not a multiple of num_key_value_heads {}",
                     config.num_attention_heads, config.num_key_value_heads);
  }
  if (problems.require_size("head_dim", config.head_dim)) {
    if (heads) {
      problems.require(config.query_size() < kLargestSize,
                       "num_attention_heads {} times head_dim {} is too large",
                       config.num_attention_heads, config.head_dim);
    }
    check_rope(config, problems);
  }
  problems.require_positive("rms_norm_eps", config.rms_norm_eps);
  problems.require(std::isfinite(config.initializer_range) && config.initializer_range >= 0,
                   "initializer_range is {}, wanted a number that is not negative",
                   config.initializer_range);
  problems.require(
      config.sliding_windows.empty() ||
          static_cast<std::int64_t>(config.sliding_windows.size()) == config.num_hidden_layers,
      "{} layers have a sliding window entry, num_hidden_layers is {}",
      config.sliding_windows.size(), config.num_hidden_layers);
  for (const std::int64_t window : config.sliding_windows) {
    problems.require(window >= 0, "sliding window is {}, wanted 0 (none) or more", window);
    if (window < 0) break;
  }
  return problems.take();
}

void validate(const ModelConfig& config, const std::string& where) {
  const std::vector<std::string> problems = find_problems(config);
  CHECK_USER(problems.empty(), "[model] {}: {}", where, fmt::join(problems, "; "));
}

}  // namespace tessera
