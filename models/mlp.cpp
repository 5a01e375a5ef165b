#include "models/mlp.h"

#include <algorithm>

#include "engine/core/error.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

// Copies with scales of blocks cover 128 tokens; a chunk's products stay aligned.
constexpr std::int64_t kChunkQuantum = 128;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// A chunk's tokens have an amax, and so a scale, of their own: that of all tokens is known only when
// the last chunk is. The repeated forward finds the same ones again, since its numbers are the same.
Tensor amax_of_chunk(const GemmOperand& operand, LayerContext& context) {
  if (operand.amax.defined()) {
    context.stream.set_zero(operand.amax.data, operand.amax.bytes());
  }
  return operand.amax;
}

}  // namespace

std::int64_t local_intermediate_size(const ModelConfig& config, int tensor_size) {
  const std::int64_t piece = (config.intermediate_size + tensor_size - 1) / tensor_size;
  return (piece + kFeatureQuantum - 1) / kFeatureQuantum * kFeatureQuantum;
}

Mlp::Mlp(const ModelConfig& config, const std::string& prefix, int tensor_size,
         bool sequence_parallel, ParamRegistry& registry, QuantRegistry& quant, int bucket) {
  const auto std = static_cast<float>(config.initializer_range);
  const auto linear = [&](std::int64_t in_features) {
    return LinearOptions{in_features, config.mlp_bias, std, sequence_parallel && tensor_size > 1,
                         kFeatureQuantum};
  };
  gate_up_ = ColumnParallelLinear(registry, quant, bucket,
                                  {{prefix + "gate_proj", config.intermediate_size, 0},
                                   {prefix + "up_proj", config.intermediate_size, 0}},
                                  linear(config.hidden_size));
  down_ = RowParallelLinear(registry, quant, bucket, prefix + "down_proj", config.hidden_size,
                            linear(config.intermediate_size));
}

std::int64_t Mlp::chunk_tokens(const ModelConfig& config, int tensor_size, const BatchGeometry& g,
                               std::int64_t chunk_bytes) {
  // Of a token of this rank and those that the other ranks take with it.
  const std::int64_t bytes = g.tokens / std::max<std::int64_t>(1, g.local_tokens) * 2 *
                             local_intermediate_size(config, tensor_size) *
                             static_cast<std::int64_t>(size_of(g.compute));
  const std::int64_t most =
      std::max(kChunkQuantum, chunk_bytes / bytes / kChunkQuantum * kChunkQuantum);
  const std::int64_t chunks = std::max<std::int64_t>(1, ceil_div(g.local_tokens, most));
  return std::min(g.local_tokens,
                  ceil_div(ceil_div(g.local_tokens, chunks), kChunkQuantum) * kChunkQuantum);
}

template <typename Body>
void Mlp::for_each_chunk(const GemmOperand& x, const MlpSaved& saved, const LayerContext& context,
                         Body&& body) {
  const std::int64_t ranks = context.sequence_parallel ? context.tensor.size() : 1;
  const std::int64_t tokens = x.plain.rows();
  const std::int64_t room = saved.gate_up.rows() / ranks;
  for (std::int64_t begin = 0; begin < tokens; begin += room) {
    Chunk chunk;
    chunk.begin = begin;
    chunk.count = std::min(room, tokens - begin);
    chunk.is_all = chunk.count == tokens;
    chunk.x = x;
    if (!chunk.is_all) {
      chunk.x.plain = Tensor{};
      chunk.x = chunk.x.first_rows(chunk.count);
      chunk.x.plain = x.plain.row_slice(begin, chunk.count);
    }
    chunk.saved = saved;
    if (chunk.count < room) {
      chunk.saved.gate_up = saved.gate_up.row_slice(0, chunk.count * ranks);
      chunk.saved.act = saved.act.first_rows(chunk.count * ranks);
    }
    body(chunk);
  }
}

void Mlp::inner(const Chunk& chunk, LayerContext& context) const {
  gate_up_.forward(chunk.x, chunk.saved.gate_up, context);
  const GemmOperand& act = chunk.saved.act;
  const Tensor amax = chunk.is_all ? amax_to_record(act, context) : amax_of_chunk(act, context);
  swiglu_forward(SwiGluForward{chunk.saved.gate_up, act.plain, amax}, context.stream);
}

void Mlp::forward(const GemmOperand& x, const MlpSaved& saved, const Tensor& y,
                  LayerContext& context) const {
  for_each_chunk(x, saved, context, [&](const Chunk& chunk) {
    inner(chunk, context);
    down_.forward(chunk.saved.act, y.row_slice(chunk.begin, chunk.count), context);
  });
}

void Mlp::backward(const GemmOperand& x, const GemmOperand& dy, const MlpSaved& saved,
                   const Tensor& dact, const Tensor& dx, Recompute recompute,
                   LayerContext& context) const {
  LayerContext again = context;
  again.reuses_scales = true;
  again.keeps_inputs = true;
  for_each_chunk(x, saved, context, [&](const Chunk& chunk) {
    CHECK(chunk.is_all || recompute == Recompute::kFull,
          "[mlp] room for {} of {} tokens, whose activations are to be kept", chunk.count,
          x.plain.rows());
    const GemmOperand& act = chunk.saved.act;
    if (recompute == Recompute::kFull) {
      inner(chunk, again);
    } else if (recompute == Recompute::kSelective) {
      swiglu_forward(SwiGluForward{chunk.saved.gate_up, act.plain}, context.stream);
    }
    if (recompute != Recompute::kNone) down_.keep_input(act, again);

    GemmOperand dy_chunk = dy;
    dy_chunk.plain = dy.plain.row_slice(chunk.begin, chunk.count);
    const Tensor dact_chunk = dact.row_slice(0, act.plain.rows());
    down_.backward(act, dy_chunk, dact_chunk, context);
    const GemmOperand dgate_up = gate_up_.output_gradient(chunk.saved.gate_up, context);
    swiglu_backward(
        SwiGluBackward{dact_chunk, chunk.saved.gate_up, chunk.saved.gate_up,
                       chunk.is_all ? dgate_up.amax : amax_of_chunk(dgate_up, context)},
        context.stream);
    gate_up_.backward(chunk.x, dgate_up, dx.row_slice(chunk.begin, chunk.count), context);
  });
}

}  // namespace tessera
