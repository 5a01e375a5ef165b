// SwiGLU, element-wise maps, column sums and sums of parts.
#pragma once

#include "tests/kernels/op_cases.h"

namespace tessera::test {

inline std::vector<OpOutput> run_swiglu(OpFixture& f, DType dtype, std::int64_t tokens,
                                        std::int64_t ffn, bool in_place, std::int64_t gap) {
  Values gate_up = normal_values(tokens * 2 * ffn, 1, 2.0);
  // Gates where the sigmoid saturates on either side.
  for (std::size_t i = 0; i < gate_up.size(); i += 11) gate_up[i] *= 30;
  gate_up = rounded(gate_up, dtype);
  const Values dout = rounded(normal_values(tokens * ffn, 2), dtype);
  const Shape packed{tokens, 2 * ffn}, single{tokens, ffn};
  SwiGluForward forward;
  forward.gate_up = f.input(gate_up, dtype, packed, gap);
  forward.out = f.output(dtype, single, gap);
  forward.amax = amax_record(f, dtype);
  f.run(swiglu_forward, forward);
  SwiGluBackward backward;
  backward.gate_up = forward.gate_up;
  backward.dout = f.input(dout, dtype, single, gap);
  backward.dgate_up = in_place ? backward.gate_up : f.output(dtype, packed, gap);
  const Values got = f.values(forward.out);
  backward.amax = amax_record(f, dtype);
  f.run(swiglu_backward, backward);

  OpOutput out{"out", got, {}, {}}, d{"dgate_up", f.values(backward.dgate_up), {}, {}};
  d.want.resize(gate_up.size());
  d.bound.resize(gate_up.size());
  const Bound bound = Bound::of(dtype, dtype);
  // A relative error e of exp(-g) is at most e in the sigmoid; 8 covers exp, sum, quotient,
  // products. The factor 1 + g (1 - s) cancels near its root: its error is relative to its terms.
  const double operations = 8;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t j = 0; j < ffn; ++j) {
      const auto gate = static_cast<std::size_t>(t * 2 * ffn + j),
                 up = gate + static_cast<std::size_t>(ffn);
      const double g = gate_up[gate], u = gate_up[up],
                   dy = dout[static_cast<std::size_t>(t * ffn + j)];
      const double s = 1 / (1 + std::exp(-g));
      out.want.push_back(g * s * u);
      // Where exp(-g) overflows, the sigmoid becomes 0 instead of a number below 2^-126.
      const double flushed =
          0x1p-125 * (1 + std::abs(g)) * (std::abs(u) + std::abs(dy) * (1 + std::abs(u)));
      out.bound.push_back(bound.chain(g * s * u, operations) + flushed);
      d.want[gate] = dy * u * s * (1 + g * (1 - s));
      // 1 - s itself is only good to u where s is near 1.
      d.bound[gate] = bound.chain(d.want[gate], operations) +
                      operations * bound.compute * std::abs(dy * u * s) * (1 + std::abs(g)) +
                      flushed;
      d.want[up] = dy * g * s;
      d.bound[up] = bound.chain(d.want[up], operations) + flushed;
    }
  }
  std::vector<OpOutput> outputs{out, d};
  add_amax_output(f, forward.amax, forward.out, outputs);
  add_amax_output(f, backward.amax, backward.dgate_up, outputs);
  return outputs;
}

struct MapCase {
  DType a, b, out;
  std::int64_t rows, cols;
  bool in_place = false;
  std::int64_t gap = 0;
};

