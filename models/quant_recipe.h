// QuantRecipe: the formats in which the products of a model's linear layers are taken. An immutable
// policy; the default leaves everything in the compute format, its quantisers being the identity,
// so that layers have one code path.
#pragma once

#include <string>
#include <vector>

#include "engine/core/dtype.h"

namespace tessera {

enum class QuantScaling : unsigned char {
  kNone,     // nothing is quantised
  kCurrent,  // FP8 with one scale per tensor, from the largest magnitude the tensor itself holds
  // FP8 with scales for 128 x 128 blocks of weights and for 128 neighbours of activations and
  // gradients along the inner dim of a product
  kBlockwise,
};

struct QuantRecipe {
  QuantScaling scaling = QuantScaling::kNone;
  DType forward = DType::kF8E4M3;   // inputs and weights
  DType gradient = DType::kF8E5M2;  // gradients of outputs
  // Sums of gradients are added up in fp32 every 128 products: their terms cancel more than those
  // of activations, and training is known to keep its quality this way (what Transformer Engine and
  // torchao do by default). The forward takes the faster sums.
  bool fast_gradients = false;
  // Layers that stay in the compute format; see names_layer.
  std::vector<std::string> keep_bf16 = {"lm_head"};

  bool is_quantized() const { return scaling != QuantScaling::kNone; }
};

// Whether `entry` names `layer` or something it is part of: "layers.3", "mlp" and "mlp.down_proj"
// all name "model.layers.3.mlp.down_proj". Whole words only.
bool names_layer(const std::string& entry, const std::string& layer);

}  // namespace tessera
