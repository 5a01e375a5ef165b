#include "kernels/rmsnorm.h"

#include "kernels/check.h"
#include "kernels/cpu/row_pieces.h"
#include "kernels/cuda_workspace.h"
#include "kernels/ops.h"

namespace tessera {

void check(const RmsNormForward& args) {
  ArgumentCheck arg("rmsnorm_forward");
  arg.matrix("x", args.x);
  arg.dtype("x", args.x, {DType::kBF16, DType::kF32, DType::kF64});
  arg.require(args.x.cols() > 0, "x has no columns");
  arg.require(args.delta.defined() == args.sum.defined(),
              "delta and sum belong together: one of them is missing");
  if (args.delta.defined()) {
    arg.shape("delta", args.delta, args.x.shape, "x", args.x);
    arg.dtype("delta", args.delta, {args.x.dtype});
    arg.shape("sum", args.sum, args.x.shape, "x", args.x);
    arg.dtype("sum", args.sum, {args.x.dtype});
    arg.in_place_or_separate("sum", args.sum, "x", args.x);
    arg.in_place_or_separate("sum", args.sum, "delta", args.delta);
  }
  arg.shape("weight", args.weight, Shape{args.x.cols()}, "x", args.x);
  arg.dtype("weight", args.weight, {args.x.dtype});
  arg.shape("out", args.out, args.x.shape, "x", args.x);
  arg.dtype("out", args.out, {args.x.dtype});
  arg.separate("out", args.out, "x", args.x);
  arg.separate("out", args.out, "delta", args.delta);
  arg.separate("out", args.out, "sum", args.sum);
  arg.separate("out", args.out, "weight", args.weight);
  if (args.rstd.defined()) {
    arg.shape("rstd", args.rstd, Shape{args.x.rows()}, "x", args.x);
    arg.dtype("rstd", args.rstd, {compute_dtype(args.x.dtype)});
  }
  arg.require(args.eps >= 0, "eps is negative");
  arg.amax(args.amax, args.out);
}

std::size_t workspace(const RmsNormForward&, const Capabilities&) { return 0; }

void check(const RmsNormBackward& args) {
  ArgumentCheck arg("rmsnorm_backward");
  arg.matrix("dout", args.dout);
  arg.dtype("dout", args.dout, {DType::kBF16, DType::kF32, DType::kF64});
  arg.require(args.dout.cols() > 0, "dout has no columns");
  arg.shape("s", args.s, args.dout.shape, "dout", args.dout);
  arg.dtype("s", args.s, {args.dout.dtype});
  arg.shape("weight", args.weight, Shape{args.dout.cols()}, "dout", args.dout);
  arg.dtype("weight", args.weight, {args.dout.dtype});
  arg.shape("rstd", args.rstd, Shape{args.dout.rows()}, "dout", args.dout);
  arg.dtype("rstd", args.rstd, {compute_dtype(args.dout.dtype)});
  if (args.dsum.defined()) {
    arg.shape("dsum", args.dsum, args.dout.shape, "dout", args.dout);
    arg.dtype("dsum", args.dsum, {args.dout.dtype});
  }
  arg.shape("dx", args.dx, args.dout.shape, "dout", args.dout);
  arg.dtype("dx", args.dx, {args.dout.dtype});
  arg.in_place_or_separate("dx", args.dx, "dsum", args.dsum);
  arg.separate("dx", args.dx, "s", args.s);
  arg.separate("dx", args.dx, "dout", args.dout);
  arg.separate("dx", args.dx, "weight", args.weight);
  if (args.dweight.defined()) {
    arg.shape("dweight", args.dweight, Shape{args.dout.cols()}, "dout", args.dout);
    arg.dtype("dweight", args.dweight, {args.dout.dtype, DType::kF32});
    arg.separate("dweight", args.dweight, "weight", args.weight);
  }
  arg.amax(args.amax, args.dx);
}

std::size_t workspace(const RmsNormBackward& args, const Capabilities& target) {
  if (target.target == DeviceKind::kCuda) return cuda::device_scratch(args, target);
  if (!args.dweight.defined()) return 0;
  return static_cast<std::size_t>(cpu::RowPieces::of(args.dout.rows()).count * args.dout.cols()) *
         size_of(compute_dtype(args.dout.dtype));
}

}  // namespace tessera
