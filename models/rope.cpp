#include "models/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "engine/core/error.h"

namespace tessera {
namespace {

constexpr double kTwoPi = 2.0 * std::numbers::pi;

std::vector<double> base_frequencies(double theta, std::int64_t dims) {
  std::vector<double> result(static_cast<std::size_t>(dims / 2));
  for (std::size_t i = 0; i < result.size(); ++i) {
    const double exponent = 2.0 * static_cast<double>(i) / static_cast<double>(dims);
    result[i] = 1.0 / std::pow(theta, exponent);
  }
  return result;
}

// Llama 3.1: wavelengths far below the original context stay, far above it are stretched by
// `factor`, and between the two the frequency is blended.
void scale_llama3(const RopeConfig& rope, std::vector<double>& frequencies) {
  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  const double longest_kept = original / rope.high_freq_factor;
  const double shortest_stretched = original / rope.low_freq_factor;
  for (double& frequency : frequencies) {
    const double wavelength = kTwoPi / frequency;
    if (wavelength < longest_kept) continue;
    if (wavelength > shortest_stretched) {
      frequency /= rope.factor;
      continue;
    }
    const double kept = (original / wavelength - rope.low_freq_factor) /
                        (rope.high_freq_factor - rope.low_freq_factor);
    frequency = (1.0 - kept) * frequency / rope.factor + kept * frequency;
  }
}

// Dynamic NTK: a longer row than the model was trained on raises theta so that the slowest pair is
// stretched by exactly the ratio; shorter rows are untouched.
double dynamic_theta(const RopeConfig& rope, std::int64_t dims, std::int64_t sequence_length) {
  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  const double length = std::max(static_cast<double>(sequence_length), original);
  const double stretch = rope.factor * length / original - (rope.factor - 1.0);
  return rope.theta * std::pow(stretch, static_cast<double>(dims) / static_cast<double>(dims - 2));
}

// YaRN (Peng et al. 2023): the pair that turns `rotations` times within the original context.
double pair_of_rotations(const RopeConfig& rope, std::int64_t dims, double rotations) {
  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  return static_cast<double>(dims) * std::log(original / (rotations * kTwoPi)) /
         (2.0 * std::log(rope.theta));
}

// Pairs below `low` keep their frequency, pairs above `high` are stretched by `factor`, with a
// linear ramp between.
void scale_yarn(const RopeConfig& rope, std::int64_t dims, std::vector<double>& frequencies) {
  double low = pair_of_rotations(rope, dims, rope.beta_fast);
  double high = pair_of_rotations(rope, dims, rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(dims - 1));
  if (low == high) high += 0.001;  // a step, without a division by zero
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] = frequencies[i] / rope.factor * ramp + frequencies[i] * (1.0 - ramp);
  }
}

double yarn_scale(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double yarn_attention_scaling(const RopeConfig& rope) {
  if (rope.attention_factor) return *rope.attention_factor;
  const double mscale = rope.mscale.value_or(0.0);
  const double mscale_all_dim = rope.mscale_all_dim.value_or(0.0);
  if (mscale != 0.0 && mscale_all_dim != 0.0) {
    return yarn_scale(rope.factor, mscale) / yarn_scale(rope.factor, mscale_all_dim);
  }
  return yarn_scale(rope.factor, 1.0);
}

}  // namespace

std::int64_t rotary_dim(const RopeConfig& rope, std::int64_t head_dim) {
  return static_cast<std::int64_t>(static_cast<double>(head_dim) * rope.partial_rotary_factor);
}

RopeFrequencies rope_frequencies(const RopeConfig& rope, std::int64_t head_dim,
                                 std::int64_t sequence_length) {
  const std::int64_t dims = rotary_dim(rope, head_dim);
  CHECK(dims >= 2 && dims % 2 == 0, "[rope] {} rotating dims of head_dim {}, wanted an even number",
        dims, head_dim);
  RopeFrequencies result;
  switch (rope.kind) {
    case RopeKind::kDefault:
      result.inverse_frequencies = base_frequencies(rope.theta, dims);
      break;
    case RopeKind::kLinear:
      result.inverse_frequencies = base_frequencies(rope.theta, dims);
      for (double& frequency : result.inverse_frequencies) frequency /= rope.factor;
      break;
    case RopeKind::kDynamic:
      result.inverse_frequencies =
          base_frequencies(dynamic_theta(rope, dims, sequence_length), dims);
      break;
    case RopeKind::kLlama3:
      result.inverse_frequencies = base_frequencies(rope.theta, dims);
      scale_llama3(rope, result.inverse_frequencies);
      break;
    case RopeKind::kYarn:
      result.inverse_frequencies = base_frequencies(rope.theta, dims);
      scale_yarn(rope, dims, result.inverse_frequencies);
      result.attention_scaling = yarn_attention_scaling(rope);
      break;
  }
  return result;
}

}  // namespace tessera
