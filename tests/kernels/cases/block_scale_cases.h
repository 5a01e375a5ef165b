// FP8 casts with scales for 128 elements, and products of such operands.
#pragma once

#include "kernels/quantize.h"
#include "tests/kernels/cases/quantize_cases.h"

namespace tessera::test {

// The least power of two that `largest` divided by is at most the format's largest number, found by
// search.
inline double reference_block_scale(double largest, DType format) {
  if (!std::isfinite(largest)) return NAN;
  double scale = 0x1p-140;
  while (std::max(largest, 0x1p-100) / scale > static_cast<double>(largest_of(format))) scale *= 2;
  return scale;
}

struct BlockQuantizeCase {
  DType in, format;
  ScaleMode mode;
  std::int64_t rows, cols;
  bool row = true, column = true;
  std::int64_t extra_depth = 0;  // beyond the next multiple of 16
  std::int64_t gap = 0;
  double scale = 1;    // of the values, which spread over 12 powers of two by row and column
  double outlier = 0;  // replaces one value
};

// A copy [rows, inner] and its scales as the contract has them, from values [rows, inner].
struct BlockReference {
  Values copy, scale;
  BlockReference(const Values& values, std::int64_t rows, std::int64_t inner, std::int64_t padding,
                 DType format, ScaleMode mode) {
    const std::int64_t depth = inner + padding;
    const Shape shape = scale_shape(mode, rows, depth);
    scale.assign(static_cast<std::size_t>(shape.numel()), 0.0);
    copy.assign(static_cast<std::size_t>(rows * depth), 0.0);
    const std::int64_t height = mode == ScaleMode::kBlock ? 128 : 1;
    for (std::int64_t r0 = 0; r0 < rows; r0 += height) {
      for (std::int64_t c0 = 0; c0 < depth; c0 += 128) {
        const std::int64_t r1 = std::min(rows, r0 + height);
        const std::int64_t c1 = std::min(inner, c0 + 128);
        double largest = 0;
        for (std::int64_t r = r0; r < r1; ++r) {
          for (std::int64_t c = c0; c < c1; ++c) {
            const double value = std::abs(values[static_cast<std::size_t>(r * inner + c)]);
            largest = std::isfinite(value) ? std::max(largest, value) : INFINITY;
            if (!std::isfinite(largest)) break;
          }
          if (!std::isfinite(largest)) break;
        }
        const double power = reference_block_scale(largest, format);
        const std::int64_t at =
            mode == ScaleMode::kBlock ? r0 / 128 * shape[1] + c0 / 128 : c0 / 128 * rows + r0;
        scale[static_cast<std::size_t>(at)] = power;
        for (std::int64_t r = r0; r < r1; ++r) {
          for (std::int64_t c = c0; c < c1; ++c) {
            copy[static_cast<std::size_t>(r * depth + c)] =
                values[static_cast<std::size_t>(r * inner + c)] / power;
          }
        }
      }
    }
    copy = rounded(copy, format);
  }
};

// NaN is compared as such: every NaN becomes the same number on both sides.
inline OpOutput same_or_nan(std::string name, Values got, Values want) {
  for (Values* values : {&got, &want}) {
    for (double& value : *values) value = std::isnan(value) ? 1e300 : value;
  }
  return exact_output(std::move(name), std::move(got), std::move(want));
}

inline std::vector<OpOutput> run_quantize_blocks(OpFixture& f, const BlockQuantizeCase& c) {
  Values in = normal_values(c.rows * c.cols, 1, c.scale);
  for (std::int64_t i = 0; i < c.rows; ++i) {
    for (std::int64_t j = 0; j < c.cols; ++j)
      in[static_cast<std::size_t>(i * c.cols + j)] *=
          std::ldexp(1.0, static_cast<int>((3 * i + 5 * j) % 13) - 6);
  }
  if (c.outlier != 0) in[in.size() / 3] = c.outlier;
  in = rounded(in, c.in);
  const std::int64_t depth = fp8_depth(c.rows) + c.extra_depth;
  QuantizeBlocks args;
  args.mode = c.mode;
  args.in = f.input(in, c.in, Shape{c.rows, c.cols}, c.gap);
  if (c.row) {
    args.row = f.output(c.format, Shape{c.rows, c.cols}, c.gap);
    args.row_scale = f.output(DType::kF32, scale_shape(c.mode, c.rows, c.cols));
  }
  if (c.column) {
    args.column = f.output(c.format, Shape{c.cols, depth}, c.gap);
    args.column_scale = f.output(DType::kF32, scale_shape(c.mode, c.cols, depth));
  }
  f.run(quantize_blocks, args);

  std::vector<OpOutput> outputs;
  if (c.row) {
    const BlockReference want(in, c.rows, c.cols, 0, c.format, c.mode);
    outputs.push_back(same_or_nan("row", f.values(args.row), want.copy));
    outputs.push_back(same_or_nan("row_scale", f.values(args.row_scale), want.scale));
  }
  if (c.column) {
    Values transposed(in.size());
    for (std::int64_t i = 0; i < c.rows; ++i) {
      for (std::int64_t j = 0; j < c.cols; ++j) {
        transposed[static_cast<std::size_t>(j * c.rows + i)] =
            in[static_cast<std::size_t>(i * c.cols + j)];
      }
    }
    const BlockReference want(transposed, c.cols, c.rows, depth - c.rows, c.format, c.mode);
    outputs.push_back(same_or_nan("column", f.values(args.column), want.copy));
    outputs.push_back(same_or_nan("column_scale", f.values(args.column_scale), want.scale));
  }
  return outputs;
}

struct BlockGemmCase {
  DType a, b, c;
  ScaleMode mode_a, mode_b;
  std::int64_t m, n, k;
  bool accumulate = false, bias = false;
  std::int64_t gap = 0;
  double alpha = 1;
};

// Powers of two between 2^-9 and 2^-2 where the shape has scales; 1e30 in the padding behind the
// blocks of a row, which nothing may read.
inline Values block_scales(ScaleMode mode, std::int64_t rows, std::int64_t inner,
                           std::uint64_t seed) {
  const Shape shape = scale_shape(mode, rows, inner);
  Values scales = normal_values(shape.numel(), seed);
  for (std::size_t i = 0; i < scales.size(); ++i) {
    const bool is_padding =
        mode == ScaleMode::kBlock && static_cast<std::int64_t>(i) % shape[1] >= scale_blocks(inner);
    scales[i] =
        is_padding ? 1e30 : std::ldexp(1.0, static_cast<int>(std::abs(scales[i]) * 3) % 8 - 9);
  }
  return scales;
}

inline std::vector<OpOutput> run_block_gemm(OpFixture& f, const BlockGemmCase& c) {
  const Values a = rounded(normal_values(c.m * c.k, 1, 20), c.a);
  const Values b = rounded(normal_values(c.n * c.k, 2, 20), c.b);
  const Values bias = rounded(normal_values(c.n, 3), c.c);
  const Values old = rounded(normal_values(c.m * c.n, 4), c.c);
  const Values scale_a = block_scales(c.mode_a, c.m, c.k, 5);
  const Values scale_b = block_scales(c.mode_b, c.n, c.k, 6);
  Gemm args;
  args.a = f.input(a, c.a, Shape{c.m, c.k}, c.gap);
  args.b = f.input(b, c.b, Shape{c.n, c.k}, c.gap);
  args.c = c.accumulate ? f.input(old, c.c, Shape{c.m, c.n}, c.gap)
                        : f.output(c.c, Shape{c.m, c.n}, c.gap);
  args.transpose_b = true;
  args.scale_mode_a = c.mode_a;
  args.scale_mode_b = c.mode_b;
  args.scale_a = f.input(scale_a, DType::kF32, scale_shape(c.mode_a, c.m, c.k));
  args.scale_b = f.input(scale_b, DType::kF32, scale_shape(c.mode_b, c.n, c.k));
  args.alpha = static_cast<float>(c.alpha);
  args.accumulate = c.accumulate;
  if (c.bias) args.bias = f.input(bias, c.c, Shape{c.n});
  f.run(gemm, args);

  const auto scale_of = [&](const Values& scales, ScaleMode mode, std::int64_t rows,
                            std::int64_t row, std::int64_t block) {
    const std::int64_t stride = scale_shape(ScaleMode::kBlock, rows, c.k)[1];
    return scales[static_cast<std::size_t>(
        mode == ScaleMode::kVector ? block * rows + row : row / 128 * stride + block)];
  };
  OpOutput out{"c", f.values(args.c), {}, {}};
  const Bound bound = Bound::of(c.c, DType::kF32);
  // Every 128 products are added up in fp32: what tensor cores cut, they cut four times of each.
  const double cut = f.is_cpu() ? 0.0 : 0x1p-13 * 8;
  for (std::int64_t i = 0; i < c.m; ++i) {
    for (std::int64_t j = 0; j < c.n; ++j) {
      double sum = 0, magnitude = 0;
      for (std::int64_t p = 0; p < c.k; ++p) {
        const double product = c.alpha * a[static_cast<std::size_t>(i * c.k + p)] *
                               b[static_cast<std::size_t>(j * c.k + p)] *
                               scale_of(scale_a, c.mode_a, c.m, i, p / 128) *
                               scale_of(scale_b, c.mode_b, c.n, j, p / 128);
        sum += product;
        magnitude += std::abs(product);
      }
      const double products = magnitude;
      if (c.accumulate) {
        sum += old[static_cast<std::size_t>(i * c.n + j)];
        magnitude += std::abs(old[static_cast<std::size_t>(i * c.n + j)]);
      }
      if (c.bias) {
        sum += bias[static_cast<std::size_t>(j)];
        magnitude += std::abs(bias[static_cast<std::size_t>(j)]);
      }
      out.want.push_back(sum);
      out.bound.push_back(bound.sum(sum, c.k, magnitude) + cut * products * (1 + bound.stored));
    }
  }
  return {out};
}

inline void add_block_scale_cases(std::vector<OpCase>& cases) {
  const DType e4m3 = DType::kF8E4M3, e5m2 = DType::kF8E5M2, bf16 = DType::kBF16, fp32 = DType::kF32;
  const ScaleMode vector = ScaleMode::kVector, block = ScaleMode::kBlock;
  std::vector<BlockQuantizeCase> list;
  for (const DType in : {bf16, fp32}) {
    for (const DType format : {e4m3, e5m2}) {
      for (const ScaleMode mode : {vector, block}) {
        list.push_back({in, format, mode, 128, 128});
        list.push_back({in, format, mode, 1, 1});
        list.push_back({in, format, mode, 13, 37});
        list.push_back({in, format, mode, 300, 272, true, false});
        list.push_back({in, format, mode, 300, 272, false, true});
        list.push_back({in, format, mode, 141, 208, true, true, 160, 16});
        list.push_back({in, format, mode, 257, 644, true, true, 0, 5});
        // All zero, denormal, huge, not finite: B44.
        list.push_back({in, format, mode, 160, 144, true, true, 0, 0, 0});
        list.push_back({in, format, mode, 160, 144, true, true, 0, 0, 1e-40});
        list.push_back({in, format, mode, 160, 144, true, true, 0, 0, 1, 3e38});
        list.push_back({in, format, mode, 160, 144, true, true, 0, 0, 1, -INFINITY});
        list.push_back({in, format, mode, 160, 144, true, true, 0, 0, 1, NAN});
      }
    }
  }
  const auto tag = [=](ScaleMode mode) { return std::string(mode == vector ? "vector" : "block"); };
  int number = 0;
  for (const BlockQuantizeCase& c : list) {
    cases.push_back({"quantize_blocks_" + dtype_tag(c.in) + "_to_" + dtype_tag(c.format) + "_" +
                         tag(c.mode) + "_" + std::to_string(c.rows) + "x" + std::to_string(c.cols) +
                         "_" + std::to_string(number++),
                     c.in, [=](OpFixture& f) { return run_quantize_blocks(f, c); }});
  }
  // Forward, gradient of the input and of the weight; sizes that are no multiples of 128; rows that
  // the library does not take.
  const std::vector<BlockGemmCase> products{
      {e4m3, e4m3, bf16, vector, block, 128, 256, 384},
      {e4m3, e4m3, bf16, vector, block, 64, 144, 208, false, true},
      {e4m3, e4m3, bf16, vector, block, 136, 272, 1040, true, true, 16},
      {e4m3, e4m3, fp32, vector, block, 96, 160, 128, false, true},
      {e4m3, e4m3, bf16, vector, block, 13, 144, 272},
      {e4m3, e4m3, fp32, vector, block, 301, 48, 16, true, true},
      {e4m3, e4m3, bf16, vector, block, 1, 16, 16},
      {e5m2, e4m3, bf16, vector, block, 128, 144, 640},
      {e5m2, e4m3, fp32, vector, block, 72, 400, 144, false, false, 16, -0.5},
      {e4m3, e4m3, fp32, block, vector, 136, 144, 400},
      {e4m3, e4m3, bf16, vector, vector, 128, 144, 1024, true},
      {e4m3, e4m3, fp32, vector, vector, 144, 304, 272, true, false, 16},
      {e5m2, e4m3, bf16, vector, vector, 256, 128, 144},
      {e5m2, e4m3, fp32, vector, vector, 144, 128, 496, true},
      {e4m3, e5m2, fp32, vector, vector, 32, 80, 512, false, true},
  };
  number = 0;
  for (const BlockGemmCase& c : products) {
    cases.push_back({"gemm_" + tag(c.mode_a) + "_" + tag(c.mode_b) + "_" + dtype_tag(c.a) + "_" +
                         dtype_tag(c.b) + "_to_" + dtype_tag(c.c) + "_" + std::to_string(c.m) +
                         "x" + std::to_string(c.n) + "x" + std::to_string(c.k) +
                         (c.accumulate ? "_acc" : "") + (c.bias ? "_bias" : "") +
                         (c.gap != 0 ? "_strided" : "") + "_" + std::to_string(number++),
                     c.a, [=](OpFixture& f) { return run_block_gemm(f, c); }});
  }
}

}  // namespace tessera::test
