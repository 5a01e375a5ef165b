#include "kernels/optimizer.h"

#include "kernels/check.h"
#include "kernels/cpu/optimizer_plan.h"
#include "kernels/cuda_workspace.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

void check_segments(ArgumentCheck& arg, const Tensor& segments) {
  arg.defined("segments", segments);
  arg.dtype("segments", segments, {DType::kU8});
  arg.dense("segments", segments);
  CHECK(segments.numel() % static_cast<std::int64_t>(sizeof(ShardSegment)) == 0,
        "[{}] segments holds {} bytes, expected a multiple of {}", arg.op(), segments.numel(),
        sizeof(ShardSegment));
  arg.require(reinterpret_cast<std::uintptr_t>(segments.data) % alignof(ShardSegment) == 0,
              "segments is not aligned to its entries");
}

void check_control(ArgumentCheck& arg, const Tensor& control) {
  arg.defined("control", control);
  arg.dtype("control", control, {DType::kU8});
  CHECK(control.numel() == static_cast<std::int64_t>(sizeof(StepControl)) && control.is_dense(),
        "[{}] control is {}, expected [{}] dense bytes", arg.op(), to_string(control.shape),
        sizeof(StepControl));
  arg.require(reinterpret_cast<std::uintptr_t>(control.data) % alignof(StepControl) == 0,
              "control is not aligned");
}

void check_flat(ArgumentCheck& arg, std::string_view name, const Tensor& t, const Tensor& grad) {
  arg.shape(name, t, grad.shape, "grad", grad);
  arg.dtype(name, t, {DType::kF32, DType::kBF16});
}

}  // namespace

void check(const SumOfSquares& args) {
  ArgumentCheck arg("sum_of_squares");
  arg.defined("grad", args.grad);
  arg.require(args.grad.shape.rank == 1, "grad has more than one dim, expected a flat shard");
  arg.dtype("grad", args.grad, {DType::kF32, DType::kBF16});
  check_segments(arg, args.segments);
  arg.shape("sum", args.sum, Shape{1}, "a single sum over", args.grad);
  arg.dtype("sum", args.sum, {DType::kF64});
}

std::size_t workspace(const SumOfSquares& args, const Capabilities& target) {
  if (target.target == DeviceKind::kCuda) return cuda::device_scratch(args, target);
  return static_cast<std::size_t>(cpu::flat_blocks(args.grad.numel())) * sizeof(double);
}

void check(const StepControlFinish& args) {
  ArgumentCheck arg("step_control_finish");
  check_control(arg, args.control);
  arg.shape("sum", args.sum, Shape{1}, "control", args.control);
  arg.dtype("sum", args.sum, {DType::kF64});
  arg.shape("denominator", args.denominator, Shape{1}, "control", args.control);
  arg.dtype("denominator", args.denominator, {DType::kF64});
}

std::size_t workspace(const StepControlFinish&, const Capabilities&) { return 0; }

void check(const AdamW& args) {
  ArgumentCheck arg("adamw");
  arg.defined("grad", args.grad);
  arg.require(args.grad.shape.rank == 1, "grad has more than one dim, expected a flat shard");
  arg.dtype("grad", args.grad, {DType::kF32, DType::kBF16});
  check_flat(arg, "weight", args.weight, args.grad);
  const bool has_codes = args.m.defined() && args.m.dtype == DType::kU8;
  if (has_codes) {
    const std::int64_t n = args.grad.numel();
    CHECK(n % kMomentBlock == 0, "[adamw] {} elements with 8-bit moments, expected a multiple of {}",
          n, kMomentBlock);
    for (const auto& [name, t] : {std::pair{"m", &args.m}, {"v", &args.v}}) {
      arg.shape(name, *t, args.grad.shape, "grad", args.grad);
      arg.dtype(name, *t, {DType::kU8});
    }
    for (const auto& [name, t] :
         {std::pair{"m_scale", &args.m_scale}, {"v_scale", &args.v_scale}}) {
      arg.shape(name, *t, Shape{n / kMomentBlock}, "the blocks of grad", args.grad);
      arg.dtype(name, *t, {DType::kF32});
    }
  } else {
    check_flat(arg, "m", args.m, args.grad);
    check_flat(arg, "v", args.v, args.grad);
    arg.require(!args.m_scale.defined() && !args.v_scale.defined(),
                "scales are given for moments without codes");
  }
  if (args.master.defined()) {
    check_flat(arg, "master", args.master, args.grad);
    arg.dtype("master", args.master, {DType::kF32});
    arg.separate("master", args.master, "weight", args.weight);
    arg.separate("master", args.master, "grad", args.grad);
  }
  arg.separate("weight", args.weight, "grad", args.grad);
  arg.separate("m", args.m, "weight", args.weight);
  arg.separate("v", args.v, "weight", args.weight);
  arg.separate("m", args.m, "v", args.v);
  arg.separate("m", args.m, "grad", args.grad);
  arg.separate("v", args.v, "grad", args.grad);
  check_segments(arg, args.segments);
  check_control(arg, args.control);
  CHECK(args.beta1 >= 0 && args.beta1 < 1 && args.beta2 >= 0 && args.beta2 < 1 && args.eps >= 0,
        "[adamw] beta1 {}, beta2 {}, eps {}: expected betas in [0, 1) and eps >= 0", args.beta1,
        args.beta2, args.eps);
}

std::size_t workspace(const AdamW&, const Capabilities&) { return 0; }

}  // namespace tessera
