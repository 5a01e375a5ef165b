// The arithmetic of reductions on a GPU: element-wise, in rank order, as reduce_in_rank_order on the host.
#pragma once

#include <cstdint>
#include <span>

#include "engine/core/dtype.h"
#include "parallel/communicator.h"

namespace tessera::cuda {

inline constexpr int kMaxReducedParts = 64;

// Combines element i of inputs[0], inputs[1], ... in that order and writes it to element i of every
// output, for i in [0, count). All are memory of the stream's GPU, at most kMaxReducedParts of each. bf16
// is accumulated in fp32 and rounded once; a maximum is NaN where any input is. An output may be one of
// the inputs.
void reduce_parts(DType dtype, ReduceOp op, std::span<const void* const> inputs, std::span<void* const> outputs,
                  std::int64_t count, Stream& stream);

}  // namespace tessera::cuda
