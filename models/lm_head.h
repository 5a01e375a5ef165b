// Language-model head: final norm, vocabulary projection and cross-entropy, in chunks of tokens so
// that the full logits never exist. The loss is a sum over target tokens; nothing here divides it.
#pragma once

#include "engine/memory/arena.h"
#include "models/block.h"
#include "models/config.h"
#include "models/geometry.h"
#include "models/norm.h"

namespace tessera {

class LmHead {
 public:
  // `tied` is the embedding's weight where the model ties them, else undefined.
  LmHead(const ModelConfig& config, bool sequence_parallel, ParamId tied, ParamRegistry& registry,
         int bucket);

  struct Saved {
    Tensor sum;     // [t, H] residual stream at the end
    Tensor rstd;    // [t]
    Tensor normed;  // [t, H]
    Tensor d;       // [t, H] gradient of the sum; the backward of the blocks starts from it
    Tensor d_amax;  // [1] record of d's largest magnitude, or undefined
  };
  static Saved plan_saved(const ModelConfig& config, const BatchGeometry& geometry, Arena& arena);

  // Adds the loss to loss_sum [1] fp64 and writes the loss of each token to nll [T] (if defined).
  void loss(const Residual& residual, const Tensor& targets, const Tensor& loss_sum,
            const Tensor& nll, const Saved& saved, LayerContext& context) const;
  // The same with its backward: gradients of the head's parameters, and saved.d.
  void loss_and_backward(const Residual& residual, const Tensor& targets, const Tensor& loss_sum,
                         const Saved& saved, LayerContext& context) const;
  // logits [n, vocab_size] of the tokens `first` .. `first` + n - 1, whole on every rank of tp.
  void logits(const Residual& residual, std::int64_t first, const Tensor& logits,
              const Saved& saved, LayerContext& context) const;

 private:
  void run(const Residual& residual, const Tensor& targets, const Tensor& loss_sum,
           const Tensor& nll, bool with_backward, const Saved& saved, LayerContext& context) const;

  std::int64_t vocab_size_;
  ResidualNorm norm_;
  ParamId weight_;
};

}  // namespace tessera
