// Token embedding with its rows cut over tp.
#pragma once

#include "models/config.h"
#include "models/layer_context.h"

namespace tessera {

class VocabParallelEmbedding {
 public:
  VocabParallelEmbedding() = default;
  VocabParallelEmbedding(const ModelConfig& config, ParamRegistry& registry, int bucket);

  // tokens [T] int32; out [t, H] (t = T / tp under sequence parallelism).
  void forward(const Tensor& tokens, const Tensor& out, LayerContext& context) const;
  // order as in EmbeddingBackward; dout [t, H].
  void backward(const Tensor& tokens, const Tensor& order, const Tensor& dout,
                LayerContext& context) const;

  ParamId weight() const { return weight_; }

 private:
  ParamId weight_;
};

// The specification of an embedding or head matrix [vocab, hidden]: rows cut over tp, padded inside so
// that every vocabulary size divides.
ParamSpec vocab_matrix_spec(const ModelConfig& config, std::string name);

}  // namespace tessera
