#include "models/gemm_operand.h"

#include "engine/core/error.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

// Each quantised product is a row matrix by a row matrix transposed.
void multiply(const GemmOperand& a, const Tensor& copy_of_a, const GemmOperand& b,
              const Tensor& copy_of_b, Gemm& args, Stream& stream) {
  CHECK(a.is_quantized() == b.is_quantized(),
        "[linear] one operand of a product is quantised, the other is not");
  if (a.is_quantized()) {
    args.a = copy_of_a;
    args.b = copy_of_b;
    args.transpose_a = false;
    args.transpose_b = true;
    args.scale_a = a.scale;
    args.scale_b = b.scale;
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
  return part;
}

void quantize(const GemmOperand& operand, Stream& stream) {
  if (!operand.is_quantized() || (!operand.row.defined() && !operand.column.defined())) return;
  quantize(Quantize{operand.plain, operand.amax, operand.row, operand.column, operand.scale},
           stream);
}

void multiply_nt(const GemmOperand& a, const GemmOperand& b, Gemm rest, Stream& stream) {
  rest.transpose_b = true;
  multiply(a, a.row, b, b.row, rest, stream);
}

void multiply_nn(const GemmOperand& a, const GemmOperand& b, Gemm rest, Stream& stream) {
  multiply(a, a.row, b, b.column, rest, stream);
}

void multiply_tn(const GemmOperand& a, const GemmOperand& b, Gemm rest, Stream& stream) {
  rest.transpose_a = true;
  multiply(a, a.column, b, b.column, rest, stream);
}

}  // namespace tessera
