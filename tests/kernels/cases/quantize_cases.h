// Largest magnitudes, FP8 casts, transposes, and products of FP8 operands.
#pragma once

#include "kernels/quantize.h"
#include "tests/kernels/op_cases.h"

namespace tessera::test {

// NaN is no number to compare: whether each value is one.
inline Values is_nan(const Values& values) {
  Values flags;
  for (const double value : values) flags.push_back(std::isnan(value) ? 1 : 0);
  return flags;
}
inline OpOutput exact_output(std::string name, Values got, Values want) {
  Values bound(want.size(), 0.0);
  return {std::move(name), std::move(got), std::move(want), std::move(bound)};
}

inline std::vector<OpOutput> run_amax(OpFixture& f, DType dtype, std::int64_t rows,
                                      std::int64_t cols, std::int64_t gap) {
  Values in = rounded(normal_values(rows * cols, 1), dtype);
  double largest = 0;
  for (const double value : in) largest = std::max(largest, std::abs(value));
  Amax args{f.input(in, dtype, Shape{rows, cols}, gap), f.input({0}, DType::kF32, Shape{1})};
  f.run(amax, args);
  std::vector<OpOutput> outputs{exact_output("amax", f.values(args.amax), {largest})};
  // A larger record stays, a smaller one gives way.
  f.write(args.amax, {1000});
  f.run(amax, args);
  outputs.push_back(exact_output("larger record", f.values(args.amax), {1000}));
  f.write(args.amax, {largest / 2});
  f.run(amax, args);
  outputs.push_back(exact_output("smaller record", f.values(args.amax), {largest}));
  // What is not finite wins over every number, NaN over everything.
  in[in.size() / 2] = -INFINITY;
  f.write(args.in, in);
  f.run(amax, args);
  outputs.push_back(
      exact_output("infinite", {std::isinf(f.values(args.amax)[0]) ? 1.0 : 0.0}, {1}));
  in[in.size() - 1] = -NAN;
  f.write(args.in, in);
  f.run(amax, args);
  outputs.push_back(exact_output("nan", is_nan(f.values(args.amax)), {1}));
  f.write(args.in, Values(in.size(), 0.0));
  f.run(amax, args);
  outputs.push_back(exact_output("nan stays", is_nan(f.values(args.amax)), {1}));
  return outputs;
}

// Random values of which some are zero, copied with others made zero: counts against a plain count.
inline std::vector<OpOutput> run_cast_losses(OpFixture& f, DType dtype, DType format,
                                             std::int64_t rows, std::int64_t cols,
                                             std::int64_t gap) {
  Values in = rounded(normal_values(rows * cols, 1), dtype);
  Values copy = rounded(normal_values(rows * cols, 2), format);
  double nonzero = 0;
  double lost = 0;
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (i % 5 == 1) in[i] = 0;
    if (i % 3 == 0) copy[i] = i % 2 == 0 ? 0.0 : -0.0;
    if (i % 7 == 2) in[i] = NAN;  // is something, whatever it becomes
    nonzero += in[i] != 0 ? 1 : 0;
    lost += in[i] != 0 && copy[i] == 0 ? 1 : 0;
  }
  CastLosses args;
  args.in = f.input(in, dtype, Shape{rows, cols}, gap);
  args.row = f.input(copy, format, Shape{rows, cols}, gap);
  args.counts = f.input({7, 1}, DType::kI64, Shape{2});
  f.run(cast_losses, args);
  return {exact_output("counts", f.values(args.counts), {7 + nonzero, 1 + lost})};
}

struct QuantizeCase {
  DType in, format;
  std::int64_t rows, cols;
  bool row = true, column = true;
  std::int64_t extra_depth = 0;  // beyond the next multiple of 16
  std::int64_t gap = 0;
  double scale = 1;    // of the values
  double outlier = 0;  // replaces one value
  double amax = -1;    // >= 0: this instead of the tensor's own
};

