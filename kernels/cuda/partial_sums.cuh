// Second stage of sums over rows: each block of a first kernel leaves one row of partial sums; this adds
// the rows in order, so the result does not depend on which block finished first.
#pragma once

#include "kernels/cuda/common.cuh"

namespace tessera::cuda {

// out[j] (+)= sum over p < parts of partial[p * stride + j], for j < cols. partial is fp32 (fp64 when out
// is fp64); out is dense, of any floating dtype.
void add_partial_sums(const void* partial, std::int64_t parts, std::int64_t stride, std::int64_t cols,
                      const Tensor& out, bool accumulate, Stream& stream);

}  // namespace tessera::cuda
