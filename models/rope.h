// Frequencies of the rotary position embedding, computed on the host in double precision. The
// formulas are those of transformers' modeling_rope_utils (5.x), which computes in float: results
// agree to float round-off.
#pragma once

#include <cstdint>
#include <vector>

#include "models/config.h"

namespace tessera {

struct RopeFrequencies {
  // [rotary_dim / 2]: pair i of a head is dims i and i + rotary_dim / 2, turned by
  // position * inverse_frequencies[i].
  std::vector<double> inverse_frequencies;
  // Multiplies both cosine and sine (yarn); 1 for every other kind.
  double attention_scaling = 1.0;
};

// How many dims of a head rotate: head_dim unless partial_rotary_factor is below 1.
std::int64_t rotary_dim(const RopeConfig& rope, std::int64_t head_dim);

// `sequence_length` is the largest position plus one of the tokens to be rotated. Only the dynamic
// kind reads it, and only above original_max_position_embeddings; 0 means "not longer than that".
// The config must have passed validate().
RopeFrequencies rope_frequencies(const RopeConfig& rope, std::int64_t head_dim,
                                 std::int64_t sequence_length = 0);

}  // namespace tessera
