// Transformer: one rank's part of a Llama-style decoder, with its activations. It knows the order
// of the layers and nothing of steps, optimizers or data; PipelineRunner drives it through
// micro-batches. The part is one run of blocks (a chunk) or, in a pipeline of several chunks per
// rank, several; the first chunk of the model has the embedding in front, the last one the head
// behind.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/memory/arena.h"
#include "models/block.h"
#include "models/config.h"
#include "models/embedding.h"
#include "models/geometry.h"
#include "models/input_offload.h"
#include "models/lm_head.h"
#include "models/stage_split.h"
#include "parallel/pipeline_schedule.h"

namespace tessera {

// One micro-batch on the device: of the tokens that this rank holds.
struct DeviceBatch {
  Tensor tokens;     // [T] int32
  Tensor targets;    // [T] int32, < 0 ignored
  Tensor positions;  // [T] int32, from 0 in each document
  Tensor order;      // [T] int32: positions sorted by (token, position)
  // [max_documents + 1] int32 cumulative lengths, of the micro-batch on all context-parallel ranks.
  Tensor documents;
  Tensor piece_bounds;  // as TokenContext
};
DeviceBatch plan_batch(const BatchGeometry& geometry, Arena& arena);

// What a rank's parameters are and how they are bucketed: the embedding, a bucket per block, the
// head; where it has the head of a tied model without the embedding, a copy of the matrix as well.
class Transformer {
 public:
  // `tensor_size` ranks split each layer; `recipe` says which products are quantised; `pieces` are
  // this rank's chunks, the whole model by default.
  Transformer(const ModelConfig& config, int tensor_size, bool sequence_parallel,
              const QuantRecipe& recipe = {}, std::vector<StagePiece> pieces = {});

  const ModelConfig& config() const { return config_; }
  const ParamRegistry& registry() const { return registry_; }
  const QuantRegistry& quant_registry() const { return quant_registry_; }
  int num_chunks() const { return static_cast<int>(pieces_.size()); }
  const StagePiece& piece(int chunk) const { return pieces_[static_cast<std::size_t>(chunk)]; }

  // Activations for micro-batches of this geometry, and the buffers of messages: as many of each as
  // `buffers` says. `trains` false keeps one block's worth. `offload` and `host`, its memory: where
  // options.offloads_inputs says so and something is trained, else not used; `offload` outlives the
  // model's use.
  void plan(const BatchGeometry& geometry, const ActivationOptions& options, bool trains,
            const PipelineBuffers& buffers, QuantState& quant, Arena& arena,
            InputOffload* offload = nullptr, Arena* host = nullptr);
  // The buffers that forward and backward read and write by number, [t, H] each: the residual
  // stream from the chunk in front and to the one behind, and its gradient.
  const Tensor& input_buffer(int i) const { return inputs_.at(static_cast<std::size_t>(i)); }
  const Tensor& output_buffer(int i) const { return outputs_.at(static_cast<std::size_t>(i)); }
  const Tensor& gradient_buffer(int i) const { return gradients_.at(static_cast<std::size_t>(i)); }
  // Fills the rotation tables. Blocks.
  void initialize(Stream& stream);

  // Called with a bucket when all its gradients of the micro-batch have been enqueued.
  using BucketDone = std::function<void(int)>;

  // The forward or backward of a chunk, with the buffers that `action` names. Behind the last
  // blocks the forward has the loss as well, which is added to loss_sum [1] fp64, and the head's
  // backward.
  void forward(const PipelineAction& action, const DeviceBatch& batch, const Tensor& loss_sum,
               LayerContext& context, const BucketDone& bucket_done) const;
  void backward(const PipelineAction& action, const DeviceBatch& batch, LayerContext& context,
                const BucketDone& bucket_done) const;
  // Forward alone, from input buffer 0 to output buffer 0 where there are chunks in front and
  // behind; the last one adds the loss to loss_sum and writes that of each token to nll [T], if
  // defined.
  void evaluate_chunk(int chunk, const DeviceBatch& batch, const Tensor& loss_sum,
                      const Tensor& nll, LayerContext& context) const;

  // Of a model in one chunk: the forward and loss, or forward, loss and backward, of a micro-batch.
  void evaluate(const DeviceBatch& batch, const Tensor& loss_sum, const Tensor& nll,
                LayerContext& context) const;
  void forward_backward(const DeviceBatch& batch, const Tensor& loss_sum, LayerContext& context,
                        const BucketDone& bucket_done) const;

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
  // Local number of a chunk's block, and the bucket of a local block.
  int local_block(int chunk, int i) const {
    return first_block_[static_cast<std::size_t>(chunk)] + i;
  }
  int block_bucket(int local) const { return first_block_bucket_ + local; }
  // The bucket that is used behind this block in a forward; -1 where that is on another rank.
  int bucket_behind(int chunk, int i) const;
  // `input` is that of the chunk, where it is received.
  BlockSaved saved(int chunk, int set, int i, const Tensor& input) const;
  // Number of a block's input in offload_; -1 where it stays on the device (or is received).
  int offloaded(int chunk, int set, int i) const;
  // Number in QuantState of a chunk's activations.
  int quant_set(int chunk, int set) const;
  HeadLeases acquire_head(LayerContext& context) const;
  TokenContext token_context(const DeviceBatch& batch) const;
  void embed(const DeviceBatch& batch, const Tensor& out, LayerContext& context) const;
  // All blocks of a chunk, with the embedding where it has it. A backward follows or not.
  Residual run_blocks(int chunk, int set, const DeviceBatch& batch, const Tensor& input,
                      bool has_backward, const LayerContext& context) const;

  ModelConfig config_;
  int tensor_size_;
  ParamRegistry registry_;
  QuantRegistry quant_registry_;
  std::vector<StagePiece> pieces_;
  int embedding_bucket_ = -1;
  int first_block_bucket_ = -1;
  int head_bucket_ = -1;
  int tied_bucket_ = -1;  // of the matrix that the head shares with an embedding
  VocabParallelEmbedding embedding_;
  std::vector<Block> blocks_;
  std::vector<int> first_block_;  // of each chunk
  std::unique_ptr<LmHead> head_;

  BatchGeometry geometry_;
  ActivationOptions options_;
  InputOffload* offload_ = nullptr;
  std::vector<std::vector<std::vector<BlockSaved>>> saved_;  // [chunk][set][block of the chunk]
  std::vector<std::vector<int>> first_offloaded_;
  std::vector<int> first_quant_set_;  // of each chunk, in QuantState            // [chunk][set]
  std::vector<Tensor> inputs_;
  std::vector<Tensor> outputs_;
  std::vector<Tensor> gradients_;
  BlockWork work_;
  LmHead::Saved head_saved_;
  Tensor cos_;
  Tensor sin_;
};

}  // namespace tessera
