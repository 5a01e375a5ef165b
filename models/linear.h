// Linear layers. LocalLinear is the map a rank computes; ParallelLinear adds its placement and the
// collectives around it (Shoeybi et al. 2019; sequence parallelism: Korthikanti et al. 2022).
//
//              forward                               backward
//   column     x -> [gather] -> GEMM                 dx: GEMM -> all-reduce [reduce-scatter]
//   row        GEMM -> all-reduce [reduce-scatter]   dy -> [gather] -> GEMM
// with [ ] under sequence parallelism.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/layer_context.h"
#include "parallel/param_spec.h"

namespace tessera {

// y = x W^T (+ b), where W is one or more adjacent parameters of a bucket seen as one matrix.
class LocalLinear {
 public:
  LocalLinear() = default;
  LocalLinear(ParamId weight, ParamId bias, int fused) : weight_(weight), bias_(bias), fused_(fused) {}

  bool has_bias() const { return bias_.defined(); }
  // x [T, in], y [T, out]; the bias is added when `add_bias`.
  void forward(const Tensor& x, const Tensor& y, bool add_bias, LayerContext& context) const;
  // dx [T, in] = dy W.
  void backward_input(const Tensor& dy, const Tensor& dx, LayerContext& context) const;
  // dW (+)= dy^T x.
  void backward_weight(const Tensor& x, const Tensor& dy, LayerContext& context) const;
  // db (+)= column sums of dy.
  void backward_bias(const Tensor& dy, LayerContext& context) const;

 private:
  ParamId weight_;
  ParamId bias_;
  int fused_ = 1;
};

// One parameter of a fused column-parallel matrix.
struct ColumnPart {
  std::string name;           // without ".weight" / ".bias"
  std::int64_t rows = 0;      // global output features
  std::int64_t groups = 0;    // > 0 and fewer than tp: held in groups with copies (KV heads)
};

// Features of a rank's piece of an MLP are a multiple of this: any size can be cut, and FP8 products need it.
inline constexpr std::int64_t kFeatureQuantum = 16;

struct LinearOptions {
  std::int64_t in_features = 0;   // global
  bool bias = false;
  float init_std = 0.02f;
  bool sequence_parallel = false;
  // Of the features that are cut; see Placement::quantum.
  std::int64_t quantum = 1;
};

// Weights cut by output features: x is whole on every rank [T, in] (or its piece [T / tp, in] under
// sequence parallelism), y holds this rank's features [T, out_local].
class ColumnParallelLinear {
 public:
  ColumnParallelLinear() = default;
  ColumnParallelLinear(ParamRegistry& registry, int bucket, const std::vector<ColumnPart>& parts,
                       const LinearOptions& options);

  void forward(const Tensor& x, const Tensor& y, LayerContext& context) const;
  // dx is written in x's form; x as given to forward.
  void backward(const Tensor& x, const Tensor& dy, const Tensor& dx, LayerContext& context) const;

 private:
  LocalLinear local_;
};

// Weights cut by input features: x holds this rank's features [T, in_local], y is whole on every rank
// [T, out] (or its piece [T / tp, out] under sequence parallelism).
class RowParallelLinear {
 public:
  RowParallelLinear() = default;
  RowParallelLinear(ParamRegistry& registry, int bucket, const std::string& name,
                    std::int64_t out_features, const LinearOptions& options);

  void forward(const Tensor& x, const Tensor& y, LayerContext& context) const;
  // dx [T, in_local]; dy in y's form.
  void backward(const Tensor& x, const Tensor& dy, const Tensor& dx, LayerContext& context) const;

 private:
  LocalLinear local_;
};

}  // namespace tessera
