#include "models/block.h"

#include <cmath>

#include "engine/core/error.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

// Tokens of this rank that the MLP takes at a time. What it keeps is whole.
std::int64_t mlp_tokens(const ModelConfig& config, int tensor_size, const BatchGeometry& geometry,
                        const ActivationOptions& options, bool trains) {
  if (trains && options.recompute != Recompute::kFull) return geometry.local_tokens;
  return Mlp::chunk_tokens(config, tensor_size, geometry, options.mlp_chunk_bytes);
}

AttentionSaved attention_saved(const BlockSaved& saved) {
  return {saved.qkv, saved.attended.plain, saved.lse};
}

}  // namespace

QkvLayout local_qkv_layout(const ModelConfig& config, int tensor_size) {
  const std::int64_t q = config.num_attention_heads;
  const std::int64_t kv = config.num_key_value_heads;
  const bool fits = q % tensor_size == 0 && (kv % tensor_size == 0 || tensor_size % kv == 0);
  CHECK_USER(
      fits,
      "[config] parallel.tensor {} cannot split num_attention_heads {} and num_key_value_heads {}; "
      "it must divide the first and divide, or be a multiple of, the second",
      tensor_size, q, kv);
  return QkvLayout{q / tensor_size, std::max<std::int64_t>(1, kv / tensor_size), config.head_dim};
}

Block::Block(const ModelConfig& config, int layer, int tensor_size, bool sequence_parallel,
             ParamRegistry& registry, QuantRegistry& quant, int bucket) {
  layout_ = local_qkv_layout(config, tensor_size);
  AttentionShape shape;
  shape.heads_q = layout_.heads_q;
  shape.heads_kv = layout_.heads_kv;
  shape.head_dim = layout_.head_dim;
  shape.window = config.sliding_window(layer);
  shape.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim)));
  attention_ = Attention(layout_, shape);

  const std::string prefix = fmt::format("model.layers.{}.", layer);
  const auto eps = static_cast<float>(config.rms_norm_eps);
  const auto std = static_cast<float>(config.initializer_range);
  const std::int64_t kv_groups =
      config.num_key_value_heads < tensor_size ? config.num_key_value_heads : 0;
  const auto linear = [&](std::int64_t in_features, bool bias) {
    return LinearOptions{in_features, bias, std, sequence_parallel && tensor_size > 1, 1};
  };

  norm1_ = ResidualNorm(registry, bucket, prefix + "input_layernorm", config.hidden_size, eps,
                        sequence_parallel);
  qkv_ = ColumnParallelLinear(registry, quant, bucket,
                              {{prefix + "self_attn.q_proj", config.query_size(), 0},
                               {prefix + "self_attn.k_proj", config.key_value_size(), kv_groups},
                               {prefix + "self_attn.v_proj", config.key_value_size(), kv_groups}},
                              linear(config.hidden_size, config.attention_qkv_bias));
  if (config.qk_norm) {
    const auto head_norm = [&](const char* name) {
      ParamSpec spec;
      spec.name = prefix + name;
      spec.shape = Shape{config.head_dim};
      spec.init_mean = 1.0f;
      // Each rank norms its own heads with the same weight.
      spec.gradient_sum = GradientSum::kTensor;
      return registry.add(bucket, std::move(spec));
    };
    q_norm_ = head_norm("self_attn.q_norm.weight");
    k_norm_ = head_norm("self_attn.k_norm.weight");
    qk_eps_ = eps;
  }
  o_ = RowParallelLinear(registry, quant, bucket, prefix + "self_attn.o_proj", config.hidden_size,
                         linear(config.query_size(), config.attention_o_bias));
  norm2_ = ResidualNorm(registry, bucket, prefix + "post_attention_layernorm", config.hidden_size,
                        eps, sequence_parallel);
  mlp_ = Mlp(config, prefix + "mlp.", tensor_size, sequence_parallel, registry, quant, bucket);
}

