#include "engine/infer/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "engine/core/error.h"
#include "engine/core/philox.h"

namespace tessera {

void validate(const SamplingOptions& options) {
  CHECK_USER(options.temperature >= 0, "[generate] temperature is {}, expected 0 (greedy) or more",
             options.temperature);
  CHECK_USER(options.top_k >= 0, "[generate] top_k is {}, expected 0 (all) or more", options.top_k);
  CHECK_USER(options.top_p > 0 && options.top_p <= 1, "[generate] top_p is {}, expected (0, 1]",
             options.top_p);
}

std::int32_t sample_token(std::span<const float> logits, const SamplingOptions& options,
                          std::uint64_t index) {
  const auto best = std::max_element(logits.begin(), logits.end());
  const bool is_finite = std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); });
  CHECK(is_finite, "[generate] the model's logits are not finite: its weights are damaged or overflowed");
  if (options.temperature == 0) return static_cast<std::int32_t>(best - logits.begin());

  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  // Ties in order of the id, so the choice never depends on the sort.
  std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    const float x = logits[static_cast<std::size_t>(a)];
    const float y = logits[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  });
  std::size_t kept = order.size();
  if (options.top_k > 0) kept = std::min(kept, static_cast<std::size_t>(options.top_k));
  std::vector<double> weights(kept);
  double sum = 0;
  for (std::size_t i = 0; i < kept; ++i) {
    const double logit = logits[static_cast<std::size_t>(order[i])];
    weights[i] = std::exp((logit - *best) / options.temperature);
    sum += weights[i];
  }
  double reached = 0;
  for (std::size_t i = 0; i < kept; ++i) {
    reached += weights[i];
    if (reached >= options.top_p * sum) {
      kept = i + 1;
      break;
    }
  }
  const double target = static_cast<double>(philox_uniform(derive_key(options.seed, RandomPurpose::kSampling), index)) *
                        reached;
  double at = 0;
  for (std::size_t i = 0; i < kept; ++i) {
    at += weights[i];
    if (target < at) return order[i];
  }
  return order[kept - 1];
}

}  // namespace tessera
