// The sizes of one micro-batch on one rank.
#pragma once

#include <cstdint>

#include "engine/core/dtype.h"

namespace tessera {

struct BatchGeometry {
  std::int64_t tokens = 0;           // of the micro-batch on this rank, padded to a multiple of tp
  int context_ranks = 1;             // that share its tokens: parallel/context_split.h
  std::int64_t local_tokens = 0;     // tokens between blocks: tokens / tp under sequence parallelism
  std::int64_t max_documents = 0;    // documents are given by max_documents + 1 cumulative lengths
  std::int64_t max_length = 0;       // longest document possible: the sequence length
  DType compute = DType::kBF16;

  // Statistics (rstd, log-sum-exp, per-token losses) are fp32, fp64 when everything is.
  DType statistics() const { return compute == DType::kF64 ? DType::kF64 : DType::kF32; }
};

}  // namespace tessera
