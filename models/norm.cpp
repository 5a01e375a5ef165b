#include "models/norm.h"

#include "kernels/ops.h"

namespace tessera {

ResidualNorm::ResidualNorm(ParamRegistry& registry, int bucket, const std::string& name,
                           std::int64_t hidden, float eps, bool sequence_parallel)
    : eps_(eps) {
  ParamSpec spec;
  spec.name = name + ".weight";
  spec.shape = Shape{hidden};
  spec.init_mean = 1.0f;
  spec.gradient_sum = sequence_parallel ? GradientSum::kTensor : GradientSum::kNone;
  weight_ = registry.add(bucket, std::move(spec));
}

void ResidualNorm::forward(const Tensor& x, const Tensor& delta, const Tensor& sum,
                           const GemmOperand& out, const Tensor& rstd,
                           LayerContext& context) const {
  RmsNormForward args;
  args.x = x;
  args.delta = delta;
  if (delta.defined()) {
    args.sum = sum;
  } else {
    CHECK(sum.data == x.data, "[norm] without a delta the sum is the input itself");
  }
  args.weight = context.params.weight(weight_);
  args.out = out.plain;
  args.amax = amax_to_record(out, context);
  args.rstd = rstd;
  args.eps = eps_;
  rmsnorm_forward(args, context.stream);
}

void ResidualNorm::recompute(const Tensor& sum, const GemmOperand& out,
                             LayerContext& context) const {
  forward(sum, Tensor{}, sum, out, Tensor{}, context);
}

void ResidualNorm::backward(const Tensor& dout, const Tensor& sum, const Tensor& rstd,
                            const Tensor& d, bool residual, const Tensor& amax,
                            LayerContext& context) const {
  const GradientTarget target = context.params.gradient(weight_);
  RmsNormBackward args;
  args.dout = dout;
  args.s = sum;
  args.weight = context.params.weight(weight_);
  args.rstd = rstd;
  if (residual) args.dsum = d;
  args.dx = d;
  args.dweight = target.tensor;
  args.accumulate_dweight = target.accumulate;
  args.amax = amax;
  rmsnorm_backward(args, context.stream);
}

}  // namespace tessera
