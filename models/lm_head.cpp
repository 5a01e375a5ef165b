#include "models/lm_head.h"

#include <algorithm>

#include "engine/memory/scratch.h"
#include "kernels/ops.h"
#include "models/embedding.h"

namespace tessera {
namespace {

// Logits of one chunk stay under this many bytes. Every chunk reads and writes the whole gradient of the
// weight once: with chunks of 256 MiB that is 1.4% of a 1b step (counted: 67 GB of 65,536 tokens).
constexpr std::int64_t kChunkBytes = std::int64_t{2} << 30;
constexpr std::int64_t kMinChunkRows = 128;

std::int64_t chunk_rows(std::int64_t tokens, std::int64_t vocab_rows, DType dtype) {
  const std::int64_t row_bytes = vocab_rows * static_cast<std::int64_t>(size_of(dtype));
  return std::min(tokens, std::max(kMinChunkRows, kChunkBytes / row_bytes / 128 * 128));
}

}  // namespace

LmHead::LmHead(const ModelConfig& config, bool sequence_parallel, ParamId tied,
               ParamRegistry& registry, int bucket)
    : vocab_size_(config.vocab_size),
      norm_(registry, bucket, "model.norm", config.hidden_size,
            static_cast<float>(config.rms_norm_eps), sequence_parallel),
      weight_(tied.defined() ? tied
                             : registry.add(bucket, vocab_matrix_spec(config, "lm_head.weight"))) {}

LmHead::Saved LmHead::plan_saved(const ModelConfig& config, const BatchGeometry& g, Arena& arena) {
  const auto take = [&](const char* what, DType dtype, Shape shape) {
    return arena.allocate(std::string("head ") + what, dtype, shape, MemoryClass::kActivations);
  };
  const Shape stream{g.local_tokens, config.hidden_size};
  return Saved{take("sum", g.compute, stream), take("rstd", g.statistics(), Shape{g.local_tokens}),
               take("normed", g.compute, stream), Tensor{}, Tensor{}};
}

void LmHead::loss(const Residual& residual, const Tensor& targets, const Tensor& loss_sum,
                  const Tensor& nll, const Saved& saved, LayerContext& context) const {
  run(residual, targets, loss_sum, nll, false, saved, context);
}

void LmHead::loss_and_backward(const Residual& residual, const Tensor& targets,
                               const Tensor& loss_sum, const Saved& saved,
                               LayerContext& context) const {
  run(residual, targets, loss_sum, Tensor{}, true, saved, context);
}

void LmHead::run(const Residual& residual, const Tensor& targets, const Tensor& loss_sum,
                 const Tensor& nll, bool with_backward, const Saved& saved,
                 LayerContext& context) const {
  Stream& stream = context.stream;
  const std::int64_t tokens = targets.numel();
  const std::int64_t hidden = saved.normed.cols();
  const int shards = context.tensor.size();
  const bool is_split = saved.normed.rows() != tokens;
  const DType compute = saved.normed.dtype;
  const DType statistics = saved.rstd.dtype;

  norm_.forward(residual.x, residual.delta, saved.sum, GemmOperand{saved.normed}, saved.rstd,
                context);
  const ScratchTensor gathered(stream, compute, Shape{is_split ? tokens : 0, hidden});
  if (is_split) context.tensor.all_gather(saved.normed, *gathered, stream);
  const Tensor& input = is_split ? *gathered : saved.normed;
  // Gradient of the norm's output, whole: partial over the vocabulary shards until reduced.
  const ScratchTensor dinput(stream, compute, Shape{with_backward ? tokens : 0, hidden});

  const Tensor weight = context.params.weight(weight_);
  const std::int64_t first_row = weight.rows() * context.tensor.rank();
  const std::int64_t valid = std::clamp<std::int64_t>(vocab_size_ - first_row, 0, weight.rows());
  const std::int64_t chunk = chunk_rows(tokens, weight.rows(), compute);
  for (std::int64_t begin = 0; begin < tokens; begin += chunk) {
    const std::int64_t count = std::min(chunk, tokens - begin);
    const Tensor x = input.row_slice(begin, count);
    const Tensor chunk_targets = targets.flat_slice(begin, count);
    const ScratchTensor logits(stream, compute, Shape{count, weight.rows()});
    const ScratchTensor stats(stream, statistics, Shape{shards, count, 3});
    const ScratchTensor lse(stream, statistics, Shape{count});
    Gemm project{x, weight, *logits};
    project.transpose_b = true;
    gemm(project, stream);
    const Tensor own = stats->reshape(Shape{shards * count * 3})
                           .flat_slice(context.tensor.rank() * count * 3, count * 3)
                           .reshape(Shape{count, 3});
    cross_entropy_stats(CrossEntropyStats{*logits, chunk_targets, own, first_row, valid}, stream);
    context.tensor.all_gather(own, *stats, stream);
    cross_entropy_combine(
        CrossEntropyCombine{*stats, chunk_targets, *lse,
                            nll.defined() ? nll.flat_slice(begin, count) : Tensor{}, loss_sum},
        stream);
    if (!with_backward) continue;
    cross_entropy_backward(CrossEntropyBackward{*logits, chunk_targets, *lse, first_row, valid},
                           stream);
    gemm(Gemm{*logits, weight, dinput->row_slice(begin, count)}, stream);
    const GradientTarget target = context.params.gradient(weight_);
    Gemm dweight{*logits, x, target.tensor};
    dweight.transpose_a = true;
    dweight.accumulate = target.accumulate;
    gemm(dweight, stream);
  }
  if (!with_backward) return;
  if (is_split) {
    const ScratchTensor dnormed(stream, compute, saved.normed.shape);
    context.tensor.reduce_scatter(*dinput, *dnormed, ReduceOp::kSum, stream);
    norm_.backward(*dnormed, saved.sum, saved.rstd, saved.d, false, saved.d_amax, context);
  } else {
    context.tensor.all_reduce(*dinput, ReduceOp::kSum, stream);
    norm_.backward(*dinput, saved.sum, saved.rstd, saved.d, false, saved.d_amax, context);
  }
}

void LmHead::logits(const Residual& residual, std::int64_t first, const Tensor& logits,
                    const Saved& saved, LayerContext& context) const {
  Stream& stream = context.stream;
  CHECK(!context.sequence_parallel || context.tensor.size() == 1,
        "[lm_head] logits are taken without sequence parallelism");
  norm_.forward(residual.x, residual.delta, saved.sum, GemmOperand{saved.normed}, Tensor{},
                context);
  const Tensor weight = context.params.weight(weight_);
  const std::int64_t count = logits.rows();
  const int shards = context.tensor.size();
  // Shards arrive one behind the other; columns are then set side by side without the padding.
  const ScratchTensor pieces(stream, logits.dtype, Shape{shards, count, weight.rows()});
  const Tensor flat = pieces->reshape(Shape{shards * count, weight.rows()});
  const Tensor own = flat.row_slice(context.tensor.rank() * count, count);
  Gemm project{saved.normed.row_slice(first, count), weight, own};
  project.transpose_b = true;
  gemm(project, stream);
  context.tensor.all_gather(own, flat, stream);
  for (int shard = 0; shard < shards; ++shard) {
    const std::int64_t begin = weight.rows() * shard;
    const std::int64_t valid = std::clamp<std::int64_t>(vocab_size_ - begin, 0, weight.rows());
    if (valid == 0) continue;
    scale(Scale{flat.row_slice(shard * count, count).col_slice(0, valid),
                logits.col_slice(begin, valid)},
          stream);
  }
}

}  // namespace tessera