inline std::vector<OpOutput> run_quantize(OpFixture& f, const QuantizeCase& c) {
  Values in = normal_values(c.rows * c.cols, 1, c.scale);
  if (c.outlier != 0) in[in.size() / 3] = c.outlier;
  in = rounded(in, c.in);
  Quantize args;
  args.in = f.input(in, c.in, Shape{c.rows, c.cols}, c.gap);
  args.amax = f.input({0}, DType::kF32, Shape{1});
  if (c.amax >= 0) {
    f.write(args.amax, {c.amax});
  } else {
    f.run(amax, Amax{args.in, args.amax});
  }
  const std::int64_t depth = fp8_depth(c.rows) + c.extra_depth;
  if (c.row) args.row = f.output(c.format, Shape{c.rows, c.cols}, c.gap);
  if (c.column) args.column = f.output(c.format, Shape{c.cols, depth}, c.gap);
  args.scale = f.output(DType::kF32, Shape{1});
  f.run(quantize, args);

  const double measured = f.values(args.amax)[0];
  const double largest = static_cast<double>(largest_of(c.format));
  const double bounded = std::max(measured, 0x1p-100);
  const auto factor =
      static_cast<float>(largest / static_cast<double>(static_cast<float>(bounded)));
  const auto scale = static_cast<float>(static_cast<double>(static_cast<float>(bounded)) / largest);
  Values want, transposed(static_cast<std::size_t>(c.cols * depth), 0.0);
  for (std::size_t i = 0; i < in.size(); ++i) {
    want.push_back(static_cast<double>(static_cast<float>(in[i]) * factor));
  }
  want = rounded(want, c.format);
  for (std::int64_t i = 0; i < c.rows; ++i) {
    for (std::int64_t j = 0; j < c.cols; ++j) {
      transposed[static_cast<std::size_t>(j * depth + i)] =
          want[static_cast<std::size_t>(i * c.cols + j)];
    }
  }
  std::vector<OpOutput> outputs;
  const bool is_finite = std::isfinite(measured);
  if (!is_finite) {
    std::fill(want.begin(), want.end(), 1.0);
    for (std::int64_t j = 0; j < c.cols; ++j) {
      std::fill_n(transposed.begin() + j * depth, c.rows, 1.0);
    }
  }
  const auto add = [&](const char* name, const Tensor& t, const Values& expected) {
    if (!t.defined()) return;
    const Values got = f.values(t);
    outputs.push_back(exact_output(name, is_finite ? got : is_nan(got), expected));
  };
  add("row", args.row, want);
  add("column", args.column, transposed);
  add("scale", args.scale, {is_finite ? static_cast<double>(scale) : 1.0});
  return outputs;
}

inline std::vector<OpOutput> run_transpose(OpFixture& f, DType dtype, std::int64_t rows,
                                           std::int64_t cols, std::int64_t depth,
                                           std::int64_t gap) {
  const Values in = rounded(normal_values(rows * cols, 1), dtype);
  Transpose args{f.input(in, dtype, Shape{rows, cols}, gap),
                 f.output(dtype, Shape{cols, depth}, gap)};
  f.run(transpose, args);
  Values want(static_cast<std::size_t>(cols * depth), 0.0);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      want[static_cast<std::size_t>(j * depth + i)] = in[static_cast<std::size_t>(i * cols + j)];
    }
  }
  return {exact_output("out", f.values(args.out), want)};
}

struct Fp8GemmCase {
  DType a, b, c;
  std::int64_t m, n, k;
  bool accumulate = false, bias = false, fast = false;
  std::int64_t gap = 0;
  double alpha = 1;
  double scale_a = 0.0625, scale_b = 3.0;
};

