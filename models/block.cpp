#include "models/block.h"

#include <cmath>

#include "engine/core/error.h"
#include "kernels/ops.h"

namespace tessera {

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

std::int64_t local_intermediate_size(const ModelConfig& config, int tensor_size) {
  const std::int64_t piece = (config.intermediate_size + tensor_size - 1) / tensor_size;
  return (piece + kFeatureQuantum - 1) / kFeatureQuantum * kFeatureQuantum;
}

Block::Block(const ModelConfig& config, int layer, int tensor_size, bool sequence_parallel,
             ParamRegistry& registry, QuantRegistry& quant, int bucket) {
  layout_ = local_qkv_layout(config, tensor_size);
  attention_.heads_q = layout_.heads_q;
  attention_.heads_kv = layout_.heads_kv;
  attention_.head_dim = layout_.head_dim;
  attention_.window = config.sliding_window(layer);
  attention_.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim)));

  const std::string prefix = fmt::format("model.layers.{}.", layer);
  const auto eps = static_cast<float>(config.rms_norm_eps);
  const auto std = static_cast<float>(config.initializer_range);
  const std::int64_t kv_groups =
      config.num_key_value_heads < tensor_size ? config.num_key_value_heads : 0;
  const auto linear = [&](std::int64_t in_features, bool bias, std::int64_t quantum = 1) {
    return LinearOptions{in_features, bias, std, sequence_parallel && tensor_size > 1, quantum};
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
  gate_up_ = ColumnParallelLinear(registry, quant, bucket,
                                  {{prefix + "mlp.gate_proj", config.intermediate_size, 0},
                                   {prefix + "mlp.up_proj", config.intermediate_size, 0}},
                                  linear(config.hidden_size, config.mlp_bias, kFeatureQuantum));
  down_ = RowParallelLinear(registry, quant, bucket, prefix + "mlp.down_proj", config.hidden_size,
                            linear(config.intermediate_size, config.mlp_bias, kFeatureQuantum));
}

BlockSaved Block::plan_saved(const ModelConfig& config, int tensor_size, const BatchGeometry& g,
                             const std::string& name, Recompute recompute, bool trains,
                             const QuantState& quant, Arena& arena, const BlockSaved* first) const {
  const QkvLayout layout = local_qkv_layout(config, tensor_size);
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t ffn = local_intermediate_size(config, tensor_size);
  const auto take = [&](const char* what, DType dtype, Shape shape) {
    return arena.allocate(name + " " + what, dtype, shape, MemoryClass::kActivations);
  };
  const bool is_repeated = first != nullptr && recompute == Recompute::kSelective;
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
  // Of two quantised norm outputs one is read before the other is written.
  const bool is_one_norm = first == nullptr && qkv_.is_quantized() && gate_up_.is_quantized() &&
                           !qkv_.keeps_plain(quant) && !gate_up_.keeps_plain(quant);
  saved.normed2 = input("normed2", gate_up_, stream,
                        is_one_norm ? saved.normed1.plain : shared(gate_up_, &BlockSaved::normed2),
                        &BlockSaved::normed2);
  saved.gate_up = take("gate_up", g.compute, Shape{g.tokens, 2 * ffn});
  saved.act =
      input("act", down_, Shape{g.tokens, ffn}, shared(down_, &BlockSaved::act), &BlockSaved::act);
  return saved;
}

BlockSaved Block::share_saved(const BlockSaved& other, const QuantState& quant) const {
  BlockSaved saved = other;
  saved.normed1 = qkv_.input(other.normed1.plain, other.normed1, quant);
  saved.attended = o_.input(other.attended.plain, other.attended, quant);
  saved.normed2 = gate_up_.input(other.normed2.plain, other.normed2, quant);
  saved.act = down_.input(other.act.plain, other.act, quant);
  return saved;
}

BlockWork Block::plan_work(const ModelConfig& config, int tensor_size, const BatchGeometry& g,
                           Arena& arena) {
  const QkvLayout layout = local_qkv_layout(config, tensor_size);
  const auto take = [&](const char* what, Shape shape) {
    return arena.allocate(std::string("work ") + what, g.compute, shape, MemoryClass::kActivations);
  };
  BlockWork work;
  work.delta = take("delta", Shape{g.local_tokens, config.hidden_size});
  work.dnormed = take("dnormed", Shape{g.local_tokens, config.hidden_size});
  work.dact = take("dact", Shape{g.tokens, local_intermediate_size(config, tensor_size)});
  work.dattended = take("dattended", Shape{g.tokens, layout.q_cols()});
  work.dqkv = take("dqkv", Shape{g.tokens, layout.cols()});
  return work;
}

