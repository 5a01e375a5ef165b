// Helpers of elementwise.cu that other kernels use.
#pragma once

#include "engine/core/tensor.h"
#include "engine/device/stream.h"

namespace tessera::cuda {

// out[t, j] += bias[j] on every row.
void add_bias(const Tensor& bias, const Tensor& out, Stream& stream);

}  // namespace tessera::cuda