inline std::vector<OpOutput> run_add(OpFixture& f, const MapCase& c) {
  const Values a = rounded(normal_values(c.rows * c.cols, 1), c.a);
  const Values b = rounded(normal_values(c.rows * c.cols, 2), c.b);
  const Shape shape{c.rows, c.cols};
  Add args;
  args.a = f.input(a, c.a, shape, c.gap);
  args.b = f.input(b, c.b, shape, 2 * c.gap);
  args.out = c.in_place ? args.a : f.output(c.out, shape, c.gap);
  f.run(add, args);
  OpOutput out{"out", f.values(args.out), {}, {}};
  // Exact up to the roundings of the sum and of the store.
  const Bound bound = Bound::of(
      args.out.dtype,
      c.a == DType::kF64 || c.b == DType::kF64 || c.out == DType::kF64 ? DType::kF64 : DType::kF32);
  // Smallest step of the narrow formats near zero.
  const double step = args.out.dtype == DType::kF8E4M3   ? 0x1p-10
                      : args.out.dtype == DType::kF8E5M2 ? 0x1p-17
                      : args.out.dtype == DType::kF16    ? 0x1p-25
                                                         : 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    out.want.push_back(a[i] + b[i]);
    out.bound.push_back(bound.chain(a[i] + b[i], 1) + step);
  }
  return {out};
}

inline std::vector<OpOutput> run_scale(OpFixture& f, const MapCase& c) {
  const double factor = -1.75;
  const Values in = rounded(normal_values(c.rows * c.cols, 1, 100.0), c.a);
  const Shape shape{c.rows, c.cols};
  Scale args;
  args.factor = factor;
  args.in = f.input(in, c.a, shape, c.gap);
  args.out = c.in_place ? args.in : f.output(c.out, shape, 2 * c.gap);
  f.run(scale, args);
  OpOutput out{"out", f.values(args.out), {}, {}};
  const bool is_double = c.a == DType::kF64 || args.out.dtype == DType::kF64;
  const double u = epsilon_of(is_double ? DType::kF64 : DType::kF32) / 2;
  for (const double value : in) {
    // One rounding from a product that is itself rounded once: compare with the rounded exact
    // product, and allow its neighbour where the first rounding crossed a tie.
    const double exact = factor * value;
    const Values low = rounded({exact * (1 - 2 * u)}, args.out.dtype),
                 high = rounded({exact * (1 + 2 * u)}, args.out.dtype);
    const double want = rounded({exact}, args.out.dtype)[0];
    out.want.push_back(want);
    out.bound.push_back(std::max(std::abs(want - low[0]), std::abs(want - high[0])) +
                        2 * u * std::abs(exact));
  }
  return {out};
}

inline std::vector<OpOutput> run_column_sum(OpFixture& f, DType dtype, DType result,
                                            std::int64_t rows, std::int64_t cols, bool accumulate,
                                            std::int64_t gap) {
  const Values in = rounded(normal_values(rows * cols, 1), dtype);
  const Values old = rounded(normal_values(cols, 2), result);
  ColumnSum args;
  args.in = f.input(in, dtype, Shape{rows, cols}, gap);
  args.out = accumulate ? f.input(old, result, Shape{cols}) : f.output(result, Shape{cols});
  args.accumulate = accumulate;
  f.run(column_sum, args);
  OpOutput out{"out", f.values(args.out), {}, {}};
  const Bound bound = Bound::of(result, dtype);
  for (std::int64_t j = 0; j < cols; ++j) {
    double sum = accumulate ? old[static_cast<std::size_t>(j)] : 0.0, magnitude = std::abs(sum);
    for (std::int64_t i = 0; i < rows; ++i) {
      sum += in[static_cast<std::size_t>(i * cols + j)];
      magnitude += std::abs(in[static_cast<std::size_t>(i * cols + j)]);
    }
    out.want.push_back(sum);
    out.bound.push_back(bound.sum(sum, rows, magnitude));
  }
  return {out};
}

inline std::vector<OpOutput> run_sum_parts(OpFixture& f, DType dtype, int count, std::int64_t n,
                                           bool maximum) {
  const Values in = rounded(normal_values(count * n, 1), dtype);
  SumParts args;
  args.in = f.input(in, dtype, Shape{count * n});
  args.out = f.output(dtype, Shape{n});
  args.count = count;
  args.maximum = maximum;
  f.run(sum_parts, args);
  OpOutput out{"out", f.values(args.out), {}, {}};
  const Bound bound = Bound::of(dtype, dtype);
  for (std::int64_t j = 0; j < n; ++j) {
    double sum = in[static_cast<std::size_t>(j)], magnitude = std::abs(sum);
    for (int p = 1; p < count; ++p) {
      const double value = in[static_cast<std::size_t>(p * n + j)];
      sum = maximum ? std::max(sum, value) : sum + value;
      magnitude += std::abs(value);
    }
    out.want.push_back(sum);
    out.bound.push_back(maximum ? 0 : bound.sum(sum, count, magnitude));
  }
  return {out};
}

