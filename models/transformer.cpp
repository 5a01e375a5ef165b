#include "models/transformer.h"

#include <cmath>

#include "engine/core/error.h"
#include "kernels/ops.h"
#include "models/hf/names.h"
#include "models/rope.h"
#include "parallel/context_split.h"

namespace tessera {

DeviceBatch plan_batch(const BatchGeometry& g, Arena& arena) {
  const auto take = [&](const char* what, std::int64_t count) {
    return arena.allocate(std::string("batch ") + what, DType::kI32, Shape{count},
                          MemoryClass::kInput);
  };
  DeviceBatch batch{take("tokens", g.tokens),
                    take("targets", g.tokens),
                    take("positions", g.tokens),
                    take("order", g.tokens),
                    take("documents", g.max_documents + 1),
                    Tensor{}};
  if (g.context_ranks > 1) {
    const std::int64_t rows = 2 * ContextSplit::kPieces;
    batch.piece_bounds = take("piece bounds", rows * (g.max_documents + 1))
                             .reshape(Shape{rows, g.max_documents + 1});
  }
  return batch;
}

Transformer::Transformer(const ModelConfig& config, int tensor_size, bool sequence_parallel,
                         const QuantRecipe& recipe, std::vector<StagePiece> pieces)
    : config_(config),
      tensor_size_(tensor_size),
      quant_registry_(recipe, tensor_size),
      pieces_(pieces.empty() ? whole_model(config) : std::move(pieces)) {
  const bool has_embedding = pieces_.front().has_embedding;
  const bool has_head = pieces_.back().has_head;
  const bool is_tied = config.tie_word_embeddings;
  const bool is_on_both_ends = is_tied && has_embedding != has_head;
  const BucketPool edge = is_tied ? BucketPool::kOwn : BucketPool::kEdges;
  ParamId tied;
  if (has_embedding) {
    embedding_bucket_ = registry_.add_bucket("embedding", edge, is_on_both_ends);
    embedding_ = VocabParallelEmbedding(config, registry_, embedding_bucket_);
    tied = embedding_.weight();
    tied_bucket_ = embedding_bucket_;
  }
  for (const StagePiece& piece : pieces_) {
    first_block_.push_back(static_cast<int>(blocks_.size()));
    for (int layer = piece.first_layer; layer < piece.first_layer + piece.num_layers; ++layer) {
      const int bucket = registry_.add_bucket(fmt::format("block {}", layer), BucketPool::kBlocks);
      if (first_block_bucket_ < 0) first_block_bucket_ = bucket;
      blocks_.emplace_back(config, layer, tensor_size, sequence_parallel, registry_,
                           quant_registry_, bucket);
    }
  }
  if (has_head) {
    if (is_tied && !has_embedding) {
      tied_bucket_ = registry_.add_bucket("embedding of the head", BucketPool::kOwn, true);
      ParamSpec copy = vocab_matrix_spec(config, std::string(kEmbeddingName));
      copy.is_copy = true;
      tied = registry_.add(tied_bucket_, std::move(copy));
    }
    head_bucket_ = registry_.add_bucket("head", edge);
    head_ = std::make_unique<LmHead>(config, sequence_parallel, is_tied ? tied : ParamId{},
                                     registry_, head_bucket_);
  }
  quant_registry_.add_plain("lm_head", (config.vocab_size + tensor_size - 1) / tensor_size,
                            config.hidden_size);
  quant_registry_.add_plain("model.embed_tokens", 0, config.hidden_size);
  quant_registry_.check_names();
}

void Transformer::plan(const BatchGeometry& geometry, const ActivationOptions& options,
                       bool trains, const PipelineBuffers& buffers, QuantState& quant,
                       Arena& arena, InputOffload* offload, Arena* host) {
  geometry_ = geometry;
  options_ = options;
  CHECK(!options.offloads_inputs || options.recompute == Recompute::kFull,
        "[transformer] inputs of blocks are offloaded under a full recompute alone");
  offload_ = options.offloads_inputs && trains ? offload : nullptr;
  const std::int64_t half = rotary_dim(config_.rope, config_.head_dim) / 2;
  const DType table = geometry.statistics();
  cos_ = arena.allocate("rope cos", table, Shape{geometry.max_length, half}, MemoryClass::kInput);
  sin_ = arena.allocate("rope sin", table, Shape{geometry.max_length, half}, MemoryClass::kInput);
  const auto take = [&](const std::string& name, MemoryClass memory_class) {
    return arena.allocate(name, geometry.compute, Shape{geometry.local_tokens, config_.hidden_size},
                          memory_class);
  };
  saved_.clear();
  // What is recomputed needs room once; what is kept, once per block and micro-batch in flight.
  const BlockSaved* first = nullptr;
  BlockSaved shared;
  int num_offloaded = 0;
  first_offloaded_.clear();
  first_quant_set_.clear();
  int num_quant_sets = 0;
  for (int chunk = 0; chunk < num_chunks(); ++chunk) {
    const int sets = trains ? buffers.activations.at(static_cast<std::size_t>(chunk)) : 1;
    auto& chunk_saved = saved_.emplace_back();
    first_offloaded_.emplace_back();
    first_quant_set_.push_back(num_quant_sets);
    for (int set = 0; set < sets; ++set) {
      quant.use_set(num_quant_sets++);
      auto& set_saved = chunk_saved.emplace_back();
      // The number of a block is this and its place; what is received has none.
      first_offloaded_.back().push_back(num_offloaded - (piece(chunk).has_embedding ? 0 : 1));
      for (int i = 0; i < piece(chunk).num_layers; ++i) {
        const Block& block = blocks_[static_cast<std::size_t>(local_block(chunk, i))];
        const std::string name = fmt::format("block {} set {}", piece(chunk).first_layer + i, set);
        const bool is_kept = trains && options.recompute != Recompute::kFull;
        BlockSaved saved = first == nullptr || is_kept
                               ? block.plan_saved(config_, tensor_size_, geometry, name, options,
                                                  trains, quant, arena, first)
                               : block.share_saved(shared, quant);
        const bool is_received = i == 0 && !piece(chunk).has_embedding;
        if (!trains) {
          if (first == nullptr) saved.input = take("block input", MemoryClass::kActivations);
        } else if (offload_ != nullptr) {
          num_offloaded += is_received ? 0 : 1;
        } else if (!is_received) {
          saved.input = take(name + " input", MemoryClass::kActivations);
        }
        if (first == nullptr) {
          shared = saved;
          first = &shared;
        }
        set_saved.push_back(saved);
      }
    }
  }
  if (offload_ != nullptr) {
    CHECK(host != nullptr, "[transformer] no host memory is given for the inputs of blocks");
    offload_->plan(num_offloaded, geometry.compute,
                   Shape{geometry.local_tokens, config_.hidden_size}, arena, *host);
  }
  work_ = Block::plan_work(config_, tensor_size_, geometry, options, trains, arena);
  const auto take_buffers = [&](std::vector<Tensor>& to, const char* name, int count,
                                MemoryClass memory_class) {
    to.clear();
    for (int i = 0; i < count; ++i) to.push_back(take(fmt::format("{} {}", name, i), memory_class));
  };
  take_buffers(inputs_, "stage input", buffers.inputs, MemoryClass::kCommunication);
  take_buffers(outputs_, "stage output", buffers.outputs, MemoryClass::kCommunication);
  take_buffers(gradients_, "residual gradient", trains ? buffers.gradients : 0,
               MemoryClass::kActivations);
  if (head_ == nullptr) return;
  head_saved_ = LmHead::plan_saved(config_, geometry, arena);
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
  return TokenContext{batch.positions, batch.documents, batch.piece_bounds, cos_, sin_};
}

void Transformer::embed(const DeviceBatch& batch, const Tensor& out, LayerContext& context) const {
  const WeightLease lease = context.sync.acquire(embedding_bucket_);
  context.sync.prefetch(block_bucket(0));
  embedding_.forward(batch.tokens, out, context);
}

Transformer::HeadLeases Transformer::acquire_head(LayerContext& context) const {
  HeadLeases leases;
  leases.head = context.sync.acquire(head_bucket_);
  if (config_.tie_word_embeddings) leases.tied = context.sync.acquire(tied_bucket_);
  return leases;
}

int Transformer::bucket_behind(int chunk, int i) const {
  if (i + 1 < piece(chunk).num_layers) return block_bucket(local_block(chunk, i + 1));
  return piece(chunk).has_head ? head_bucket_ : -1;
}

BlockSaved Transformer::saved(int chunk, int set, int i, const Tensor& input) const {
  BlockSaved result = saved_.at(static_cast<std::size_t>(chunk))
                          .at(static_cast<std::size_t>(set))
                          .at(static_cast<std::size_t>(i));
  if (i == 0 && !piece(chunk).has_embedding) result.input = input;
  return result;
}

int Transformer::offloaded(int chunk, int set, int i) const {
  if (offload_ == nullptr || (i == 0 && !piece(chunk).has_embedding)) return -1;
  return first_offloaded_.at(static_cast<std::size_t>(chunk)).at(static_cast<std::size_t>(set)) + i;
}

int Transformer::quant_set(int chunk, int set) const {
  return first_quant_set_.at(static_cast<std::size_t>(chunk)) + set;
}

Residual Transformer::run_blocks(int chunk, int set, const DeviceBatch& batch, const Tensor& input,
                                 bool has_backward, const LayerContext& context) const {
  LayerContext pass = context;
  // A recompute makes what is kept again.
  pass.keeps_inputs = has_backward && options_.recompute == Recompute::kNone;
  const TokenContext tokens = token_context(batch);
  pass.quant.use_set(quant_set(chunk, set));
  pass.quant.begin_pass(pass.stream);
  Residual residual;
  for (int i = 0; i < piece(chunk).num_layers; ++i) {
    BlockSaved block_saved = saved(chunk, set, i, input);
    const int number = offloaded(chunk, set, i);
    if (number >= 0) block_saved.input = offload_->write(number);
    if (i == 0) {
      residual.x = block_saved.input;
      if (piece(chunk).has_embedding) embed(batch, residual.x, pass);
    }
    const int local = local_block(chunk, i);
    const WeightLease lease = pass.sync.acquire(block_bucket(local));
    pass.sync.prefetch(bucket_behind(chunk, i));
    blocks_[static_cast<std::size_t>(local)].forward(residual, block_saved, work_, tokens, pass);
    if (number >= 0 && has_backward) offload_->keep(number);
  }
  return residual;
}

void Transformer::forward(const PipelineAction& action, const DeviceBatch& batch,
                          const Tensor& loss_sum, LayerContext& context,
                          const BucketDone& bucket_done) const {
  const StagePiece& own = piece(action.chunk);
  const Tensor input = own.has_embedding ? Tensor{} : input_buffer(action.input);
  const Residual residual =
      run_blocks(action.chunk, action.activations, batch, input, true, context);
  if (!own.has_head) {
    add(Add{residual.x, residual.delta, output_buffer(action.output)}, context.stream);
    return;
  }
  {
    const HeadLeases leases = acquire_head(context);
    context.sync.open_gradients(head_bucket_);
    if (config_.tie_word_embeddings) context.sync.open_gradients(tied_bucket_);
    LmHead::Saved saved = head_saved_;
    saved.d = gradient_buffer(action.gradient);
    saved.d_amax = blocks_.back().output_gradient_amax(context.quant);
    head_->loss_and_backward(residual, batch.targets, loss_sum, saved, context);
  }
  bucket_done(head_bucket_);
  // Where the embedding is here too, its backward comes last.
  if (config_.tie_word_embeddings && embedding_bucket_ < 0) bucket_done(tied_bucket_);
}

void Transformer::backward(const PipelineAction& action, const DeviceBatch& batch,
                           LayerContext& context, const BucketDone& bucket_done) const {
  const StagePiece& own = piece(action.chunk);
  const Tensor input = own.has_embedding ? Tensor{} : input_buffer(action.input);
  const TokenContext tokens = token_context(batch);
  const Tensor& d = gradient_buffer(action.gradient);
  context.quant.use_set(quant_set(action.chunk, action.activations));
  if (!own.has_head) {
    // Nobody here has made what the next stage sent.
    GemmOperand received;
    received.plain = d;
    const int last = local_block(action.chunk, own.num_layers - 1);
    received.amax = blocks_[static_cast<std::size_t>(last)].output_gradient_amax(context.quant);
    measure(received, context);
  }
  for (int i = own.num_layers; i-- > 0;) {
    const int local = local_block(action.chunk, i);
    const int bucket = block_bucket(local);
    const WeightLease lease = context.sync.acquire(bucket);
    if (i > 0) context.sync.prefetch(bucket - 1);
    context.sync.open_gradients(bucket);
    const auto index = static_cast<std::size_t>(local);
    const Tensor input_amax =
        i > 0 ? blocks_[index - 1].output_gradient_amax(context.quant) : Tensor{};
    BlockSaved block_saved = saved(action.chunk, action.activations, i, input);
    const int number = offloaded(action.chunk, action.activations, i);
    if (number >= 0) block_saved.input = offload_->read(number);
    if (offload_ != nullptr && i > 0) {
      offload_->fetch(offloaded(action.chunk, action.activations, i - 1));
    }
    blocks_[index].backward(d, input_amax, block_saved, work_, options_.recompute, tokens, context);
    bucket_done(bucket);
  }
  if (!own.has_embedding) return;
  context.sync.open_gradients(embedding_bucket_);
  embedding_.backward(batch.tokens, batch.order, d, context);
  bucket_done(embedding_bucket_);
}

void Transformer::evaluate_chunk(int chunk, const DeviceBatch& batch, const Tensor& loss_sum,
                                 const Tensor& nll, LayerContext& context) const {
  const StagePiece& own = piece(chunk);
  const Tensor input = own.has_embedding ? Tensor{} : input_buffer(0);
  const Residual residual = run_blocks(chunk, 0, batch, input, false, context);
  if (!own.has_head) {
    add(Add{residual.x, residual.delta, output_buffer(0)}, context.stream);
    return;
  }
  const HeadLeases leases = acquire_head(context);
  head_->loss(residual, batch.targets, loss_sum, nll, head_saved_, context);
}

void Transformer::evaluate(const DeviceBatch& batch, const Tensor& loss_sum, const Tensor& nll,
                           LayerContext& context) const {
  evaluate_chunk(0, batch, loss_sum, nll, context);
}

void Transformer::forward_backward(const DeviceBatch& batch, const Tensor& loss_sum,
                                   LayerContext& context, const BucketDone& bucket_done) const {
  PipelineAction action;
  action.micro_batch = action.chunk = action.activations = action.gradient = 0;
  forward(action, batch, loss_sum, context, bucket_done);
  backward(action, batch, context, bucket_done);
}

void Transformer::decode(const DeviceBatch& batch, const std::vector<LayerCache>& caches,
                         std::int64_t cached, const Tensor& keys, std::int64_t last,
                         const Tensor& logits, LayerContext& context) const {
  const TokenContext tokens = token_context(batch);
  const std::int64_t count = batch.tokens.numel();
  const auto narrow = [count](const BlockSaved& saved) {
    BlockSaved view = saved;
    for (Tensor* tensor :
         {&view.input, &view.qkv_raw, &view.qkv_rstd, &view.qkv, &view.middle}) {
      if (tensor->defined()) *tensor = tensor->row_slice(0, count);
    }
    for (GemmOperand* operand : {&view.normed1, &view.attended, &view.normed2}) {
      *operand = operand->first_rows(count);
    }
    view.rstd1 = view.rstd1.flat_slice(0, count);
    view.rstd2 = view.rstd2.flat_slice(0, count);
    return view;
  };
  BlockWork work = work_;
  work.delta = work_.delta.row_slice(0, count);
  Residual residual{saved(0, 0, 0, Tensor{}).input.row_slice(0, count), Tensor{}};
  context.quant.use_set(quant_set(0, 0));
  context.quant.begin_pass(context.stream);
  embed(batch, residual.x, context);
  for (int i = 0; i < piece(0).num_layers; ++i) {
    const WeightLease lease = context.sync.acquire(block_bucket(i));
    context.sync.prefetch(bucket_behind(0, i));
    const auto layer = static_cast<std::size_t>(i);
    blocks_[layer].decode(residual, narrow(saved(0, 0, i, Tensor{})), work, tokens, caches[layer],
                          cached, keys, context);
  }
  LmHead::Saved head = head_saved_;
  head.sum = head.sum.row_slice(0, count);
  head.normed = head.normed.row_slice(0, count);
  const HeadLeases leases = acquire_head(context);
  head_->logits(residual, last, logits, head, context);
}

}  // namespace tessera
