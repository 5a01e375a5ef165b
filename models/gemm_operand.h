// GemmOperand: a matrix as products read it. In the compute format it is `plain` alone. Quantised,
// it also has a row copy, which a product along its columns reads, and a column copy for one along
// its rows: FP8 products want the inner dim last (kernels/gemm.h).
#pragma once

#include "kernels/gemm.h"
#include "kernels/quantize.h"

namespace tessera {

class Stream;

struct GemmOperand {
  Tensor plain;   // [rows, cols] in the compute format
  Tensor row;     // [rows, cols] FP8, or undefined
  Tensor column;  // [cols, fp8_depth(rows)] FP8, or undefined
  // kTensor: one scale, from the tensor's largest magnitude.
  Tensor amax;   // [1] fp32: largest magnitude of plain
  Tensor scale;  // [1] fp32: plain is about scale * copy
  // kVector and kBlock: each copy has its own scales (scale_shape); both are cast from plain.
  ScaleMode mode = ScaleMode::kTensor;
  Tensor row_scale;
  Tensor column_scale;

  bool is_quantized() const { return scale.defined() || has_block_scales(); }
  bool has_block_scales() const { return mode != ScaleMode::kTensor; }
  // The first `count` rows alone.
  GemmOperand first_rows(std::int64_t count) const;
};

// Writes the copies that are there, and their scales, from plain (and its amax). Does nothing to a
// plain operand or one without copies.
void quantize(const GemmOperand& operand, Stream& stream);

// Adds what the row copy, if there is one, has lost to `counts` (CastLosses); nothing where counts
// is undefined.
void count_losses(const GemmOperand& operand, const Tensor& counts, Stream& stream);

// Products into rest.c, with the bias and accumulation of `rest`; both operands are plain or both
// quantised. a b^T: needs the row copies.
void multiply_nt(const GemmOperand& a, const GemmOperand& b, Gemm rest, Stream& stream);
// a b: needs a's row and b's column copy.
void multiply_nn(const GemmOperand& a, const GemmOperand& b, Gemm rest, Stream& stream);
// a^T b: needs the column copies.
void multiply_tn(const GemmOperand& a, const GemmOperand& b, Gemm rest, Stream& stream);

}  // namespace tessera
