// QuantState: the memory of a model's quantised products on one rank. For every quantised layer it
// holds the amax and scale of its input and of its output's gradient (scales of blocks lie beside
// their copies instead), of every micro-batch in flight apart, and the weight's copies,
// which are made anew when the weight has changed: once per optimizer step where weights stay, once
// per gathering where they come and go (ParamStore::weight_version tells).
#pragma once

#include <cstdint>
#include <vector>

#include "engine/memory/arena.h"
#include "models/gemm_operand.h"
#include "models/quant_registry.h"
#include "parallel/param_store.h"

namespace tessera {

class QuantState {
 public:
  // Takes its memory from `arena` in a fixed order. `sets`: micro-batches whose activations are kept
  // at once, in every chunk of a pipeline.
  QuantState(const QuantRegistry& registry, const ParamStore& params, Arena& arena, int sets = 1);

  const QuantRecipe& recipe() const { return recipe_; }

  // Whose amaxes and scales the calls below give, until the next call.
  void use_set(int set) { set_ = set; }
  // Operands without copies (with amax and scale, if there is one per tensor), of layer number
  // `linear`; plain ones for -1.
  GemmOperand input(int linear) const { return slot(linear, 0); }
  GemmOperand gradient(int linear) const { return slot(linear, 1); }

  // Counts what casts of activations and gradients lose from here on (kernels/quantize.h,
  // CastLosses), from zero; or stops. `losses`: [quantised layers * 2 * 2] int64, of each layer the
  // counts of its input and of its output's gradient; undefined without quantised layers.
  void watch_losses(bool watches, Stream& stream);
  const Tensor& losses() const { return losses_; }
  // Where those of a cast go; undefined while nothing is counted.
  Tensor input_losses(int linear) const { return losses_of(linear, 0); }
  Tensor gradient_losses(int linear) const { return losses_of(linear, 1); }

  // Forgets the amaxes of activations and gradients of this set: at the start of each forward.
  void begin_pass(Stream& stream) const;

  // The weight of a quantised layer with both copies, cast on the stream first if it has changed; with
  // its row copy alone where ZeRO 3 gathers codes. The bucket is whole (gathered) on the stream.
  GemmOperand weight(int linear, const ParamStore& params, Stream& stream);

 private:
  struct WeightCopies {
    QuantRegistry::Linear linear;
    GemmOperand copies;  // none where the bucket is gathered as codes
    std::uint64_t version = 0;  // of the weights that the copies were made from; 0: none yet
  };
  GemmOperand slot(int linear, int which) const;
  Tensor losses_of(int linear, int which) const;

  QuantRecipe recipe_;
  std::int64_t count_ = 0;  // of quantised layers
  int set_ = 0;
  Tensor amaxes_;
  Tensor scales_;
  Tensor losses_;
  bool watches_losses_ = false;
  std::vector<WeightCopies> weights_;
};

}  // namespace tessera