BlockSaved Block::plan_saved(const ModelConfig& config, int tensor_size, const BatchGeometry& g,
                             const std::string& name, const ActivationOptions& options, bool trains,
                             const QuantState& quant, Arena& arena, const BlockSaved* first) const {
  const QkvLayout layout = local_qkv_layout(config, tensor_size);
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t ffn = local_intermediate_size(config, tensor_size);
  const auto take = [&](const char* what, DType dtype, Shape shape) {
    return arena.allocate(name + " " + what, dtype, shape, MemoryClass::kActivations);
  };
  const bool is_repeated = first != nullptr && options.recompute == Recompute::kSelective;
  // The input of `linear`; `shared` is what may hold its plain values, if anything.
  const auto input = [&](const char* what, const auto& linear, Shape shape, const Tensor& shared,
                         GemmOperand BlockSaved::*member) {
    const Tensor plain = shared.defined() ? shared : take(what, g.compute, shape);
    if (is_repeated) return linear.input(plain, first->*member, quant);
    return linear.plan_input(plain, name + " " + what, quant, trains, arena);
  };
  const auto shared = [&](const auto& linear, GemmOperand BlockSaved::*member) {
    const bool is_shared =
        is_repeated || (first != nullptr && linear.is_quantized() && !linear.keeps_plain(quant));
    return is_shared ? (first->*member).plain : Tensor{};
  };
  const Shape stream{g.local_tokens, hidden};
  BlockSaved saved;
  saved.rstd1 = take("rstd1", g.statistics(), Shape{g.local_tokens});
  saved.normed1 =
      input("normed1", qkv_, stream, shared(qkv_, &BlockSaved::normed1), &BlockSaved::normed1);
  if (config.qk_norm) {
    saved.qkv_raw = take("qkv_raw", g.compute, Shape{g.tokens, layout.cols()});
    saved.qkv_rstd =
        take("qkv_rstd", g.statistics(), Shape{g.tokens, layout.heads_q + layout.heads_kv});
  }
  saved.qkv = take("qkv", g.compute, Shape{g.tokens, layout.cols()});
  saved.attended =
      input("attended", o_, Shape{g.tokens, layout.q_cols()}, Tensor{}, &BlockSaved::attended);
  saved.lse = take("lse", g.statistics(), Shape{g.tokens, layout.heads_q});
  saved.middle = take("middle", g.compute, stream);
  saved.rstd2 = take("rstd2", g.statistics(), Shape{g.local_tokens});
  const ColumnParallelLinear& gate_up = mlp_.input_layer();
  const RowParallelLinear& down = mlp_.output_layer();
  // Of two quantised norm outputs one is read before the other is written.
  const bool is_one_norm = first == nullptr && qkv_.is_quantized() && gate_up.is_quantized() &&
                           !qkv_.keeps_plain(quant) && !gate_up.keeps_plain(quant);
  const Tensor shared2 = is_one_norm ? saved.normed1.plain : shared(gate_up, &BlockSaved::normed2);
  const Tensor normed2 = shared2.defined() ? shared2 : take("normed2", g.compute, stream);
  // The MLP makes its copies of a chunk of its input at a time.
  const std::int64_t chunk = mlp_tokens(config, tensor_size, g, options, trains);
  saved.normed2 = input("normed2", gate_up, Shape{chunk, hidden}, normed2.row_slice(0, chunk),
                        &BlockSaved::normed2);
  saved.normed2.plain = normed2;
  const std::int64_t rows = chunk * (g.tokens / g.local_tokens);
  saved.mlp.gate_up = take("gate_up", g.compute, Shape{rows, 2 * ffn});
  const Tensor act = is_repeated || (first != nullptr && down.is_quantized())
                         ? first->mlp.act.plain
                         : take("act", g.compute, Shape{rows, ffn});
  saved.mlp.act = is_repeated ? down.input(act, first->mlp.act, quant)
                              : down.plan_input(act, name + " act", quant, trains, arena);
  return saved;
}

BlockSaved Block::share_saved(const BlockSaved& other, const QuantState& quant) const {
  BlockSaved saved = other;
  saved.normed1 = qkv_.input(other.normed1.plain, other.normed1, quant);
  saved.attended = o_.input(other.attended.plain, other.attended, quant);
  saved.normed2 = mlp_.input_layer().input(other.normed2.plain, other.normed2, quant);
  saved.mlp.act = mlp_.output_layer().input(other.mlp.act.plain, other.mlp.act, quant);
  return saved;
}

BlockWork Block::plan_work(const ModelConfig& config, int tensor_size, const BatchGeometry& g,
                           const ActivationOptions& options, bool trains, Arena& arena) {
  const QkvLayout layout = local_qkv_layout(config, tensor_size);
  const auto take = [&](const char* what, Shape shape) {
    return arena.allocate(std::string("work ") + what, g.compute, shape, MemoryClass::kActivations);
  };
  BlockWork work;
  work.delta = take("delta", Shape{g.local_tokens, config.hidden_size});
  work.dnormed = take("dnormed", Shape{g.local_tokens, config.hidden_size});
  const std::int64_t chunk = mlp_tokens(config, tensor_size, g, options, trains);
  work.dact = take("dact", Shape{chunk * (g.tokens / g.local_tokens),
                                 local_intermediate_size(config, tensor_size)});
  work.dattended = take("dattended", Shape{g.tokens, layout.q_cols()});
  work.dqkv = take("dqkv", Shape{g.tokens, layout.cols()});
  return work;
}

