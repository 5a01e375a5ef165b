// One decoder block: attention and MLP around a residual stream. Forward and backward are written
// out in reading order; shapes use T tokens, t tokens of this rank between blocks (T / tp under
// sequence parallelism), H hidden, F ffn features of this rank, Q columns of the packed local [q |
// k | v].
#pragma once

#include <string>

#include "engine/memory/arena.h"
#include "kernels/rope.h"
#include "models/attention.h"
#include "models/config.h"
#include "models/geometry.h"
#include "models/linear.h"
#include "models/mlp.h"
#include "models/norm.h"
#include "models/recompute.h"

namespace tessera {

// The residual stream between blocks: its value is x + delta (x alone before the first block). The
// sum is taken by the next norm, which reads both anyway.
struct Residual {
  Tensor x;
  Tensor delta;
};

// What a block's backward needs from its forward. The inputs of the linear layers are operands:
// quantised, their copies are kept and the plain values may be shared with other blocks.
struct BlockSaved {
  Tensor input;          // [t, H] residual stream entering the block
  Tensor rstd1;          // [t]
  GemmOperand normed1;   // [t, H]
  Tensor qkv_raw;        // [T, Q] before q/k norm; undefined without
  Tensor qkv_rstd;       // [T, heads] of q/k norm; undefined without
  Tensor qkv;            // [T, Q] rotated
  GemmOperand attended;  // [T, heads_q * head_dim]; plain is kept: attention's backward reads it
  Tensor lse;            // [T, heads_q]
  Tensor middle;         // [t, H] residual stream after attention
  Tensor rstd2;          // [t]
  GemmOperand normed2;   // [t, H]
  MlpSaved mlp;
};

// Buffers that all blocks of a rank share, one after another.
struct BlockWork {
  Tensor delta;      // [t, H] pending addition to the residual stream
  Tensor dnormed;    // [t, H]
  Tensor dact;       // [C, F] of as many tokens as MlpSaved has room for
  Tensor dattended;  // [T, heads_q * head_dim]
  Tensor dqkv;       // [T, Q]
};

// Keys and values of the tokens generated so far, of one layer. Row i is token i.
struct LayerCache {
  Tensor k;  // [capacity, heads_kv * head_dim]
  Tensor v;
};

class Block {
 public:
  Block(const ModelConfig& config, int layer, int tensor_size, bool sequence_parallel,
        ParamRegistry& registry, QuantRegistry& quant, int bucket);

  // All but `input`, which the caller provides. `first`: what was planned for the first block, if
  // this is another; what need not be kept per block lies in its tensors. That is what a selective
  // recompute repeats, and the plain values of quantised inputs.
  BlockSaved plan_saved(const ModelConfig& config, int tensor_size, const BatchGeometry& geometry,
                        const std::string& name, const ActivationOptions& options, bool trains,
                        const QuantState& quant, Arena& arena, const BlockSaved* first) const;
  // `other`, another block's tensors, with the amaxes and scales of this block.
  BlockSaved share_saved(const BlockSaved& other, const QuantState& quant) const;
  static BlockWork plan_work(const ModelConfig& config, int tensor_size,
                             const BatchGeometry& geometry, const ActivationOptions& options,
                             bool trains, Arena& arena);

  // Advances `residual` by this block; fills `saved`.
  void forward(Residual& residual, const BlockSaved& saved, const BlockWork& work,
               const TokenContext& tokens, LayerContext& context) const;
  // d [t, H], in place: gradient of the block's output to gradient of its input. What wrote d
  // recorded its amax in output_gradient_amax; this records that of the new d in `input_amax` where
  // it is defined.
  void backward(const Tensor& d, const Tensor& input_amax, const BlockSaved& saved,
                const BlockWork& work, Recompute recompute, const TokenContext& tokens,
                LayerContext& context) const;
  // Undefined where nothing is quantised by it.
  Tensor output_gradient_amax(const QuantState& quant) const {
    return mlp_.output_layer().output_gradient_amax(quant);
  }
  // Forward without a backward: the keys and values of the new tokens are appended to `cache`
  // behind its first `cached` rows, and `keys` bounds all of them (documents bounds the new
  // tokens).
  void decode(Residual& residual, const BlockSaved& saved, const BlockWork& work,
              const TokenContext& tokens, const LayerCache& cache, std::int64_t cached,
              const Tensor& keys, LayerContext& context) const;

 private:
  void project_qkv(const Residual& residual, const BlockSaved& saved, const TokenContext& tokens,
                   LayerContext& context) const;
  // From the attention's output to the input of the MLP.
  void project_attended(const BlockSaved& saved, const BlockWork& work,
                        LayerContext& context) const;

  QkvLayout layout_;
  Attention attention_;
  ResidualNorm norm1_;
  ColumnParallelLinear qkv_;
  ParamId q_norm_;
  ParamId k_norm_;
  float qk_eps_ = 1e-6f;
  RowParallelLinear o_;
  ResidualNorm norm2_;
  Mlp mlp_;
};

// How a model's heads are spread over tp: query heads equally; key/value heads equally, or one per
// group of ranks where there are fewer than tp. kUser, naming the three numbers, where neither
// fits.
QkvLayout local_qkv_layout(const ModelConfig& config, int tensor_size);

}  // namespace tessera
