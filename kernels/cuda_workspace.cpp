#include "kernels/cuda_workspace.h"

#include <algorithm>

namespace tessera::cuda {
namespace {

std::size_t compute_size(DType dtype) { return dtype == DType::kF64 ? 8 : 4; }
// What cuDNN's backward may take in one turn of heads; above it the own kernels run. 16,384 tokens
// of 1b take 5.5 GiB in one turn, and the step is 2% faster than in two (H200).
constexpr std::size_t kAttentionLibraryLimit = std::size_t{6} << 30;
// Elements of a decoded panel of a product without a kernel: 16 MiB keep its products large.
constexpr std::int64_t kPanelElements = std::int64_t{8} << 20;
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

RowParts column_sum_parts(std::int64_t rows, std::int64_t cols, const Capabilities& target) {
  // Enough blocks of 256 columns to fill the GPU twice, of at least 32 rows each.
  const std::int64_t column_blocks = std::max<std::int64_t>(1, ceil_div(cols, 256));
  const std::int64_t wanted =
      std::max<std::int64_t>(1, ceil_div(8 * target.sm_count, column_blocks));
  const std::int64_t parts = std::clamp<std::int64_t>(rows / 32, 1, wanted);
  const std::int64_t rows_per_part = std::max<std::int64_t>(1, ceil_div(rows, parts));
  return {std::max<std::int64_t>(1, ceil_div(rows, rows_per_part)), rows_per_part};
}

std::int64_t rmsnorm_parts(std::int64_t rows, std::int64_t hidden, const Capabilities& target) {
  // Blocks of narrow rows have few threads: more of them keep as much memory traffic in flight.
  const std::int64_t per_sm = std::clamp<std::int64_t>(8192 / std::max<std::int64_t>(1, hidden), 2, 4);
  return std::clamp<std::int64_t>(rows, 1, per_sm * std::max(1, target.sm_count));
}

std::int64_t qk_norm_parts(std::int64_t tokens, const Capabilities& target) {
  return std::clamp<std::int64_t>(tokens, 1, 4 * std::max(1, target.sm_count));
}

std::int64_t square_parts(std::int64_t count) {
  return std::clamp<std::int64_t>(ceil_div(count, 16384), 1, 2048);
}

bool gemm_sums_apart(const Gemm& args) {
  if (!args.bias.defined() || args.c.dtype != DType::kBF16) return false;
  // The library's kernels for rows that do not start at multiples of 16 bytes round the product
  // before they add the bias (measured, cuBLASLt 13.1).
  const bool is_aligned =
      args.a.row_stride % 8 == 0 && args.b.row_stride % 8 == 0 && args.c.row_stride % 8 == 0;
  return args.accumulate || !is_aligned;
}

std::size_t device_scratch(const Gemm& args, const Capabilities& target) {
  std::size_t bytes = target.gemm_workspace;
  if (gemm_sums_apart(args)) bytes += scratch_bytes(static_cast<std::size_t>(args.c.numel()) * 4);
  if (args.has_block_scales()) {
    bytes += scratch_bytes(panel_bytes(args.a)) + scratch_bytes(panel_bytes(args.b));
  }
  return bytes;
}

std::int64_t panel_rows(const Tensor& operand) {
  const std::int64_t fitting = kPanelElements / std::max<std::int64_t>(1, operand.cols());
  const std::int64_t whole = std::max<std::int64_t>(1, fitting / kScaleBlock) * kScaleBlock;
  return std::min(operand.rows(), whole);
}

std::size_t panel_bytes(const Tensor& operand) {
  return static_cast<std::size_t>(panel_rows(operand) * operand.cols()) * size_of(DType::kBF16);
}

std::size_t device_scratch(const RmsNormBackward& args, const Capabilities& target) {
  if (!args.dweight.defined()) return 0;
  return static_cast<std::size_t>(rmsnorm_parts(args.s.rows(), args.s.cols(), target) * args.s.cols()) *
         compute_size(args.s.dtype);
}

std::size_t device_scratch(const QkvRopeBackward& args, const Capabilities& target) {
  if (!args.dq_norm.defined() && !args.dk_norm.defined()) return 0;
  return static_cast<std::size_t>(qk_norm_parts(args.d.rows(), target) * 2 * args.layout.head_dim) *
         compute_size(args.d.dtype);
}

std::size_t device_scratch(const ColumnSum& args, const Capabilities& target) {
  const RowParts parts = column_sum_parts(args.in.rows(), args.in.cols(), target);
  return static_cast<std::size_t>(parts.parts * args.in.cols()) * compute_size(args.in.dtype);
}

std::size_t device_scratch(const SumOfSquares& args, const Capabilities&) {
  return static_cast<std::size_t>(square_parts(args.grad.numel())) * sizeof(double);
}

CudnnScratch cudnn_scratch(const AttentionForward& args, const Capabilities&) {
  if (args.q.dtype != DType::kBF16 || args.shape.head_dim % 16 != 0 || args.shape.head_dim > 256)
    return {};
  const std::int64_t documents = args.cu_q.numel() - 1;
  // Lengths (int32) of queries and keys; offsets (int64) of q, k, v, out and lse.
  CudnnScratch result;
  result.bounds =
      static_cast<std::size_t>(documents) * 2 * 4 + static_cast<std::size_t>(documents + 1) * 5 * 8;
  // Counters of the persistent kernel and, without lse, a throw-away copy of it.
  result.library = std::size_t{1} << 20;
  return result;
}

bool wgmma_attention_applies(const AttentionBackward& args, const Capabilities& target) {
  return args.q.dtype == DType::kBF16 && (args.shape.head_dim == 64 || args.shape.head_dim == 128) &&
         target.sm_arch == 90;
}

bool library_attention_comes_first(const AttentionBackward& args) {
  return !args.deterministic && args.shape.head_dim == 128;
}

bool mma_attention_applies(const AttentionBackward& args, const Capabilities& target) {
  return args.q.dtype == DType::kBF16 && args.shape.head_dim % 8 == 0 &&
         args.shape.head_dim <= 128 && target.sm_arch >= 80;
}

CudnnScratch cudnn_scratch(const AttentionBackward& args, const Capabilities&) {
  // Heads of 256 got wrong gradients from it (measured, cuDNN 9 on an H200).
  if (args.q.dtype != DType::kBF16 || args.shape.head_dim % 16 != 0 || args.shape.head_dim > 128)
    return {};
  // Fewer queries than keys got a wrong dv; cudnn_attention_backward also compares the bounds
  // themselves.
  if (args.q.rows() != args.k.rows()) return {};
  const std::int64_t documents = args.cu_q.numel() - 1;
  const std::int64_t group = args.shape.heads_q / args.shape.heads_kv;
  const std::int64_t length = ceil_div(std::min(args.shape.max_length, args.k.rows()), 128) * 128;
  const std::int64_t queries = ceil_div(std::min(args.shape.max_length, args.q.rows()), 128) * 128;
  for (std::int64_t heads_kv = args.shape.heads_kv; heads_kv > 0; --heads_kv) {
    const std::int64_t heads = heads_kv * group;
    // Whole turns, whose log-sum-exps start at multiples of 16 bytes.
    if (args.shape.heads_kv % heads_kv != 0 || (heads % 4 != 0 && heads_kv != args.shape.heads_kv))
      continue;
    CudnnScratch result;
    result.bounds = static_cast<std::size_t>(documents) * 2 * 4 +
                    static_cast<std::size_t>(documents + 1) * 9 * 8;
    result.heads_kv = heads_kv;
    std::int64_t library = args.q.rows() * args.shape.heads_q * 4;  // rows of dout . out
    if (group > 1) library += args.k.rows() * (args.dk.row_stride + args.dv.row_stride) * group * 4;
    if (args.deterministic) {
      // The gradient of the scores, stored so that dq is one ordered product.
      library += documents * heads * queries * length * 2;
    } else {
      library += args.q.rows() * args.dq.row_stride * 4;  // fp32 dq, added to by every key block
    }
    result.library = static_cast<std::size_t>(library) + (std::size_t{4} << 20);
    if (result.library <= kAttentionLibraryLimit) return result;
  }
  return {};
}

std::size_t device_scratch(const AttentionForward& args, const Capabilities& target) {
  const CudnnScratch cudnn = cudnn_scratch(args, target);
  return scratch_bytes(cudnn.bounds) + scratch_bytes(cudnn.library);
}

std::size_t device_scratch(const AttentionBackward& args, const Capabilities& target) {
  const std::size_t pairs = static_cast<std::size_t>(args.q.rows() * args.shape.heads_q);
  // One or two numbers per query and head for the own kernels.
  const std::size_t own = scratch_bytes(2 * pairs * compute_size(args.q.dtype));
  if (wgmma_attention_applies(args, target) && !library_attention_comes_first(args)) return own;
  const CudnnScratch cudnn = cudnn_scratch(args, target);
  return std::max(own, scratch_bytes(cudnn.bounds) + scratch_bytes(cudnn.library));
}

// The rest need none.
#define TESSERA_NO_SCRATCH(Arguments) \
  std::size_t device_scratch(const Arguments&, const Capabilities&) { return 0; }
TESSERA_NO_SCRATCH(EmbeddingForward)
TESSERA_NO_SCRATCH(EmbeddingBackward)
TESSERA_NO_SCRATCH(RmsNormForward)
TESSERA_NO_SCRATCH(QkvRopeForward)
TESSERA_NO_SCRATCH(SwiGluForward)
TESSERA_NO_SCRATCH(SwiGluBackward)
TESSERA_NO_SCRATCH(Add)
TESSERA_NO_SCRATCH(Scale)
TESSERA_NO_SCRATCH(SumParts)
TESSERA_NO_SCRATCH(Amax)
TESSERA_NO_SCRATCH(Quantize)
TESSERA_NO_SCRATCH(QuantizeBlocks)
TESSERA_NO_SCRATCH(CastLosses)
TESSERA_NO_SCRATCH(Transpose)
TESSERA_NO_SCRATCH(CrossEntropyStats)
TESSERA_NO_SCRATCH(CrossEntropyCombine)
TESSERA_NO_SCRATCH(CrossEntropyBackward)
TESSERA_NO_SCRATCH(StepControlFinish)
TESSERA_NO_SCRATCH(AdamW)
TESSERA_NO_SCRATCH(FillNormal)
#undef TESSERA_NO_SCRATCH

}  // namespace tessera::cuda
