// Token embedding over a shard of the vocabulary rows.
#pragma once

#include <cstdint>

#include "engine/core/tensor.h"

namespace tessera {

// out[t] = weight[tokens[t] - first_row], or zeros where the row is in another shard (the tp sum
// completes it). tokens [T] int32; weight [rows, hidden]; out [T, hidden] in weight's dtype.
struct EmbeddingForward {
  Tensor tokens;
  Tensor weight;
  Tensor out;
  std::int64_t first_row = 0;
};

// dweight[r] (+)= sum of dout[t] over the t with tokens[t] == first_row + r, in ascending t, so the
// result is reproducible. order [T] int32 holds the positions sorted by (token, position).
// Without accumulate every row of dweight is written. dweight may be fp32 or dout's dtype.
struct EmbeddingBackward {
  Tensor tokens;
  Tensor order;
  Tensor dout;
  Tensor dweight;
  std::int64_t first_row = 0;
  bool accumulate = false;
};

}  // namespace tessera
