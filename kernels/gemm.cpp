#include "kernels/gemm.h"

#include "kernels/check.h"
#include "kernels/cpu/gemm_plan.h"
#include "kernels/cuda_workspace.h"
#include "kernels/ops.h"
#include "kernels/quantize.h"

namespace tessera {
namespace {

void check_block_scales(const Gemm& args, ArgumentCheck& arg) {
  arg.require(args.scale_mode_a != ScaleMode::kTensor && args.scale_mode_b != ScaleMode::kTensor,
              "one operand has a scale for the tensor, the other for blocks of it");
  arg.require(args.scale_mode_a != ScaleMode::kBlock || args.scale_mode_b != ScaleMode::kBlock,
              "both operands have scales for 128 x 128 blocks, expected one of them to have "
              "scales for vectors");
  arg.require(!args.fast_accumulation, "fast accumulation does not go with scales for blocks");
  const auto check_one = [&](const char* name, const Tensor& scale, ScaleMode mode,
                             const Tensor& operand) {
    arg.shape(name, scale, scale_shape(mode, operand.rows(), operand.cols()), "operand", operand);
    arg.dtype(name, scale, {DType::kF32});
    arg.dense(name, scale);
    CHECK(reinterpret_cast<std::uintptr_t>(scale.data) % 16 == 0,
          "[gemm] {} does not start at a multiple of 16 bytes", name);
  };
  check_one("scale_a", args.scale_a, args.scale_mode_a, args.a);
  check_one("scale_b", args.scale_b, args.scale_mode_b, args.b);
}

void check_fp8(const Gemm& args, ArgumentCheck& arg) {
  arg.dtype("b", args.b, {DType::kF8E4M3, DType::kF8E5M2});
  arg.require(args.a.dtype == DType::kF8E4M3 || args.b.dtype == DType::kF8E4M3,
              "a and b are both e5m2, expected one of them to be e4m3");
  arg.dtype("c", args.c, {DType::kBF16, DType::kF32});
  arg.require(!args.transpose_a && args.transpose_b,
              "FP8 operands are multiplied as a [m, k] by b [n, k] transposed only");
  if (args.scale_mode_a == ScaleMode::kTensor && args.scale_mode_b == ScaleMode::kTensor) {
    arg.scalar("scale_a", args.scale_a);
    arg.scalar("scale_b", args.scale_b);
  } else {
    check_block_scales(args, arg);
  }
  const std::int64_t k = args.a.cols();
  const std::int64_t n = args.b.rows();
  CHECK(k % 16 == 0 && n % 16 == 0,
        "[gemm] FP8 operands give k {} and n {}, expected multiples of 16", k, n);
  for (const Tensor* operand : {&args.a, &args.b}) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(operand->data) % 16 == 0 &&
                         (operand->rows() <= 1 || operand->row_stride % 16 == 0);
    CHECK(aligned,
          "[gemm] rows of an FP8 operand {} with stride {} do not start at multiples of 16 bytes",
          to_string(operand->shape), operand->row_stride);
  }
}

}  // namespace

void check(const Gemm& args) {
  ArgumentCheck arg("gemm");
  arg.matrix("a", args.a);
  arg.matrix("b", args.b);
  arg.matrix("c", args.c);
  const std::int64_t m = args.transpose_a ? args.a.cols() : args.a.rows();
  const std::int64_t k = args.transpose_a ? args.a.rows() : args.a.cols();
  const std::int64_t n = args.transpose_b ? args.b.rows() : args.b.cols();
  const std::int64_t b_k = args.transpose_b ? args.b.cols() : args.b.rows();
  CHECK(k == b_k, "[gemm] b is {}{}, expected inner size {} to match a {}{}",
        to_string(args.b.shape), args.transpose_b ? " transposed" : "", k, to_string(args.a.shape),
        args.transpose_a ? " transposed" : "");
  CHECK(args.c.rows() == m && args.c.cols() == n,
        "[gemm] c is {}, expected {} to match a {} and b {}", to_string(args.c.shape),
        to_string(Shape{m, n}), to_string(args.a.shape), to_string(args.b.shape));
  if (is_fp8(args.a.dtype)) {
    check_fp8(args, arg);
  } else {
    arg.dtype("a", args.a,
              {DType::kBF16, DType::kF32, DType::kF64, DType::kF8E4M3, DType::kF8E5M2});
    arg.dtype("b", args.b, {args.a.dtype});
    arg.dtype("c", args.c, {args.a.dtype, DType::kF32});
    arg.require(!args.scale_a.defined() && !args.scale_b.defined() && !args.fast_accumulation &&
                    args.scale_mode_a == ScaleMode::kTensor &&
                    args.scale_mode_b == ScaleMode::kTensor,
                "scales and fast accumulation belong to FP8 operands");
  }
  arg.separate("c", args.c, "a", args.a);
  arg.separate("c", args.c, "b", args.b);
  if (args.bias.defined()) {
    arg.shape("bias", args.bias, Shape{n}, "c", args.c);
    arg.dtype("bias", args.bias, {is_fp8(args.a.dtype) ? args.c.dtype : args.a.dtype});
    arg.separate("c", args.c, "bias", args.bias);
  }
}

std::size_t workspace(const Gemm& args, const Capabilities& target) {
  if (target.target == DeviceKind::kCuda) return cuda::device_scratch(args, target);
  return cpu::GemmPlan::of(args, target.cpu_threads).bytes();
}

}  // namespace tessera