// What Hopper's tensor cores keep of a sum of FP8 products is about 14 bits (DeepSeek-V3,
// section 3.3.2): each instruction cuts its 32 terms and the sum so far at 2^-13 of the largest.
// Otherwise sums are fp32.
inline std::vector<OpOutput> run_fp8_gemm(OpFixture& f, const Fp8GemmCase& c) {
  const Values a = rounded(normal_values(c.m * c.k, 1, 20), c.a);
  const Values b = rounded(normal_values(c.n * c.k, 2, 20), c.b);
  const Values bias = rounded(normal_values(c.n, 3), c.c);
  const Values old = rounded(normal_values(c.m * c.n, 4), c.c);
  Gemm args;
  args.a = f.input(a, c.a, Shape{c.m, c.k}, c.gap);
  args.b = f.input(b, c.b, Shape{c.n, c.k}, c.gap);
  args.c = c.accumulate ? f.input(old, c.c, Shape{c.m, c.n}, c.gap)
                        : f.output(c.c, Shape{c.m, c.n}, c.gap);
  args.transpose_b = true;
  args.scale_a = f.input({c.scale_a}, DType::kF32, Shape{1});
  args.scale_b = f.input({c.scale_b}, DType::kF32, Shape{1});
  args.alpha = static_cast<float>(c.alpha);
  args.accumulate = c.accumulate;
  args.fast_accumulation = c.fast;
  if (c.bias) args.bias = f.input(bias, c.c, Shape{c.n});
  f.run(gemm, args);

  OpOutput out{"c", f.values(args.c), {}, {}};
  const Bound bound = Bound::of(c.c, DType::kF32);
  const double cut =
      f.is_cpu() ? 0.0 : 0x1p-13 * (8 + (c.fast ? static_cast<double>(c.k) / 32 : 0));
  const double factor = c.alpha * c.scale_a * c.scale_b;
  for (std::int64_t i = 0; i < c.m; ++i) {
    for (std::int64_t j = 0; j < c.n; ++j) {
      double sum = 0, magnitude = 0;
      for (std::int64_t p = 0; p < c.k; ++p) {
        const double product =
            a[static_cast<std::size_t>(i * c.k + p)] * b[static_cast<std::size_t>(j * c.k + p)];
        sum += product;
        magnitude += std::abs(product);
      }
      sum *= factor;
      magnitude *= std::abs(factor);
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

inline void add_quantize_cases(std::vector<OpCase>& cases) {
  const DType e4m3 = DType::kF8E4M3, e5m2 = DType::kF8E5M2, bf16 = DType::kBF16, fp32 = DType::kF32;
  for (const DType dtype : {fp32, bf16}) {
    for (const auto& [rows, cols, gap] : std::vector<std::array<std::int64_t, 3>>{
             {1, 1, 0}, {7, 13, 0}, {13, 40, 8}, {129, 257, 3}, {64, 1024, 0}}) {
      cases.push_back({"amax_" + dtype_tag(dtype) + "_" + std::to_string(rows) + "x" +
                           std::to_string(cols) + (gap != 0 ? "_strided" : ""),
                       dtype, [=](OpFixture& f) { return run_amax(f, dtype, rows, cols, gap); }});
    }
  }
  for (const DType dtype : {fp32, bf16}) {
    for (const auto& [rows, cols, gap] : std::vector<std::array<std::int64_t, 3>>{
             {1, 1, 0}, {13, 40, 8}, {129, 257, 3}, {64, 1024, 0}}) {
      const DType format = rows % 2 == 1 ? e4m3 : e5m2;
      cases.push_back({"cast_losses_" + dtype_tag(dtype) + "_" + std::to_string(rows) + "x" +
                           std::to_string(cols),
                       dtype, [=](OpFixture& f) {
                         return run_cast_losses(f, dtype, format, rows, cols, gap);
                       }});
    }
  }
  std::vector<QuantizeCase> list;
  for (const DType in : {bf16, fp32}) {
    for (const DType format : {e4m3, e5m2}) {
      list.push_back({in, format, 128, 128});
      list.push_back({in, format, 1, 1});
      list.push_back({in, format, 13, 37});
      list.push_back({in, format, 300, 272, true, false});
      list.push_back({in, format, 300, 272, false, true});
      list.push_back({in, format, 141, 208, true, true, 160, 16});
      list.push_back({in, format, 129, 131, true, true, 0, 5});
      // Trouble (B44): all zero, denormal, huge, saturated by a smaller amax, not finite.
      list.push_back({in, format, 32, 48, true, true, 0, 0, 0});
      list.push_back({in, format, 32, 48, true, true, 0, 0, 1e-40});
      list.push_back({in, format, 32, 48, true, true, 0, 0, 0, 1e-40});
      list.push_back({in, format, 32, 48, true, true, 0, 0, 1, 1e30});
      list.push_back({in, format, 32, 48, true, true, 0, 0, 1, 0, 0.25});
      list.push_back({in, format, 32, 48, true, true, 0, 0, 1, INFINITY});
      list.push_back({in, format, 32, 48, true, true, 0, 0, 1, NAN});
    }
  }
  int number = 0;
  for (const QuantizeCase& c : list) {
    cases.push_back({"quantize_" + dtype_tag(c.in) + "_to_" + dtype_tag(c.format) + "_" +
                         std::to_string(c.rows) + "x" + std::to_string(c.cols) + "_" +
                         std::to_string(number++),
                     c.in, [=](OpFixture& f) { return run_quantize(f, c); }});
  }
  for (const DType dtype : {e4m3, e5m2}) {
    for (const auto& [rows, cols, depth, gap] : std::vector<std::array<std::int64_t, 4>>{
             {1, 1, 1, 0}, {128, 256, 128, 0}, {130, 144, 144, 16}, {77, 35, 90, 3}}) {
      cases.push_back(
          {"transpose_" + dtype_tag(dtype) + "_" + std::to_string(rows) + "x" +
               std::to_string(cols),
           dtype, [=](OpFixture& f) { return run_transpose(f, dtype, rows, cols, depth, gap); }});
    }
  }
  const std::vector<Fp8GemmCase> products{
      {e4m3, e4m3, bf16, 64, 48, 32},
      {e4m3, e4m3, bf16, 13, 64, 176, false, false, true},
      {e4m3, e4m3, bf16, 128, 64, 1040, false, true, true, 16},
      {e4m3, e4m3, fp32, 96, 32, 64, false, true},
      {e5m2, e4m3, bf16, 17, 96, 256},
      {e5m2, e4m3, bf16, 64, 128, 160, true, false, false, 0, -0.5},
      {e5m2, e4m3, fp32, 128, 64, 144, true, false, false, 16, 1.0, 1e-6, 250.0},
      {e4m3, e5m2, fp32, 32, 80, 512, true, false, true},
      {e4m3, e4m3, bf16, 1, 16, 16},
      {e4m3, e4m3, bf16, 300, 528, 128, true, true},
  };
  for (const Fp8GemmCase& c : products) {
    cases.push_back({"gemm_" + dtype_tag(c.a) + "_" + dtype_tag(c.b) + "_to_" + dtype_tag(c.c) +
                         "_" + std::to_string(c.m) + "x" + std::to_string(c.n) + "x" +
                         std::to_string(c.k) + (c.accumulate ? "_acc" : "") +
                         (c.bias ? "_bias" : "") + (c.fast ? "_fast" : "") +
                         (c.gap != 0 ? "_strided" : ""),
                     c.a, [=](OpFixture& f) { return run_fp8_gemm(f, c); }});
  }
}

}  // namespace tessera::test
