// Helpers of elementwise.cu that other kernels use.
#pragma once

#include "engine/core/tensor.h"
#include "engine/device/stream.h"

namespace tessera::cuda {

// out[t, j] = bias[j] (added to what is there if `accumulate`) on every row.
void add_bias(const Tensor& bias, bool accumulate, const Tensor& out, Stream& stream);

// out[t, j] = bias[j] + product[t, j] (and what is there if `accumulate`), rounded once; `product` is a
// dense fp32 tensor.
void add_product_and_bias(const Tensor& product, const Tensor& bias, bool accumulate, const Tensor& out,
                          Stream& stream);

}  // namespace tessera::cuda
