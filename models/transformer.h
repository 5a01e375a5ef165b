// Transformer: one rank's part of a Llama-style decoder, with its activations. It knows the order
// of the layers and nothing of steps, optimizers or data; the trainer drives it through
// micro-batches.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/memory/arena.h"
#include "models/block.h"
#include "models/config.h"
#include "models/embedding.h"
#include "models/geometry.h"
#include "models/lm_head.h"

namespace tessera {

// One micro-batch on the device.
struct DeviceBatch {
  Tensor tokens;     // [T] int32
  Tensor targets;    // [T] int32, < 0 ignored
  Tensor positions;  // [T] int32, from 0 in each document
  Tensor order;      // [T] int32: positions sorted by (token, position)
  Tensor documents;  // [max_documents + 1] int32 cumulative lengths
};
DeviceBatch plan_batch(const BatchGeometry& geometry, Arena& arena);

// Which parameters a model has and how they are bucketed: 0 the embedding, 1 + l block l, last the
// head.
class Transformer {
 public:
  // `tensor_size` ranks split each layer; `recipe` says which products are quantised.
  Transformer(const ModelConfig& config, int tensor_size, bool sequence_parallel,
              const QuantRecipe& recipe = {});

  const ModelConfig& config() const { return config_; }
  const ParamRegistry& registry() const { return registry_; }
  const QuantRegistry& quant_registry() const { return quant_registry_; }
  int embedding_bucket() const { return 0; }
  int block_bucket(int layer) const { return 1 + layer; }
  int head_bucket() const { return 1 + static_cast<int>(blocks_.size()); }

  // Activations for micro-batches of this geometry. `positions`: length of the rotation tables (the
  // longest sequence). `trains` false keeps one block's worth.
  void plan(const BatchGeometry& geometry, Recompute recompute, bool trains,
            const QuantState& quant, Arena& arena);
  // Fills the rotation tables. Blocks.
  void initialize(Stream& stream);

  // Forward and loss: adds the summed loss to loss_sum [1] fp64; nll [T] or undefined.
  void evaluate(const DeviceBatch& batch, const Tensor& loss_sum, const Tensor& nll,
                LayerContext& context) const;
  // Forward, loss and backward of one micro-batch. `bucket_done(b)` is called when all gradients of
  // bucket b of this micro-batch have been enqueued.
  void forward_backward(const DeviceBatch& batch, const Tensor& loss_sum, LayerContext& context,
                        const std::function<void(int)>& bucket_done) const;

  // Generation: appends the batch's tokens (one sequence, positions from `cached`) to the caches
  // and returns the logits [1, vocab] of token `last` in `logits`. `keys` [2] int32 = {0, cached +
  // T}.
  void decode(const DeviceBatch& batch, const std::vector<LayerCache>& caches, std::int64_t cached,
              const Tensor& keys, std::int64_t last, const Tensor& logits,
              LayerContext& context) const;

 private:
  struct HeadLeases {
    WeightLease head;
    WeightLease tied;  // of the embedding, where the head uses its matrix
  };
  HeadLeases acquire_head(LayerContext& context) const;
  TokenContext token_context(const DeviceBatch& batch) const;
  void embed(const DeviceBatch& batch, const Tensor& out, LayerContext& context) const;
  // The embedding and all blocks.
  Residual run_blocks(const DeviceBatch& batch, bool keeps_inputs,
                      const LayerContext& context) const;

  ModelConfig config_;
  int tensor_size_;
  ParamRegistry registry_;
  QuantRegistry quant_registry_;
  VocabParallelEmbedding embedding_;
  std::vector<Block> blocks_;
  std::unique_ptr<LmHead> head_;

  BatchGeometry geometry_;
  Recompute recompute_ = Recompute::kNone;
  std::vector<BlockSaved> saved_;
  BlockWork work_;
  LmHead::Saved head_saved_;
  Tensor cos_;
  Tensor sin_;
};

}  // namespace tessera