inline void add_elementwise_cases(std::vector<OpCase>& cases) {
  const auto size = [](std::int64_t rows, std::int64_t cols) {
    return std::to_string(rows) + "x" + std::to_string(cols);
  };
  for (const DType dtype : float_types()) {
    const std::string tag = "_" + dtype_tag(dtype) + "_";
    for (const auto& [tokens, ffn, in_place, gap] :
         std::vector<std::tuple<std::int64_t, std::int64_t, bool, std::int64_t>>{
             {1, 1, false, 0}, {7, 37, true, 0}, {40, 172, false, 5}, {3, 4099, true, 0}}) {
      const auto t = tokens, n = ffn, g = gap;
      const bool same = in_place;
      cases.push_back(
          {"swiglu" + tag + size(t, n) + (same ? "_inplace" : "") + (g ? "_strided" : ""), dtype,
           [=](OpFixture& f) { return run_swiglu(f, dtype, t, n, same, g); }});
    }
    for (const auto& [rows, cols, accumulate, gap] :
         std::vector<std::tuple<std::int64_t, std::int64_t, bool, std::int64_t>>{
             {1, 1, false, 0}, {53, 37, true, 3}, {1000, 129, false, 0}}) {
      const auto r = rows, n = cols, g = gap;
      const bool acc = accumulate;
      std::vector<DType> results{dtype};
      if (dtype == DType::kBF16) results.push_back(DType::kF32);
      for (const DType result : results) {
        cases.push_back(
            {"column_sum" + tag + "to_" + dtype_tag(result) + "_" + size(r, n) +
                 (acc ? "_acc" : ""),
             dtype, [=](OpFixture& f) { return run_column_sum(f, dtype, result, r, n, acc, g); }});
      }
    }
    for (const bool maximum : {false, true}) {
      cases.push_back({"sum_parts" + tag + (maximum ? "max" : "sum"), dtype,
                       [=](OpFixture& f) { return run_sum_parts(f, dtype, 5, 1031, maximum); }});
    }
  }
  using enum DType;
  const std::vector<MapCase> maps{{kF64, kF64, kF64, 5, 7},
                                  {kF32, kF32, kF32, 1, 1},
                                  {kF32, kF32, kF32, 37, 53, true, 3},
                                  {kBF16, kBF16, kBF16, 11, 1030},
                                  {kBF16, kF32, kF32, 9, 33, false, 2},
                                  {kF32, kBF16, kBF16, 3, 2051},
                                  {kF64, kF32, kBF16, 4, 9},
                                  {kBF16, kBF16, kBF16, 6, 40, true},
                                  {kF16, kF32, kF16, 8, 8},
                                  {kF32, kF32, kF8E4M3, 4, 100},
                                  {kBF16, kBF16, kF8E5M2, 4, 100}};
  for (const MapCase& c : maps) {
    const std::string tag = "_" + dtype_tag(c.a) + "_" + dtype_tag(c.b) + "_" + dtype_tag(c.out) +
                            "_" + size(c.rows, c.cols) + (c.in_place ? "_inplace" : "") +
                            (c.gap ? "_strided" : "");
    const bool has_double = c.a == kF64 || c.b == kF64 || c.out == kF64;
    cases.push_back(
        {"add" + tag, has_double ? kF64 : c.a, [=](OpFixture& f) { return run_add(f, c); }});
    cases.push_back(
        {"scale" + tag, has_double ? kF64 : c.a, [=](OpFixture& f) { return run_scale(f, c); }});
  }
}

}  // namespace tessera::test
