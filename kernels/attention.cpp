#include "kernels/attention.h"

#include "kernels/check.h"
#include "kernels/cpu/attention_plan.h"
#include "kernels/cuda_workspace.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

void check_shape(const ArgumentCheck& arg, const AttentionShape& shape) {
  CHECK(shape.heads_q > 0 && shape.heads_kv > 0 && shape.heads_q % shape.heads_kv == 0,
        "[{}] {} query heads over {} key heads: expected a multiple", arg.op(), shape.heads_q,
        shape.heads_kv);
  CHECK(shape.head_dim > 0 && shape.window >= 0 && shape.max_length >= 0,
        "[{}] head_dim {}, window {}, max_length {}: expected head_dim > 0 and the others >= 0",
        arg.op(), shape.head_dim, shape.window, shape.max_length);
}

void check_operand(ArgumentCheck& arg, std::string_view name, const Tensor& t, std::int64_t heads,
                   const AttentionShape& shape, DType dtype) {
  arg.matrix(name, t);
  CHECK(t.cols() == heads * shape.head_dim, "[{}] {} is {}, expected {} heads of {} = {} columns",
        arg.op(), name, to_string(t.shape), heads, shape.head_dim, heads * shape.head_dim);
  arg.dtype(name, t, {dtype});
}

void check_bounds(ArgumentCheck& arg, const Tensor& cu_q, const Tensor& cu_k) {
  arg.defined("cu_q", cu_q);
  arg.dtype("cu_q", cu_q, {DType::kI32});
  CHECK(cu_q.shape.rank == 1 && cu_q.numel() >= 2, "[{}] cu_q is {}, expected [max_documents + 1]",
        arg.op(), to_string(cu_q.shape));
  arg.shape("cu_k", cu_k, cu_q.shape, "cu_q", cu_q);
  arg.dtype("cu_k", cu_k, {DType::kI32});
}

}  // namespace

void check(const AttentionForward& args) {
  ArgumentCheck arg("attention_forward");
  check_shape(arg, args.shape);
  arg.defined("q", args.q);
  arg.dtype("q", args.q, {DType::kBF16, DType::kF32, DType::kF64});
  check_operand(arg, "q", args.q, args.shape.heads_q, args.shape, args.q.dtype);
  check_operand(arg, "k", args.k, args.shape.heads_kv, args.shape, args.q.dtype);
  check_operand(arg, "v", args.v, args.shape.heads_kv, args.shape, args.q.dtype);
  arg.shape("v", args.v, args.k.shape, "k", args.k);
  arg.shape("out", args.out, args.q.shape, "q", args.q);
  arg.dtype("out", args.out, {args.q.dtype});
  arg.separate("out", args.out, "q", args.q);
  arg.separate("out", args.out, "k", args.k);
  arg.separate("out", args.out, "v", args.v);
  if (args.lse.defined()) {
    arg.shape("lse", args.lse, Shape{args.q.rows(), args.shape.heads_q}, "q", args.q);
    arg.dtype("lse", args.lse, {compute_dtype(args.q.dtype)});
  }
  check_bounds(arg, args.cu_q, args.cu_k);
}

std::size_t workspace(const AttentionForward& args, const Capabilities& target) {
  if (target.target == DeviceKind::kCuda) return cuda::device_scratch(args, target);
  return cpu::AttentionPlan::forward(args, target.cpu_threads).bytes();
}

void check(const AttentionBackward& args) {
  ArgumentCheck arg("attention_backward");
  check_shape(arg, args.shape);
  arg.defined("q", args.q);
  arg.dtype("q", args.q, {DType::kBF16, DType::kF32, DType::kF64});
  const DType dtype = args.q.dtype;
  check_operand(arg, "q", args.q, args.shape.heads_q, args.shape, dtype);
  check_operand(arg, "k", args.k, args.shape.heads_kv, args.shape, dtype);
  check_operand(arg, "v", args.v, args.shape.heads_kv, args.shape, dtype);
  arg.shape("v", args.v, args.k.shape, "k", args.k);
  arg.shape("dout", args.dout, args.q.shape, "q", args.q);
  arg.dtype("dout", args.dout, {dtype});
  arg.shape("out", args.out, args.q.shape, "q", args.q);
  arg.dtype("out", args.out, {dtype});
  arg.shape("lse", args.lse, Shape{args.q.rows(), args.shape.heads_q}, "q", args.q);
  arg.dtype("lse", args.lse, {compute_dtype(dtype)});
  arg.shape("dq", args.dq, args.q.shape, "q", args.q);
  arg.dtype("dq", args.dq, {dtype});
  arg.shape("dk", args.dk, args.k.shape, "k", args.k);
  arg.dtype("dk", args.dk, {dtype});
  arg.shape("dv", args.dv, args.v.shape, "v", args.v);
  arg.dtype("dv", args.dv, {dtype});
  const std::pair<const char*, const Tensor*> outputs[] = {
      {"dq", &args.dq}, {"dk", &args.dk}, {"dv", &args.dv}};
  const std::pair<const char*, const Tensor*> inputs[] = {
      {"q", &args.q}, {"k", &args.k}, {"v", &args.v}, {"dout", &args.dout}, {"out", &args.out}};
  for (const auto& [output_name, output] : outputs) {
    for (const auto& [input_name, input] : inputs) {
      arg.separate(output_name, *output, input_name, *input);
    }
  }
  arg.separate("dk", args.dk, "dq", args.dq);
  arg.separate("dv", args.dv, "dq", args.dq);
  arg.separate("dv", args.dv, "dk", args.dk);
  check_bounds(arg, args.cu_q, args.cu_k);
}

std::size_t workspace(const AttentionBackward& args, const Capabilities& target) {
  if (target.target == DeviceKind::kCuda) return cuda::device_scratch(args, target);
  return cpu::AttentionPlan::backward(args, target.cpu_threads).bytes();
}

}  // namespace tessera
