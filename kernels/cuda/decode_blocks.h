// Helper of quantize_blocks.cu that products without an FP8 kernel use.
#pragma once

#include <cstdint>

#include "engine/core/tensor.h"
#include "engine/device/stream.h"
#include "kernels/gemm.h"

namespace tessera::cuda {

// out = rows [first, first + out.rows()) of an FP8 operand times its scales of kVector or kBlock,
// as bf16. `in` has rows of a multiple of 16 bytes that start at such (check(Gemm)); out is dense.
void decode_blocks(const Tensor& in, const Tensor& scale, ScaleMode mode, std::int64_t first,
                   const Tensor& out, Stream& stream);

}  // namespace tessera::cuda
