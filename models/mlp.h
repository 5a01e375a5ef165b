// Mlp: y = down(silu(gate(x)) * up(x)), forward and backward. T tokens, t of them of this rank
// between blocks (T / tp under sequence parallelism), H hidden, F ffn features of this rank.
//
// Its inner activations are the widest of a block, so that with long rows they are the largest thing
// in a model that keeps nothing but the inputs of its blocks. They may be planned for fewer tokens
// than a micro-batch has: forward and backward then go through the tokens in chunks, and [T, 2F]
// never exists whole. Chunks change the order in which the gradients of the weights add up, so
// results equal those of the whole to round-off; the order is fixed, so the same chunks give the
// same bits.
#pragma once

#include <cstdint>
#include <string>

#include "engine/memory/arena.h"
#include "models/config.h"
#include "models/geometry.h"
#include "models/linear.h"
#include "models/recompute.h"

namespace tessera {

// What the backward of an Mlp needs from its forward beside its input. There is room for C <= T
// tokens; less than all where a recompute makes it again, chunk by chunk.
struct MlpSaved {
  Tensor gate_up;   // [C, 2F]; the backward overwrites it with its gradient
  GemmOperand act;  // [C, F]
};

class Mlp {
 public:
  Mlp() = default;
  // `prefix`: "model.layers.3.mlp.".
  Mlp(const ModelConfig& config, const std::string& prefix, int tensor_size, bool sequence_parallel,
      ParamRegistry& registry, QuantRegistry& quant, int bucket);

  // How many of this rank's t tokens are taken at a time where nothing is kept: all of them, or
  // chunks of a multiple of 128, about equal, whose [., 2F] stays within `chunk_bytes` (128 tokens
  // at least).
  static std::int64_t chunk_tokens(const ModelConfig& config, int tensor_size,
                                   const BatchGeometry& geometry, std::int64_t chunk_bytes);

  // The layers that take x [t, H] and act [T, F].
  const ColumnParallelLinear& input_layer() const { return gate_up_; }
  const RowParallelLinear& output_layer() const { return down_; }

  // y [t, H]; x [t, H] with its amax recorded, its copies for a chunk at least.
  void forward(const GemmOperand& x, const MlpSaved& saved, const Tensor& y,
               LayerContext& context) const;
  // dx [t, H] from dy [t, H], whose amax is recorded; overwrites dact [C, F]. What `recompute` did
  // not keep is made again from x.
  void backward(const GemmOperand& x, const GemmOperand& dy, const MlpSaved& saved,
                const Tensor& dact, const Tensor& dx, Recompute recompute,
                LayerContext& context) const;

 private:
  // Some of the tokens and the rooms that they use.
  struct Chunk {
    std::int64_t begin = 0;  // of this rank's tokens
    std::int64_t count = 0;
    bool is_all = true;
    GemmOperand x;   // [count, H]
    MlpSaved saved;  // of these tokens of all ranks
  };
  template <typename Body>
  static void for_each_chunk(const GemmOperand& x, const MlpSaved& saved,
                             const LayerContext& context, Body&& body);
  // From x to act.
  void inner(const Chunk& chunk, LayerContext& context) const;

  ColumnParallelLinear gate_up_;
  RowParallelLinear down_;
};

// MLP features of a rank, padding included.
std::int64_t local_intermediate_size(const ModelConfig& config, int tensor_size);

}  // namespace tessera
