// RMSNorm over the hidden dim, with the residual addition in front of it.
#pragma once

#include <string>

#include "models/layer_context.h"

namespace tessera {

class ResidualNorm {
 public:
  ResidualNorm() = default;
  ResidualNorm(ParamRegistry& registry, int bucket, const std::string& name, std::int64_t hidden,
               float eps, bool sequence_parallel);

  // sum = x + delta, out = norm(sum) with its amax. Where delta is undefined sum must be x itself.
  void forward(const Tensor& x, const Tensor& delta, const Tensor& sum, const GemmOperand& out,
               const Tensor& rstd, LayerContext& context) const;
  // out = norm(sum) again, for a backward that did not keep it.
  void recompute(const Tensor& sum, const GemmOperand& out, LayerContext& context) const;
  // d (in place): in, the gradient reaching sum by the residual path; out, the whole gradient of
  // sum. `residual` false: nothing arrives by that path (the final norm) and d is written only.
  // `amax` of d is recorded where it is defined.
  void backward(const Tensor& dout, const Tensor& sum, const Tensor& rstd, const Tensor& d,
                bool residual, const Tensor& amax, LayerContext& context) const;

 private:
  ParamId weight_;
  float eps_ = 1e-5f;
};

}  // namespace tessera
