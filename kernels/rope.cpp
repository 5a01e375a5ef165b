#include "kernels/rope.h"

#include "kernels/check.h"
#include "kernels/cpu/row_pieces.h"
#include "kernels/cuda_workspace.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

void check_layout(const ArgumentCheck& arg, const QkvLayout& layout) {
  arg.require(layout.heads_q > 0 && layout.heads_kv >= 0 && layout.head_dim > 0,
              "layout has no q heads, a negative count or no head_dim");
}

void check_tables(ArgumentCheck& arg, const Tensor& rows, const Tensor& cos, const Tensor& sin,
                  const Tensor& positions, const QkvLayout& layout) {
  arg.matrix("cos", cos);
  arg.dtype("cos", cos, {compute_dtype(rows.dtype)});
  arg.shape("sin", sin, cos.shape, "cos", cos);
  arg.dtype("sin", sin, {cos.dtype});
  CHECK(2 * cos.cols() <= layout.head_dim, "[{}] cos is {}, expected at most head_dim / 2 = {} columns",
        arg.op(), to_string(cos.shape), layout.head_dim / 2);
  arg.shape("positions", positions, Shape{rows.rows()}, "the rows of", rows);
  arg.dtype("positions", positions, {DType::kI32});
}

}  // namespace

void check(const QkvRopeForward& args) {
  ArgumentCheck arg("qkv_rope_forward");
  check_layout(arg, args.layout);
  arg.matrix("in", args.in);
  arg.dtype("in", args.in, {DType::kBF16, DType::kF32, DType::kF64});
  CHECK(args.in.cols() == args.layout.cols(),
        "[qkv_rope_forward] in is {}, expected {} columns for {} q heads and {} kv heads of {}",
        to_string(args.in.shape), args.layout.cols(), args.layout.heads_q, args.layout.heads_kv,
        args.layout.head_dim);
  arg.shape("out", args.out, args.in.shape, "in", args.in);
  arg.dtype("out", args.out, {args.in.dtype});
  check_tables(arg, args.in, args.cos, args.sin, args.positions, args.layout);
  arg.require(args.q_norm.defined() == args.k_norm.defined(),
              "q_norm and k_norm belong together: one of them is missing");
  if (args.q_norm.defined()) {
    arg.shape("q_norm", args.q_norm, Shape{args.layout.head_dim}, "in", args.in);
    arg.dtype("q_norm", args.q_norm, {args.in.dtype});
    arg.shape("k_norm", args.k_norm, Shape{args.layout.head_dim}, "in", args.in);
    arg.dtype("k_norm", args.k_norm, {args.in.dtype});
    // The backward of the norm needs the values before it.
    arg.separate("out", args.out, "in", args.in);
    if (args.rstd.defined()) {
      arg.shape("rstd", args.rstd,
                Shape{args.in.rows(), args.layout.heads_q + args.layout.heads_kv}, "in", args.in);
      arg.dtype("rstd", args.rstd, {compute_dtype(args.in.dtype)});
      arg.dense("rstd", args.rstd);
    }
    arg.require(args.eps >= 0, "eps is negative");
  } else {
    arg.in_place_or_separate("out", args.out, "in", args.in);
  }
}

std::size_t workspace(const QkvRopeForward&, const Capabilities&) { return 0; }

void check(const QkvRopeBackward& args) {
  ArgumentCheck arg("qkv_rope_backward");
  check_layout(arg, args.layout);
  arg.matrix("d", args.d);
  arg.dtype("d", args.d, {DType::kBF16, DType::kF32, DType::kF64});
  CHECK(args.d.cols() == args.layout.cols(),
        "[qkv_rope_backward] d is {}, expected {} columns for {} q heads and {} kv heads of {}",
        to_string(args.d.shape), args.layout.cols(), args.layout.heads_q, args.layout.heads_kv,
        args.layout.head_dim);
  check_tables(arg, args.d, args.cos, args.sin, args.positions, args.layout);
  arg.require(args.q_norm.defined() == args.k_norm.defined(),
              "q_norm and k_norm belong together: one of them is missing");
  if (!args.q_norm.defined()) {
    arg.require(!args.dq_norm.defined() && !args.dk_norm.defined(),
                "dq_norm or dk_norm is given without q_norm and k_norm");
    return;
  }
  arg.shape("in", args.in, args.d.shape, "d", args.d);
  arg.dtype("in", args.in, {args.d.dtype});
  arg.separate("d", args.d, "in", args.in);
  arg.shape("rstd", args.rstd, Shape{args.d.rows(), args.layout.heads_q + args.layout.heads_kv}, "d",
            args.d);
  arg.dtype("rstd", args.rstd, {compute_dtype(args.d.dtype)});
  arg.dense("rstd", args.rstd);
  const Shape head{args.layout.head_dim};
  arg.shape("q_norm", args.q_norm, head, "d", args.d);
  arg.dtype("q_norm", args.q_norm, {args.d.dtype});
  arg.shape("k_norm", args.k_norm, head, "d", args.d);
  arg.dtype("k_norm", args.k_norm, {args.d.dtype});
  arg.require(args.dq_norm.defined() == args.dk_norm.defined(),
              "dq_norm and dk_norm belong together: one of them is missing");
  if (args.dq_norm.defined()) {
    arg.shape("dq_norm", args.dq_norm, head, "d", args.d);
    arg.dtype("dq_norm", args.dq_norm, {args.d.dtype, DType::kF32});
    arg.shape("dk_norm", args.dk_norm, head, "d", args.d);
    arg.dtype("dk_norm", args.dk_norm, {args.dq_norm.dtype});
  }
}

std::size_t workspace(const QkvRopeBackward& args, const Capabilities& target) {
  if (target.target == DeviceKind::kCuda) return cuda::device_scratch(args, target);
  if (!args.q_norm.defined()) return 0;
  // Per piece of rows: the sums of dq_norm and dk_norm, and one head's rotated gradient.
  return static_cast<std::size_t>(cpu::RowPieces::of(args.d.rows()).count * 3 * args.layout.head_dim) *
         size_of(compute_dtype(args.d.dtype));
}

}  // namespace tessera
