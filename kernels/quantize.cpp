#include "kernels/quantize.h"

#include "kernels/check.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

// `column` is [cols of in, at least rows of in].
void check_transposed(ArgumentCheck& arg, std::string_view name, const Tensor& column,
                      const Tensor& in) {
  arg.matrix(name, column);
  CHECK(column.rows() == in.cols() && column.cols() >= in.rows(),
        "[{}] {} is {}, expected {} rows of at least {} to match in {}", arg.op(), name,
        to_string(column.shape), in.cols(), in.rows(), to_string(in.shape));
  arg.separate(name, column, "in", in);
}

}  // namespace

void check(const Amax& args) {
  ArgumentCheck arg("amax");
  arg.defined("in", args.in);
  arg.dtype("in", args.in, {DType::kBF16, DType::kF32});
  arg.scalar("amax", args.amax);
  arg.separate("amax", args.amax, "in", args.in);
}

std::size_t workspace(const Amax&, const Capabilities&) { return 0; }

void check(const Quantize& args) {
  ArgumentCheck arg("quantize");
  arg.matrix("in", args.in);
  arg.dtype("in", args.in, {DType::kBF16, DType::kF32});
  arg.scalar("amax", args.amax);
  arg.scalar("scale", args.scale);
  arg.separate("scale", args.scale, "amax", args.amax);
  arg.require(args.row.defined() || args.column.defined(), "neither row nor column is given");
  if (args.row.defined()) {
    arg.shape("row", args.row, args.in.shape, "in", args.in);
    arg.dtype("row", args.row, {DType::kF8E4M3, DType::kF8E5M2});
    arg.separate("row", args.row, "in", args.in);
  }
  if (args.column.defined()) {
    check_transposed(arg, "column", args.column, args.in);
    arg.dtype("column", args.column, {DType::kF8E4M3, DType::kF8E5M2});
    if (args.row.defined()) {
      arg.dtype("column", args.column, {args.row.dtype});
      arg.separate("column", args.column, "row", args.row);
    }
  }
}

std::size_t workspace(const Quantize&, const Capabilities&) { return 0; }

void check(const QuantizeBlocks& args) {
  ArgumentCheck arg("quantize_blocks");
  arg.matrix("in", args.in);
  arg.dtype("in", args.in, {DType::kBF16, DType::kF32});
  arg.require(args.mode != ScaleMode::kTensor, "mode is kTensor, expected kVector or kBlock");
  arg.require(args.row.defined() || args.column.defined(), "neither row nor column is given");
  const auto check_scale = [&](const char* name, const Tensor& scale, const Tensor& copy) {
    arg.shape(name, scale, scale_shape(args.mode, copy.rows(), copy.cols()), "copy", copy);
    arg.dtype(name, scale, {DType::kF32});
    arg.dense(name, scale);
    arg.separate(name, scale, "in", args.in);
    arg.separate(name, scale, "copy", copy);
  };
  if (args.row.defined()) {
    arg.shape("row", args.row, args.in.shape, "in", args.in);
    arg.dtype("row", args.row, {DType::kF8E4M3, DType::kF8E5M2});
    arg.separate("row", args.row, "in", args.in);
    check_scale("row_scale", args.row_scale, args.row);
  }
  if (args.column.defined()) {
    check_transposed(arg, "column", args.column, args.in);
    arg.dtype("column", args.column, {DType::kF8E4M3, DType::kF8E5M2});
    check_scale("column_scale", args.column_scale, args.column);
    if (args.row.defined()) {
      arg.dtype("column", args.column, {args.row.dtype});
      arg.separate("column", args.column, "row", args.row);
      arg.separate("column_scale", args.column_scale, "row_scale", args.row_scale);
    }
  }
}

std::size_t workspace(const QuantizeBlocks&, const Capabilities&) { return 0; }

void check(const CastLosses& args) {
  ArgumentCheck arg("cast_losses");
  arg.matrix("in", args.in);
  arg.dtype("in", args.in, {DType::kBF16, DType::kF32});
  arg.shape("row", args.row, args.in.shape, "in", args.in);
  arg.dtype("row", args.row, {DType::kF8E4M3, DType::kF8E5M2});
  arg.separate("row", args.row, "in", args.in);
  arg.require(args.counts.defined() && args.counts.shape == Shape{2}, "counts is not [2]");
  arg.dtype("counts", args.counts, {DType::kI64});
}

std::size_t workspace(const CastLosses&, const Capabilities&) { return 0; }

void check(const Transpose& args) {
  ArgumentCheck arg("transpose");
  arg.matrix("in", args.in);
  arg.dtype("in", args.in, {DType::kF8E4M3, DType::kF8E5M2, DType::kU8});
  check_transposed(arg, "out", args.out, args.in);
  arg.dtype("out", args.out, {args.in.dtype});
}

std::size_t workspace(const Transpose&, const Capabilities&) { return 0; }

}  // namespace tessera
