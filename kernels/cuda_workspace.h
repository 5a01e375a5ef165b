// Scratch of the CUDA backend's ops, as functions of shapes and capabilities alone: a run can be planned
// on a machine without a GPU. The kernels size their pieces with the same functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/ops.h"

namespace tessera::cuda {

// Total scratch bytes of an op on a CUDA device with these capabilities.
#define TESSERA_DECLARE_CUDA_WORKSPACE(function, Arguments) \
  std::size_t device_scratch(const Arguments& args, const Capabilities& target);
TESSERA_OPS(TESSERA_DECLARE_CUDA_WORKSPACE)
#undef TESSERA_DECLARE_CUDA_WORKSPACE

// Scratch pieces start at multiples of 256 bytes.
constexpr std::size_t scratch_bytes(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// Whether a product into bf16 is made in fp32 scratch first: it is added to a bias, and c, in one rounding.
bool gemm_sums_apart(const Gemm& args);

// Operands of a product with block scales that has no kernel are decoded to bf16 this many rows at a
// time: a multiple of kScaleBlock, or all of them.
std::int64_t panel_rows(const Tensor& operand);
std::size_t panel_bytes(const Tensor& operand);

// Rows of partial sums that column_sum leaves; the row pieces are equal but the last.
struct RowParts {
  std::int64_t parts = 0;
  std::int64_t rows_per_part = 0;
};
RowParts column_sum_parts(std::int64_t rows, std::int64_t cols, const Capabilities& target);

// Blocks of the backward norms, each with one row of partial weight gradients.
std::int64_t rmsnorm_parts(std::int64_t rows, std::int64_t hidden, const Capabilities& target);
std::int64_t qk_norm_parts(std::int64_t tokens, const Capabilities& target);

// Partial sums of sum_of_squares: independent of the device.
std::int64_t square_parts(std::int64_t count);

// Whether the tensor-core kernels of attention's backward take these shapes: those of Hopper, those
// of any GPU since Ampere.
bool wgmma_attention_applies(const AttentionBackward& args, const Capabilities& target);
// Whether cuDNN is asked before them: its sums in free order are faster for heads of 128 (H200, cuDNN 9.19).
bool library_attention_comes_first(const AttentionBackward& args);
bool mma_attention_applies(const AttentionBackward& args, const Capabilities& target);

// Scratch of the cuDNN attention paths: the bounds and offsets of documents, and the library's own
// workspace. Zero where the path does not apply.
struct CudnnScratch {
  std::size_t bounds = 0;
  std::size_t library = 0;
  // Backward: key heads of one call, with their query heads. The library stores documents x heads x
  // length^2 gradients of scores where the result must be deterministic; with heads in turns that is bounded.
  std::int64_t heads_kv = 0;
};
CudnnScratch cudnn_scratch(const AttentionForward& args, const Capabilities& target);
CudnnScratch cudnn_scratch(const AttentionBackward& args, const Capabilities& target);

}  // namespace tessera::cuda