AttentionForward Block::attention_args(const BlockSaved& saved, const TokenContext& tokens) const {
  AttentionForward args;
  args.q = saved.qkv.col_slice(0, layout_.q_cols());
  args.k = saved.qkv.col_slice(layout_.q_cols(), layout_.kv_cols());
  args.v = saved.qkv.col_slice(layout_.q_cols() + layout_.kv_cols(), layout_.kv_cols());
  args.out = saved.attended.plain;
  args.lse = saved.lse;
  args.cu_q = tokens.documents;
  args.cu_k = tokens.documents;
  args.shape = attention_;
  args.shape.max_length = tokens.cos.rows();
  return args;
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

void Block::mlp_inner(const BlockSaved& saved, const BlockWork& work, LayerContext& context) const {
  measure(saved.attended, context);
  o_.forward(saved.attended, work.delta, context);
  norm2_.forward(saved.input, work.delta, saved.middle, saved.normed2, saved.rstd2, context);
  gate_up_.forward(saved.normed2, saved.gate_up, context);
  swiglu_forward(SwiGluForward{saved.gate_up, saved.act.plain, amax_to_record(saved.act, context)},
                 context.stream);
}

void Block::forward(Residual& residual, const BlockSaved& saved, const BlockWork& work,
                    const TokenContext& tokens, LayerContext& context) const {
  project_qkv(residual, saved, tokens, context);
  attention_forward(attention_args(saved, tokens), context.stream);
  mlp_inner(saved, work, context);
  down_.forward(saved.act, work.delta, context);
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
    attention_forward(attention_args(saved, tokens), context.stream);
    mlp_inner(saved, work, again);
    down_.keep_input(saved.act, again);
  } else if (recompute == Recompute::kSelective) {
    swiglu_forward(SwiGluForward{saved.gate_up, saved.act.plain}, context.stream);
    down_.keep_input(saved.act, again);
    norm2_.recompute(saved.middle, saved.normed2, again);
    gate_up_.keep_input(saved.normed2, again);
    o_.keep_input(saved.attended, again);
    norm1_.recompute(saved.input, saved.normed1, again);
    qkv_.keep_input(saved.normed1, again);
  }

  const GemmOperand doutput = down_.output_gradient(d, context);
  down_.backward(saved.act, doutput, work.dact, context);
  const GemmOperand dgate_up = gate_up_.output_gradient(saved.gate_up, context);
  swiglu_backward(SwiGluBackward{work.dact, saved.gate_up, saved.gate_up, dgate_up.amax},
                  context.stream);
  gate_up_.backward(saved.normed2, dgate_up, work.dnormed, context);
  const GemmOperand dmiddle = o_.output_gradient(d, context);
  norm2_.backward(work.dnormed, saved.middle, saved.rstd2, d, true, dmiddle.amax, context);

  o_.backward(saved.attended, dmiddle, work.dattended, context);
  const AttentionForward forward_args = attention_args(saved, tokens);
  AttentionBackward attention;
  attention.dout = work.dattended;
  attention.q = forward_args.q;
  attention.k = forward_args.k;
  attention.v = forward_args.v;
  attention.out = forward_args.out;
  attention.lse = forward_args.lse;
  attention.dq = work.dqkv.col_slice(0, layout_.q_cols());
  attention.dk = work.dqkv.col_slice(layout_.q_cols(), layout_.kv_cols());
  attention.dv = work.dqkv.col_slice(layout_.q_cols() + layout_.kv_cols(), layout_.kv_cols());
  attention.cu_q = tokens.documents;
  attention.cu_k = tokens.documents;
  attention.shape = forward_args.shape;
  attention.deterministic = context.deterministic;
  attention_backward(attention, context.stream);

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
  AttentionForward args = attention_args(saved, tokens);
  const std::int64_t count = args.k.rows();
  scale(Scale{args.k, cache.k.row_slice(cached, count)}, context.stream);
  scale(Scale{args.v, cache.v.row_slice(cached, count)}, context.stream);
  args.k = cache.k.row_slice(0, cached + count);
  args.v = cache.v.row_slice(0, cached + count);
  args.cu_k = keys;
  args.lse = Tensor{};
  attention_forward(args, context.stream);
  mlp_inner(saved, work, context);
  down_.forward(saved.act, work.delta, context);
  residual = Residual{saved.middle, work.delta};
}

}  // namespace tessera