void Block::project_qkv(const Residual& residual, const BlockSaved& saved,
                        const TokenContext& tokens, LayerContext& context) const {
  norm1_.forward(residual.x, residual.delta, saved.input, saved.normed1, saved.rstd1, context);
  const bool has_norm = q_norm_.defined();
  const Tensor& projected = has_norm ? saved.qkv_raw : saved.qkv;
  qkv_.forward(saved.normed1, projected, context);
  QkvRopeForward rope;
  rope.in = projected;
  rope.out = saved.qkv;
  rope.cos = tokens.cos;
  rope.sin = tokens.sin;
  rope.positions = tokens.positions;
  if (has_norm) {
    rope.q_norm = context.params.weight(q_norm_);
    rope.k_norm = context.params.weight(k_norm_);
    rope.rstd = saved.qkv_rstd;
    rope.eps = qk_eps_;
  }
  rope.layout = layout_;
  qkv_rope_forward(rope, context.stream);
}

void Block::project_attended(const BlockSaved& saved, const BlockWork& work,
                             LayerContext& context) const {
  measure(saved.attended, context);
  o_.forward(saved.attended, work.delta, context);
  norm2_.forward(saved.input, work.delta, saved.middle, saved.normed2, saved.rstd2, context);
}

void Block::forward(Residual& residual, const BlockSaved& saved, const BlockWork& work,
                    const TokenContext& tokens, LayerContext& context) const {
  project_qkv(residual, saved, tokens, context);
  attention_.forward(attention_saved(saved), tokens, context);
  project_attended(saved, work, context);
  mlp_.forward(saved.normed2, saved.mlp, work.delta, context);
  residual = Residual{saved.middle, work.delta};
}

void Block::backward(const Tensor& d, const Tensor& input_amax, const BlockSaved& saved,
                     const BlockWork& work, Recompute recompute, const TokenContext& tokens,
                     LayerContext& context) const {
  LayerContext again = context;
  again.reuses_scales = true;
  again.keeps_inputs = true;
  if (recompute == Recompute::kFull) {
    project_qkv(Residual{saved.input, Tensor{}}, saved, tokens, again);
    attention_.forward(attention_saved(saved), tokens, context);
    project_attended(saved, work, again);
  } else if (recompute == Recompute::kSelective) {
    norm2_.recompute(saved.middle, saved.normed2, again);
    mlp_.input_layer().keep_input(saved.normed2, again);
    o_.keep_input(saved.attended, again);
    norm1_.recompute(saved.input, saved.normed1, again);
    qkv_.keep_input(saved.normed1, again);
  }

  const GemmOperand doutput = mlp_.output_layer().output_gradient(d, context);
  mlp_.backward(saved.normed2, doutput, saved.mlp, work.dact, work.dnormed, recompute, context);
  const GemmOperand dmiddle = o_.output_gradient(d, context);
  norm2_.backward(work.dnormed, saved.middle, saved.rstd2, d, true, dmiddle.amax, context);

  o_.backward(saved.attended, dmiddle, work.dattended, context);
  attention_.backward(work.dattended, attention_saved(saved), work.dqkv, tokens, context);

  QkvRopeBackward rope;
  rope.d = work.dqkv;
  rope.cos = tokens.cos;
  rope.sin = tokens.sin;
  rope.positions = tokens.positions;
  rope.layout = layout_;
  if (q_norm_.defined()) {
    const GradientTarget dq_norm = context.params.gradient(q_norm_);
    const GradientTarget dk_norm = context.params.gradient(k_norm_);
    rope.in = saved.qkv_raw;
    rope.q_norm = context.params.weight(q_norm_);
    rope.k_norm = context.params.weight(k_norm_);
    rope.rstd = saved.qkv_rstd;
    rope.dq_norm = dq_norm.tensor;
    rope.dk_norm = dk_norm.tensor;
    rope.accumulate_dq_norm = dq_norm.accumulate;
    rope.accumulate_dk_norm = dk_norm.accumulate;
  }
  qkv_rope_backward(rope, context.stream);
  const GemmOperand dqkv = qkv_.output_gradient(work.dqkv, context);
  measure(dqkv, context);
  qkv_.backward(saved.normed1, dqkv, work.dnormed, context);
  norm1_.backward(work.dnormed, saved.input, saved.rstd1, d, true, input_amax, context);
}

void Block::decode(Residual& residual, const BlockSaved& saved, const BlockWork& work,
                   const TokenContext& tokens, const LayerCache& cache, std::int64_t cached,
                   const Tensor& keys, LayerContext& context) const {
  project_qkv(residual, saved, tokens, context);
  AttentionForward args = attention_.arguments(attention_saved(saved), tokens);
  const std::int64_t count = args.k.rows();
  scale(Scale{args.k, cache.k.row_slice(cached, count)}, context.stream);
  scale(Scale{args.v, cache.v.row_slice(cached, count)}, context.stream);
  args.k = cache.k.row_slice(0, cached + count);
  args.v = cache.v.row_slice(0, cached + count);
  args.cu_k = keys;
  args.lse = Tensor{};
  attention_forward(args, context.stream);
  project_attended(saved, work, context);
  mlp_.forward(saved.normed2, saved.mlp, work.delta, context);
  residual = Residual{saved.middle, work.delta};
}

}  // namespace tessera
