// Choosing the next token from logits. Pure functions on the host: every rank of a tensor-parallel group
// holds the same logits and so chooses the same token.
#pragma once

#include <cstdint>
#include <span>

namespace tessera {

struct SamplingOptions {
  // 0: greedy (the largest logit; the smallest id among equals).
  double temperature = 0.0;
  // Keep only the k most likely tokens; 0: all.
  std::int64_t top_k = 0;
  // Keep the smallest set of most likely tokens whose probabilities reach top_p.
  double top_p = 1.0;
  std::uint64_t seed = 42;
};

// kUser, naming the option, if a value is out of range.
void validate(const SamplingOptions& options);

// The token that follows; `index` is its place in the generated text and keys the random number, so a
// generation is a pure function of (logits, options). Logits must be finite (kInternal otherwise).
std::int32_t sample_token(std::span<const float> logits, const SamplingOptions& options,
                          std::uint64_t index);

}  // namespace tessera
