#include "models/linear.h"

#include "engine/memory/scratch.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

bool is_split(const LayerContext& context) {
  return context.sequence_parallel && context.tensor.size() > 1;
}

// Rows of the whole sequence behind a tensor that holds this rank's piece.
std::int64_t whole_rows(const Tensor& piece, const LayerContext& context) {
  return piece.rows() * context.tensor.size();
}

}  // namespace

void LocalLinear::forward(const Tensor& x, const Tensor& y, bool add_bias, LayerContext& context) const {
  Gemm args{x, context.params.fused_weight(weight_, fused_), y};
  args.transpose_b = true;
  if (add_bias && has_bias()) args.bias = context.params.fused_weight(bias_, fused_);
  gemm(args, context.stream);
}

void LocalLinear::backward_input(const Tensor& dy, const Tensor& dx, LayerContext& context) const {
  gemm(Gemm{dy, context.params.fused_weight(weight_, fused_), dx}, context.stream);
}

void LocalLinear::backward_weight(const Tensor& x, const Tensor& dy, LayerContext& context) const {
  const GradientTarget target = context.params.fused_gradient(weight_, fused_);
  Gemm args{dy, x, target.tensor};
  args.transpose_a = true;
  args.accumulate = target.accumulate;
  gemm(args, context.stream);
}

void LocalLinear::backward_bias(const Tensor& dy, LayerContext& context) const {
  if (!has_bias()) return;
  const GradientTarget target = context.params.fused_gradient(bias_, fused_);
  column_sum(ColumnSum{dy, target.tensor, target.accumulate}, context.stream);
}

ColumnParallelLinear::ColumnParallelLinear(ParamRegistry& registry, int bucket,
                                           const std::vector<ColumnPart>& parts,
                                           const LinearOptions& options) {
  const auto declare = [&](const char* suffix, bool is_weight) {
    ParamId first;
    for (const ColumnPart& part : parts) {
      ParamSpec spec;
      spec.name = part.name + suffix;
      spec.shape = is_weight ? Shape{part.rows, options.in_features} : Shape{part.rows};
      spec.placement = part.groups > 0 ? Placement::in_groups(part.groups)
                                         : Placement::sharded(0, options.quantum);
      spec.gradient_sum = part.groups > 0 ? GradientSum::kCopies : GradientSum::kNone;
      spec.init_std = is_weight ? options.init_std : 0.0f;
      spec.decay = is_weight;
      spec.follows_previous = first.defined();
      const ParamId id = registry.add(bucket, std::move(spec));
      if (!first.defined()) first = id;
    }
    return first;
  };
  const ParamId weight = declare(".weight", true);
  const ParamId bias = options.bias ? declare(".bias", false) : ParamId{};
  local_ = LocalLinear(weight, bias, static_cast<int>(parts.size()));
}

void ColumnParallelLinear::forward(const Tensor& x, const Tensor& y, LayerContext& context) const {
  if (!is_split(context)) {
    local_.forward(x, y, true, context);
    return;
  }
  const ScratchTensor whole(context.stream, x.dtype, Shape{whole_rows(x, context), x.cols()});
  context.tensor.all_gather(x, *whole, context.stream);
  local_.forward(*whole, y, true, context);
}

void ColumnParallelLinear::backward(const Tensor& x, const Tensor& dy, const Tensor& dx,
                                    LayerContext& context) const {
  local_.backward_bias(dy, context);
  if (!is_split(context)) {
    local_.backward_input(dy, dx, context);
    context.tensor.all_reduce(dx, ReduceOp::kSum, context.stream);
    local_.backward_weight(x, dy, context);
    return;
  }
  const Shape whole_shape{whole_rows(x, context), x.cols()};
  const ScratchTensor x_whole(context.stream, x.dtype, whole_shape);
  const ScratchTensor dx_whole(context.stream, dx.dtype, whole_shape);
  context.tensor.all_gather(x, *x_whole, context.stream);
  local_.backward_input(dy, *dx_whole, context);
  context.tensor.reduce_scatter(*dx_whole, dx, ReduceOp::kSum, context.stream);
  local_.backward_weight(*x_whole, dy, context);
}

RowParallelLinear::RowParallelLinear(ParamRegistry& registry, int bucket, const std::string& name,
                                     std::int64_t out_features, const LinearOptions& options) {
  ParamSpec spec;
  spec.name = name + ".weight";
  spec.shape = Shape{out_features, options.in_features};
  spec.placement = Placement::sharded(1, options.quantum);
  spec.init_std = options.init_std;
  spec.decay = true;
  const ParamId weight = registry.add(bucket, std::move(spec));
  ParamId bias;
  if (options.bias) {
    ParamSpec bias_spec;
    bias_spec.name = name + ".bias";
    bias_spec.shape = Shape{out_features};
    // Under sequence parallelism each rank sees the output gradient of its own tokens only.
    bias_spec.gradient_sum = options.sequence_parallel ? GradientSum::kTensor : GradientSum::kNone;
    bias = registry.add(bucket, std::move(bias_spec));
  }
  local_ = LocalLinear(weight, bias, 1);
}

void RowParallelLinear::forward(const Tensor& x, const Tensor& y, LayerContext& context) const {
  const bool adds_bias = context.tensor.rank() == 0;  // the sum over tp counts it once
  if (!is_split(context)) {
    local_.forward(x, y, adds_bias, context);
    context.tensor.all_reduce(y, ReduceOp::kSum, context.stream);
    return;
  }
  const ScratchTensor whole(context.stream, y.dtype, Shape{whole_rows(y, context), y.cols()});
  local_.forward(x, *whole, adds_bias, context);
  context.tensor.reduce_scatter(*whole, y, ReduceOp::kSum, context.stream);
}

void RowParallelLinear::backward(const Tensor& x, const Tensor& dy, const Tensor& dx,
                                 LayerContext& context) const {
  local_.backward_bias(dy, context);
  if (!is_split(context)) {
    local_.backward_input(dy, dx, context);
    local_.backward_weight(x, dy, context);
    return;
  }
  const ScratchTensor dy_whole(context.stream, dy.dtype, Shape{whole_rows(dy, context), dy.cols()});
  context.tensor.all_gather(dy, *dy_whole, context.stream);
  local_.backward_input(*dy_whole, dx, context);
  local_.backward_weight(x, *dy_whole, context);
}

}  // namespace tessera
