// Linear layers. LocalLinear is the map a rank computes; ParallelLinear adds its placement and the
// collectives around it (Shoeybi et al. 2019; sequence parallelism: Korthikanti et al. 2022).
//
//              forward                               backward
//   column     x -> [gather] -> GEMM                 dx: GEMM -> all-reduce [reduce-scatter]
//   row        GEMM -> all-reduce [reduce-scatter]   dy -> [gather] -> GEMM
// with [ ] under sequence parallelism, where exchanges run behind the products: parallel/overlap.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/memory/arena.h"
#include "models/layer_context.h"
#include "models/quant_registry.h"
#include "parallel/param_spec.h"

namespace tessera {

// y = x W^T (+ b), where W is one or more adjacent parameters of a bucket seen as one matrix. In
// which formats the three products are taken is the recipe's affair (QuantRecipe): operands carry
// what they need.
class LocalLinear {
 public:
  LocalLinear() = default;
  // `quant`: the layer's number in QuantRegistry, -1 where it is not quantised.
  LocalLinear(ParamId weight, ParamId bias, int fused, int quant)
      : weight_(weight), bias_(bias), fused_(fused), quant_(quant) {}

  bool has_bias() const { return bias_.defined(); }
  bool is_quantized() const { return quant_ >= 0; }
  // The layer's input and the gradient of its output as operands without copies.
  GemmOperand input(const Tensor& x, const QuantState& quant) const;
  GemmOperand output_gradient(const Tensor& dy, const QuantState& quant) const;

  // Makes the copies of operands (quantize), and counts what the casts lose where that is watched.
  void cast_input(const GemmOperand& x, LayerContext& context) const;
  void cast_gradient(const GemmOperand& dy, LayerContext& context) const;

  // x [T, in], y [T, out]; the bias is added when `add_bias`.
  void forward(const GemmOperand& x, const Tensor& y, bool add_bias, LayerContext& context) const;
  GemmOperand weight(LayerContext& context) const;
  // dx [T, in] = dy W; `weight` with a column copy if it is quantised.
  void backward_input(const GemmOperand& dy, const GemmOperand& weight, const Tensor& dx,
                      LayerContext& context) const;
  // dW (+)= dy^T x.
  void backward_weight(const GemmOperand& x, const GemmOperand& dy, LayerContext& context) const;
  // db (+)= column sums of dy.
  void backward_bias(const Tensor& dy, LayerContext& context) const;

 private:
  ParamId weight_;
  ParamId bias_;
  int fused_ = 1;
  int quant_ = -1;
};

// One parameter of a fused column-parallel matrix.
struct ColumnPart {
  std::string name;         // without ".weight" / ".bias"
  std::int64_t rows = 0;    // global output features
  std::int64_t groups = 0;  // > 0 and fewer than tp: held in groups with copies (KV heads)
};

// Features of a rank's piece of an MLP are a multiple of this: any size can be cut, and FP8
// products need it.
inline constexpr std::int64_t kFeatureQuantum = 16;

struct LinearOptions {
  std::int64_t in_features = 0;  // global
  bool bias = false;
  float init_std = 0.02f;
  bool sequence_parallel = false;
  // Of the features that are cut; see Placement::quantum.
  std::int64_t quantum = 1;
};

// What both kinds of layer share: the operands that they take. An input is planned once and given
// to forward and backward alike. Quantised, its copy for the backward is made by the forward, so
// that `plain` may be overwritten in between; its amax is recorded by its producer or by measure(),
// before forward. (Scales of blocks need no amax.)
class ParallelLinear {
 public:
  bool is_quantized() const { return local_.is_quantized(); }
  // The input `x` with this layer's amax and scale, and `from`'s copies.
  GemmOperand input(const Tensor& x, const GemmOperand& from, const QuantState& quant) const;
  // Makes x's copies as forward did, after its plain values were recomputed.
  void keep_input(const GemmOperand& x, LayerContext& context) const {
    local_.cast_input(x, context);
  }
  // The gradient of the output; its amax is recorded by its producer or by measure(), before
  // backward.
  GemmOperand output_gradient(const Tensor& dy, LayerContext& context) const {
    return local_.output_gradient(dy, context.quant);
  }
  Tensor output_gradient_amax(const QuantState& quant) const {
    return local_.output_gradient(Tensor{}, quant).amax;
  }

 protected:
  LocalLinear local_;
};

// Weights cut by output features: x is whole on every rank [T, in] (or its piece [T / tp, in] under
// sequence parallelism), y holds this rank's features [T, out_local].
class ColumnParallelLinear : public ParallelLinear {
 public:
  ColumnParallelLinear() = default;
  ColumnParallelLinear(ParamRegistry& registry, QuantRegistry& quant, int bucket,
                       const std::vector<ColumnPart>& parts, const LinearOptions& options);

  // Whether the backward gathers and casts the input's plain values, so that they must be kept:
  // where tokens are split and scales belong to blocks of the whole.
  bool keeps_plain(const QuantState& quant) const;
  // Plans the copies that the backward of input `x` needs.
  GemmOperand plan_input(const Tensor& x, const std::string& name, const QuantState& quant,
                         bool trains, Arena& arena) const;
  void forward(const GemmOperand& x, const Tensor& y, LayerContext& context) const;
  // dx is written in x's form; x as given to forward.
  void backward(const GemmOperand& x, const GemmOperand& dy, const Tensor& dx,
                LayerContext& context) const;

 private:
  // From the gathered input.
  void backward_weight(const GemmOperand& x_whole, const GemmOperand& dy,
                       LayerContext& context) const;

  bool splits_tokens_ = false;  // x and dx are pieces [T / tp, in]
};

// Weights cut by input features: x holds this rank's features [T, in_local], y is whole on every
// rank [T, out] (or its piece [T / tp, out] under sequence parallelism).
class RowParallelLinear : public ParallelLinear {
 public:
  RowParallelLinear() = default;
  RowParallelLinear(ParamRegistry& registry, QuantRegistry& quant, int bucket,
                    const std::string& name, std::int64_t out_features,
                    const LinearOptions& options);

  bool keeps_plain(const QuantState&) const { return false; }
  GemmOperand plan_input(const Tensor& x, const std::string& name, const QuantState& quant,
                         bool trains, Arena& arena) const;
  void forward(const GemmOperand& x, const Tensor& y, LayerContext& context) const;
  // dx [T, in_local]; dy in y's form.
  void backward(const GemmOperand& x, const GemmOperand& dy, const Tensor& dx,
                LayerContext& context) const;
};

}  // namespace tessera
