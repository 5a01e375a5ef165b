// The CUDA implementations of attention; attention.cpp chooses.
#pragma once

#include "kernels/attention.h"
#include "engine/device/stream.h"

namespace tessera::cuda {

// Plain kernels for every dtype and head sizes up to 256; deterministic.
void plain_attention_forward(const AttentionForward& args, Stream& stream);
void plain_attention_backward(const AttentionBackward& args, Stream& stream);

// Tensor cores without a library, bf16; deterministic. False, without having done anything, where it does
// not apply (mma_attention_applies, alignment).
bool mma_attention_backward(const AttentionBackward& args, Stream& stream);

// The same on Hopper's warpgroup products, for heads of 64 or 128.
bool wgmma_attention_backward(const AttentionBackward& args, Stream& stream);

// cuDNN's fused kernels, bf16. False, without having done anything, where cuDNN has no kernel for these
// arguments (or is not part of this build).
bool cudnn_attention_forward(const AttentionForward& args, Stream& stream);
bool cudnn_attention_backward(const AttentionBackward& args, Stream& stream);

// What the library needs of the caller's document bounds: lengths[d] = cu[d + 1] - cu[d] (int32) and, for
// each stride, offsets[d] = cu[d] * stride (int64, one past the last document included).
struct DocumentOffsets {
  static constexpr int kMaxArrays = 9;
  const std::int32_t* cu_q = nullptr;
  const std::int32_t* cu_k = nullptr;
  std::int64_t documents = 0;
  std::int32_t* length_q = nullptr;
  std::int32_t* length_k = nullptr;
  int count = 0;
  struct Array {
    std::int64_t* offsets;
    std::int64_t stride;
    bool of_keys;
  } arrays[kMaxArrays] = {};
};
void fill_document_offsets(const DocumentOffsets& offsets, Stream& stream);

// Zeroes the rows at or past cu[documents] of each of up to three tensors.
void zero_rows_past_end(const Tensor& cu, std::initializer_list<Tensor> tensors, Stream& stream);

}  // namespace tessera::cuda
