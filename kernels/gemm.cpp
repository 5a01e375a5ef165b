#include "kernels/gemm.h"

#include "kernels/check.h"
#include "kernels/cpu/gemm_plan.h"
#include "kernels/cuda_workspace.h"
#include "kernels/ops.h"

namespace tessera {

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
  CHECK(args.c.rows() == m && args.c.cols() == n, "[gemm] c is {}, expected {} to match a {} and b {}",
        to_string(args.c.shape), to_string(Shape{m, n}), to_string(args.a.shape),
        to_string(args.b.shape));
  arg.dtype("a", args.a, {DType::kBF16, DType::kF32, DType::kF64});
  arg.dtype("b", args.b, {args.a.dtype});
  arg.dtype("c", args.c, {args.a.dtype, DType::kF32});
  arg.separate("c", args.c, "a", args.a);
  arg.separate("c", args.c, "b", args.b);
  if (args.bias.defined()) {
    arg.shape("bias", args.bias, Shape{n}, "c", args.c);
    arg.dtype("bias", args.bias, {args.a.dtype});
    arg.separate("c", args.c, "bias", args.bias);
  }
}

std::size_t workspace(const Gemm& args, const Capabilities& target) {
  if (target.target == DeviceKind::kCuda) return cuda::device_scratch(args, target);
  return cpu::GemmPlan::of(args, target.cpu_threads).bytes();
}

}  // namespace tessera
