#include "models/gemm_operand.h"

#include "engine/core/error.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

const Tensor& scale_of(const GemmOperand& operand, bool rows) {
  if (!operand.has_block_scales()) return operand.scale;
  return rows ? operand.row_scale : operand.column_scale;
}

// Each quantised product is a row matrix by a row matrix transposed.
void multiply(const GemmOperand& a, bool rows_of_a, const GemmOperand& b, bool rows_of_b,
              Gemm& args, Stream& stream) {
  CHECK(a.is_quantized() == b.is_quantized(),
        "[linear] one operand of a product is quantised, the other is not");
  if (a.is_quantized()) {
    args.a = rows_of_a ? a.row : a.column;
    args.b = rows_of_b ? b.row : b.column;
    args.transpose_a = false;
    args.transpose_b = true;
    args.scale_mode_a = a.mode;
    args.scale_mode_b = b.mode;
    args.scale_a = scale_of(a, rows_of_a);
    args.scale_b = scale_of(b, rows_of_b);
    if (a.has_block_scales()) args.fast_accumulation = false;
  } else {
    args.a = a.plain;
    args.b = b.plain;
    args.fast_accumulation = false;
  }
  gemm(args, stream);
}

}  // namespace

GemmOperand GemmOperand::first_rows(std::int64_t count) const {
  GemmOperand part = *this;
  if (plain.defined()) part.plain = plain.row_slice(0, count);
  if (row.defined()) part.row = row.row_slice(0, count);
  if (column.defined()) part.column = column.col_slice(0, fp8_depth(count));
  // A vector's scales of fewer rows are no part of those of more: rows are adjacent.
  CHECK(!row_scale.defined() && mode != ScaleMode::kBlock,
        "[linear] the first rows alone of a copy whose scales are fixed");
  if (column_scale.defined())
    part.column_scale = column_scale.row_slice(0, scale_blocks(fp8_depth(count)));
  return part;
}

void quantize(const GemmOperand& operand, Stream& stream) {
  if (!operand.is_quantized() || (!operand.row.defined() && !operand.column.defined())) return;
  if (operand.has_block_scales()) {
    quantize_blocks(QuantizeBlocks{operand.plain, operand.row, operand.row_scale, operand.column,
                                   operand.column_scale, operand.mode},
                    stream);
    return;
  }
  quantize(Quantize{operand.plain, operand.amax, operand.row, operand.column, operand.scale},
           stream);
}

void count_losses(const GemmOperand& operand, const Tensor& counts, Stream& stream) {
  if (!counts.defined() || !operand.row.defined()) return;
  cast_losses(CastLosses{operand.plain, operand.row, counts}, stream);
}

void multiply_nt(const GemmOperand& a, const GemmOperand& b, Gemm rest, Stream& stream) {
  rest.transpose_b = true;
  multiply(a, true, b, true, rest, stream);
}

void multiply_nn(const GemmOperand& a, const GemmOperand& b, Gemm rest, Stream& stream) {
  multiply(a, true, b, false, rest, stream);
}

void multiply_tn(const GemmOperand& a, const GemmOperand& b, Gemm rest, Stream& stream) {
  rest.transpose_a = true;
  multiply(a, false, b, false, rest, stream);
}

}  // namespace tessera
