// QuantRegistry: which linear layers of a model are quantised. Filled while the layers are
// constructed, as ParamRegistry is; QuantState then makes the memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/quant_recipe.h"
#include "parallel/param_spec.h"

namespace tessera {

class QuantRegistry {
 public:
  // `tensor_size` ranks split each layer: sizes are those of a rank.
  QuantRegistry(QuantRecipe recipe, int tensor_size)
      : recipe_(std::move(recipe)), tensor_size_(tensor_size) {}

  // Declares the layer whose matrix is `count` adjacent parameters; returns its number, or -1 where
  // its products stay in the compute format: the recipe says so, or a size is not a multiple of 16.
  int add(const ParamRegistry& params, ParamId first, int count);
  // A product of [rows, cols] that no recipe quantises.
  void add_plain(const std::string& layer, std::int64_t rows, std::int64_t cols);
  // kUser where an entry of keep_bf16 names no layer at all.
  void check_names() const;

  const QuantRecipe& recipe() const { return recipe_; }
  struct Linear {
    ParamId weight;
    int count = 1;
  };
  const std::vector<Linear>& linears() const { return linears_; }

  // Share of the multiply-adds of all matrix products (attention apart) that are taken in FP8.
  double share() const { return total_ > 0 ? quantized_ / total_ : 0; }
  // What stays in the compute format for its size, one line; empty if nothing does.
  std::string note() const;

 private:
  QuantRecipe recipe_;
  int tensor_size_;
  std::vector<Linear> linears_;
  std::vector<std::string> names_;
  double quantized_ = 0;
  double total_ = 0;
  int odd_layers_ = 0;
  std::string first_odd_;
};

}  // namespace tessera
