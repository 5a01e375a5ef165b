#include "models/embedding.h"

#include "engine/memory/scratch.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

// Rows of a vocabulary shard are a multiple of this, so that GEMMs over them stay aligned.
constexpr std::int64_t kVocabQuantum = 16;

}  // namespace

ParamSpec vocab_matrix_spec(const ModelConfig& config, std::string name) {
  ParamSpec spec;
  spec.name = std::move(name);
  spec.shape = Shape{config.vocab_size, config.hidden_size};
  spec.placement = Placement::sharded(0, kVocabQuantum);
  spec.init_std = static_cast<float>(config.initializer_range);
  spec.decay = true;
  return spec;
}

VocabParallelEmbedding::VocabParallelEmbedding(const ModelConfig& config, ParamRegistry& registry,
                                               int bucket)
    : weight_(registry.add(bucket, vocab_matrix_spec(config, "model.embed_tokens.weight"))) {}

void VocabParallelEmbedding::forward(const Tensor& tokens, const Tensor& out,
                                     LayerContext& context) const {
  const Tensor weight = context.params.weight(weight_);
  EmbeddingForward args{tokens, weight, out, weight.rows() * context.tensor.rank()};
  if (out.rows() == tokens.numel()) {
    embedding_forward(args, context.stream);
    context.tensor.all_reduce(out, ReduceOp::kSum, context.stream);
    return;
  }
  const ScratchTensor whole(context.stream, out.dtype, Shape{tokens.numel(), out.cols()});
  args.out = *whole;
  embedding_forward(args, context.stream);
  context.tensor.reduce_scatter(*whole, out, ReduceOp::kSum, context.stream);
}

void VocabParallelEmbedding::backward(const Tensor& tokens, const Tensor& order, const Tensor& dout,
                                      LayerContext& context) const {
  const GradientTarget target = context.params.gradient(weight_);
  EmbeddingBackward args{tokens, order, dout, target.tensor, target.tensor.rows() * context.tensor.rank(),
                         target.accumulate};
  if (dout.rows() == tokens.numel()) {
    embedding_backward(args, context.stream);
    return;
  }
  const ScratchTensor whole(context.stream, dout.dtype, Shape{tokens.numel(), dout.cols()});
  context.tensor.all_gather(dout, *whole, context.stream);
  args.dout = *whole;
  embedding_backward(args, context.stream);
}

}  // namespace tessera
