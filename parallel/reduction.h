// The arithmetic of reductions on the host: element-wise, always in rank order, so that a result
// does not depend on timing, on the backend or on which rank computed it.
#pragma once

#include <cstdint>
#include <span>

#include "engine/core/dtype.h"
#include "parallel/communicator.h"

namespace tessera {

// Combines element i of inputs[0], inputs[1], ... in that order and writes it to element i of every
// output, for i in [0, count). bf16 is accumulated in fp32 and rounded once; a maximum is NaN where
// any input is. An output may be one of the inputs.
void reduce_in_rank_order(DType dtype, ReduceOp op, std::span<const void* const> inputs,
                          std::span<void* const> outputs, std::int64_t count);

// Elements [begin, end) that rank `part` of `parts` reduces of `count`: boundaries fall on whole
// cache lines, so two ranks never write to the same one.
struct ElementRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t count() const { return end - begin; }
};
ElementRange slice_of(std::int64_t count, std::size_t element_bytes, int part, int parts);

}  // namespace tessera
