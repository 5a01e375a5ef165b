#include "kernels/embedding.h"

#include "kernels/check.h"
#include "kernels/ops.h"

namespace tessera {

void check(const EmbeddingForward& args) {
  ArgumentCheck arg("embedding_forward");
  arg.matrix("weight", args.weight);
  arg.dtype("weight", args.weight, {DType::kBF16, DType::kF32, DType::kF64});
  arg.defined("tokens", args.tokens);
  arg.dtype("tokens", args.tokens, {DType::kI32});
  arg.dense("tokens", args.tokens);
  arg.require(args.tokens.shape.rank == 1, "tokens has more than one dim, expected [T]");
  arg.shape("out", args.out, Shape{args.tokens.numel(), args.weight.cols()}, "tokens", args.tokens);
  arg.dtype("out", args.out, {args.weight.dtype});
  arg.separate("out", args.out, "weight", args.weight);
  arg.separate("out", args.out, "tokens", args.tokens);
  arg.require(args.first_row >= 0, "first_row is negative");
}

std::size_t workspace(const EmbeddingForward&, const Capabilities&) { return 0; }

void check(const EmbeddingBackward& args) {
  ArgumentCheck arg("embedding_backward");
  arg.matrix("dout", args.dout);
  arg.dtype("dout", args.dout, {DType::kBF16, DType::kF32, DType::kF64});
  arg.shape("tokens", args.tokens, Shape{args.dout.rows()}, "dout", args.dout);
  arg.dtype("tokens", args.tokens, {DType::kI32});
  arg.shape("order", args.order, Shape{args.dout.rows()}, "dout", args.dout);
  arg.dtype("order", args.order, {DType::kI32});
  arg.matrix("dweight", args.dweight);
  arg.shape("dweight", args.dweight, Shape{args.dweight.rows(), args.dout.cols()}, "dout", args.dout);
  arg.dtype("dweight", args.dweight, {args.dout.dtype, DType::kF32});
  arg.separate("dweight", args.dweight, "dout", args.dout);
  arg.require(args.first_row >= 0, "first_row is negative");
}

std::size_t workspace(const EmbeddingBackward&, const Capabilities&) { return 0; }

}  // namespace tessera
