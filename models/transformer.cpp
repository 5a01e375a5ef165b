#include "models/transformer.h"

#include <cmath>

#include "engine/core/error.h"
#include "models/rope.h"

namespace tessera {

DeviceBatch plan_batch(const BatchGeometry& g, Arena& arena) {
  const auto take = [&](const char* what, std::int64_t count) {
    return arena.allocate(std::string("batch ") + what, DType::kI32, Shape{count},
                          MemoryClass::kInput);
  };
  return DeviceBatch{take("tokens", g.tokens), take("targets", g.tokens),
                     take("positions", g.tokens), take("order", g.tokens),
                     take("documents", g.max_documents + 1)};
}

Transformer::Transformer(const ModelConfig& config, int tensor_size, bool sequence_parallel,
                         const QuantRecipe& recipe)
    : config_(config), tensor_size_(tensor_size), quant_registry_(recipe, tensor_size) {
  const bool is_tied = config.tie_word_embeddings;
  const BucketPool edge = is_tied ? BucketPool::kOwn : BucketPool::kEdges;
  const int embedding_bucket = registry_.add_bucket("embedding", edge);
  embedding_ = VocabParallelEmbedding(config, registry_, embedding_bucket);
  for (int layer = 0; layer < config.num_hidden_layers; ++layer) {
    const int bucket = registry_.add_bucket(fmt::format("block {}", layer), BucketPool::kBlocks);
    blocks_.emplace_back(config, layer, tensor_size, sequence_parallel, registry_, quant_registry_,
                         bucket);
  }
  const int head_bucket = registry_.add_bucket("head", edge);
  head_ = std::make_unique<LmHead>(
      config, sequence_parallel, is_tied ? embedding_.weight() : ParamId{}, registry_, head_bucket);
  quant_registry_.add_plain("lm_head", (config.vocab_size + tensor_size - 1) / tensor_size,
                            config.hidden_size);
  quant_registry_.add_plain("model.embed_tokens", 0, config.hidden_size);
  quant_registry_.check_names();
}

void Transformer::plan(const BatchGeometry& geometry, Recompute recompute, bool trains,
                       const QuantState& quant, Arena& arena) {
  geometry_ = geometry;
  recompute_ = recompute;
  const std::int64_t half = rotary_dim(config_.rope, config_.head_dim) / 2;
  const DType table = geometry.statistics();
  cos_ = arena.allocate("rope cos", table, Shape{geometry.max_length, half}, MemoryClass::kInput);
  sin_ = arena.allocate("rope sin", table, Shape{geometry.max_length, half}, MemoryClass::kInput);
  saved_.clear();
  // What is recomputed needs room once; what is kept, once per block.
  const auto plan_block = [&](std::size_t layer, const BlockSaved* first) {
    return blocks_[layer].plan_saved(config_, tensor_size_, geometry,
                                     fmt::format("block {}", layer), recompute, trains, quant,
                                     arena, first);
  };
  const BlockSaved first = plan_block(0, nullptr);
  saved_.push_back(first);
  for (std::size_t layer = 1; layer < blocks_.size(); ++layer) {
    if (trains && recompute != Recompute::kFull) {
      saved_.push_back(plan_block(layer, &first));
      continue;
    }
    BlockSaved saved = blocks_[layer].share_saved(first, quant);
    if (trains) {
      saved.input = arena.allocate(fmt::format("block {} input", layer), geometry.compute,
                                   first.input.shape, MemoryClass::kActivations);
    }
    saved_.push_back(saved);
  }
  work_ = Block::plan_work(config_, tensor_size_, geometry, arena);
  head_saved_ = LmHead::plan_saved(config_, geometry, arena);
  head_saved_.d_amax = blocks_.back().output_gradient_amax(quant);
}

void Transformer::initialize(Stream& stream) {
  if (stream.device().kind == DeviceKind::kMeta) return;
  const RopeFrequencies rope =
      rope_frequencies(config_.rope, config_.head_dim, geometry_.max_length);
  const std::int64_t half = cos_.cols();
  const auto upload = [&](const Tensor& table, double (*function)(double)) {
    const auto count = static_cast<std::size_t>(table.numel());
    std::vector<double> values(count);
    for (std::int64_t position = 0; position < table.rows(); ++position) {
      for (std::int64_t i = 0; i < half; ++i) {
        const double angle =
            static_cast<double>(position) * rope.inverse_frequencies[static_cast<std::size_t>(i)];
        values[static_cast<std::size_t>(position * half + i)] =
            rope.attention_scaling * function(angle);
      }
    }
    if (table.dtype == DType::kF64) {
      stream.copy_bytes(table.data, values.data(), table.bytes());
      stream.synchronize();
    } else {
      const std::vector<float> narrow(values.begin(), values.end());
      stream.copy_bytes(table.data, narrow.data(), table.bytes());
      stream.synchronize();
    }
  };
  upload(cos_, [](double x) { return std::cos(x); });
  upload(sin_, [](double x) { return std::sin(x); });
}

TokenContext Transformer::token_context(const DeviceBatch& batch) const {
  return TokenContext{batch.positions, batch.documents, cos_, sin_};
}

void Transformer::embed(const DeviceBatch& batch, const Tensor& out, LayerContext& context) const {
  const WeightLease lease = context.sync.acquire(embedding_bucket());
  context.sync.prefetch(block_bucket(0));
  embedding_.forward(batch.tokens, out, context);
}

Transformer::HeadLeases Transformer::acquire_head(LayerContext& context) const {
  HeadLeases leases;
  leases.head = context.sync.acquire(head_bucket());
  if (config_.tie_word_embeddings) leases.tied = context.sync.acquire(embedding_bucket());
  return leases;
}

Residual Transformer::run_blocks(const DeviceBatch& batch, bool keeps_inputs,
                                 const LayerContext& context) const {
  LayerContext pass = context;
  pass.keeps_inputs = keeps_inputs;
  const TokenContext tokens = token_context(batch);
  pass.quant.begin_pass(pass.stream);
  embed(batch, saved_[0].input, pass);
  Residual residual{saved_[0].input, Tensor{}};
  for (std::size_t layer = 0; layer < blocks_.size(); ++layer) {
    const int bucket = block_bucket(static_cast<int>(layer));
    const WeightLease lease = pass.sync.acquire(bucket);
    pass.sync.prefetch(bucket + 1);
    blocks_[layer].forward(residual, saved_[layer], work_, tokens, pass);
  }
  return residual;
}

void Transformer::evaluate(const DeviceBatch& batch, const Tensor& loss_sum, const Tensor& nll,
                           LayerContext& context) const {
  const Residual residual = run_blocks(batch, false, context);
  const HeadLeases leases = acquire_head(context);
  head_->loss(residual, batch.targets, loss_sum, nll, head_saved_, context);
}

void Transformer::forward_backward(const DeviceBatch& batch, const Tensor& loss_sum,
                                   LayerContext& context,
                                   const std::function<void(int)>& bucket_done) const {
  // A recompute makes what is kept again.
  const Residual residual = run_blocks(batch, recompute_ == Recompute::kNone, context);
  {
    const HeadLeases leases = acquire_head(context);
    context.sync.open_gradients(head_bucket());
    if (config_.tie_word_embeddings) context.sync.open_gradients(embedding_bucket());
    head_->loss_and_backward(residual, batch.targets, loss_sum, head_saved_, context);
  }
  bucket_done(head_bucket());
  const TokenContext tokens = token_context(batch);
  const Tensor& d = head_saved_.d;
  for (std::size_t layer = blocks_.size(); layer-- > 0;) {
    const int bucket = block_bucket(static_cast<int>(layer));
    const WeightLease lease = context.sync.acquire(bucket);
    if (layer > 0) context.sync.prefetch(bucket - 1);
    context.sync.open_gradients(bucket);
    const Tensor input_amax =
        layer > 0 ? blocks_[layer - 1].output_gradient_amax(context.quant) : Tensor{};
    blocks_[layer].backward(d, input_amax, saved_[layer], work_, recompute_, tokens, context);
    bucket_done(bucket);
  }
  context.sync.open_gradients(embedding_bucket());
  embedding_.backward(batch.tokens, batch.order, d, context);
  bucket_done(embedding_bucket());
}

void Transformer::decode(const DeviceBatch& batch, const std::vector<LayerCache>& caches,
                         std::int64_t cached, const Tensor& keys, std::int64_t last,
                         const Tensor& logits, LayerContext& context) const {
  const TokenContext tokens = token_context(batch);
  const std::int64_t count = batch.tokens.numel();
  const auto narrow = [count](const BlockSaved& saved) {
    BlockSaved view = saved;
    for (Tensor* tensor :
         {&view.input, &view.qkv_raw, &view.qkv_rstd, &view.qkv, &view.middle, &view.gate_up}) {
      if (tensor->defined()) *tensor = tensor->row_slice(0, count);
    }
    for (GemmOperand* operand : {&view.normed1, &view.attended, &view.normed2, &view.act}) {
      *operand = operand->first_rows(count);
    }
    view.rstd1 = view.rstd1.flat_slice(0, count);
    view.rstd2 = view.rstd2.flat_slice(0, count);
    return view;
  };
  BlockWork work = work_;
  work.delta = work_.delta.row_slice(0, count);
  Residual residual{saved_[0].input.row_slice(0, count), Tensor{}};
  context.quant.begin_pass(context.stream);
  embed(batch, residual.x, context);
  for (std::size_t layer = 0; layer < blocks_.size(); ++layer) {
    const int bucket = block_bucket(static_cast<int>(layer));
    const WeightLease lease = context.sync.acquire(bucket);
    context.sync.prefetch(bucket + 1);
    blocks_[layer].decode(residual, narrow(saved_[layer]), work, tokens, caches[layer], cached,
                          keys, context);
  }
  LmHead::Saved head = head_saved_;
  head.sum = head.sum.row_slice(0, count);
  head.normed = head.normed.row_slice(0, count);
  const HeadLeases leases = acquire_head(context);
  head_->logits(residual, last, logits, head, context);
}

}  // namespace tessera
