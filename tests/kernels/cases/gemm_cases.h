// Cases of the op list: see op_cases.h.
#pragma once

#include "tests/kernels/op_cases.h"

namespace tessera::test {

struct GemmCase {
  std::int64_t m, n, k;
  bool transpose_a = false, transpose_b = false;
  bool accumulate = false, bias = false;
  std::int64_t gap = 0;
  double alpha = 1.0;
  bool fp32_result = false;
};

inline std::vector<OpOutput> run_gemm(OpFixture& f, DType dtype, const GemmCase& c) {
  const Values a = rounded(normal_values(c.m * c.k, 1), dtype);
  const Values b = rounded(normal_values(c.k * c.n, 2), dtype);
  const Values bias = rounded(normal_values(c.n, 3), dtype);
  const DType result = c.fp32_result ? DType::kF32 : dtype;
  const Values old = rounded(normal_values(c.m * c.n, 4), result);
  Gemm args;
  args.transpose_a = c.transpose_a;
  args.transpose_b = c.transpose_b;
  args.a = f.input(a, dtype, c.transpose_a ? Shape{c.k, c.m} : Shape{c.m, c.k}, c.gap);
  args.b = f.input(b, dtype, c.transpose_b ? Shape{c.n, c.k} : Shape{c.k, c.n}, c.gap);
  args.c = c.accumulate ? f.input(old, result, Shape{c.m, c.n}, c.gap)
                        : f.output(result, Shape{c.m, c.n}, c.gap);
  args.alpha = static_cast<float>(c.alpha);
  args.accumulate = c.accumulate;
  if (c.bias) args.bias = f.input(bias, dtype, Shape{c.n});
  f.run(gemm, args);

  OpOutput out{"c", f.values(args.c), {}, {}};
  const Bound bound = Bound::of(result, dtype);
  for (std::int64_t i = 0; i < c.m; ++i) {
    for (std::int64_t j = 0; j < c.n; ++j) {
      double sum = 0, magnitude = 0;
      for (std::int64_t p = 0; p < c.k; ++p) {
        const double x = a[static_cast<std::size_t>(c.transpose_a ? p * c.m + i : i * c.k + p)];
        const double y = b[static_cast<std::size_t>(c.transpose_b ? j * c.k + p : p * c.n + j)];
        sum += x * y;
        magnitude += std::abs(x * y);
      }
      sum *= c.alpha;
      magnitude *= std::abs(c.alpha);
      if (c.accumulate) {
        sum += old[static_cast<std::size_t>(i * c.n + j)];
        magnitude += std::abs(old[static_cast<std::size_t>(i * c.n + j)]);
      }
      if (c.bias) {
        sum += bias[static_cast<std::size_t>(j)];
        magnitude += std::abs(bias[static_cast<std::size_t>(j)]);
      }
      out.want.push_back(sum);
      out.bound.push_back(bound.sum(sum, c.k, magnitude));
    }
  }
  return {out};
}

inline void add_gemm_cases(std::vector<OpCase>& cases) {
  std::vector<GemmCase> list{{1, 1, 1}, {1, 37, 5}, {7, 1, 13}, {64, 48, 32}, {33, 65, 129}, {257, 40, 67}};
  for (const bool ta : {false, true}) {
    for (const bool tb : {false, true}) list.push_back({31, 29, 37, ta, tb, false, false, 3});
  }
  list.push_back({17, 23, 19, false, true, true, false, 0});
  list.push_back({17, 23, 19, false, true, false, true, 5});
  list.push_back({17, 24, 40, true, false, true, true, 8, 0.5});
  list.push_back({16, 32, 64, false, false, true, false, 0, -1.25, true});
  list.push_back({8, 16, 2050, false, true, false, true, 0, 1.0, true});
  list.push_back({5, 9, 0, false, false, false, true});
  list.push_back({5, 9, 0, false, false, true, false});
  list.push_back({300, 530, 129, false, true, true, true, 1});
  for (const DType dtype : float_types()) {
    for (const GemmCase& c : list) {
      std::string name = "gemm_" + dtype_tag(dtype) + "_" + std::to_string(c.m) + "x" +
                         std::to_string(c.n) + "x" + std::to_string(c.k) + (c.transpose_a ? "_ta" : "") +
                         (c.transpose_b ? "_tb" : "") + (c.accumulate ? "_acc" : "") +
                         (c.bias ? "_bias" : "") + (c.gap ? "_strided" : "") +
                         (c.fp32_result ? "_to_fp32" : "");
      cases.push_back({name, dtype, [=](OpFixture& f) { return run_gemm(f, dtype, c); }});
    }
  }
}

}  // namespace tessera::test
