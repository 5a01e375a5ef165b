// Cross-entropy over a shard of the vocabulary, in three ops so that the tensor-parallel exchange stands
// between them and the full logits never exist: stats of this shard, combination over the shards, and
// the gradient in place of the logits. A target < 0 is ignored: it adds exactly zero.
#pragma once

#include <cstdint>

#include "engine/core/tensor.h"

namespace tessera {

// stats[c] = {max, sum of exp(logit - max), target logit or 0 if in another shard}: [C, 3] fp32
// (fp64 for fp64). Columns at or past valid_cols are padding and take no part.
struct CrossEntropyStats {
  Tensor logits;   // [C, vocab_shard]
  Tensor targets;  // [C] int32, global token ids
  Tensor stats;
  std::int64_t first_row = 0;   // global id of column 0
  std::int64_t valid_cols = 0;
};

// lse[c] = log-sum-exp over all shards; nll[c] = lse - target logit (0 where ignored);
// loss_sum += sum of nll; correct order of summation is fixed.
struct CrossEntropyCombine {
  Tensor stats;    // [shards, C, 3]
  Tensor targets;  // [C] int32
  Tensor lse;      // [C] fp32 (fp64)
  Tensor nll;      // [C] fp32 (fp64), or undefined
  Tensor loss_sum; // [1] fp64, added to
};

// logits -> dlogits = softmax - onehot(target) for counted rows, 0 for ignored rows and padding:
// the gradient of the summed loss, not divided by anything.
struct CrossEntropyBackward {
  Tensor logits;   // [C, vocab_shard], in place
  Tensor targets;  // [C] int32
  Tensor lse;      // [C]
  std::int64_t first_row = 0;
  std::int64_t valid_cols = 0;
};

}  // namespace tessera
