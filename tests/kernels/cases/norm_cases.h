// Cases of the op list: see op_cases.h.
#pragma once

#include "tests/kernels/op_cases.h"

namespace tessera::test {

struct NormCase {
  std::int64_t tokens, hidden;
  bool delta = false;       // forward: residual addition; backward: dsum
  bool accumulate = false;  // backward
  bool fp32_gradient = false;
  bool in_place = false;  // sum aliases x; dx aliases dsum
  std::int64_t gap = 0;
};

inline std::vector<OpOutput> run_rmsnorm_forward(OpFixture& f, DType dtype, const NormCase& c) {
  const std::int64_t count = c.tokens * c.hidden;
  const Values x = rounded(normal_values(count, 1, 3.0), dtype);
  const Values delta = rounded(normal_values(count, 2), dtype);
  const Values weight = rounded(normal_values(c.hidden, 3), dtype);
  const Shape shape{c.tokens, c.hidden};
  RmsNormForward args;
  args.x = f.input(x, dtype, shape, c.gap);
  args.weight = f.input(weight, dtype, Shape{c.hidden});
  args.out = f.output(dtype, shape, c.gap);
  args.rstd = f.output(statistics_type(dtype), Shape{c.tokens});
  if (c.delta) {
    args.delta = f.input(delta, dtype, shape, c.gap);
    args.sum = c.in_place ? args.x : f.output(dtype, shape, c.gap);
  }
  args.amax = amax_record(f, dtype);
  f.run(rmsnorm_forward, args);

  OpOutput out{"out", f.values(args.out), {}, {}}, rstd{"rstd", f.values(args.rstd), {}, {}};
  OpOutput sum{"sum", {}, {}, {}};
  const Bound bound = Bound::of(dtype, dtype),
              statistics = Bound::of(statistics_type(dtype), dtype);
  Values s = x;
  if (c.delta) {
    sum.got = f.values(args.sum);
    for (std::size_t i = 0; i < s.size(); ++i) {
      sum.want.push_back(x[i] + delta[i]);
      sum.bound.push_back(bound.chain(x[i] + delta[i], 1));
    }
    s = sum.got;  // the norm is of the stored sum
  }
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    double squares = 0;
    for (std::int64_t j = 0; j < c.hidden; ++j)
      squares += s[static_cast<std::size_t>(t * c.hidden + j)] *
                 s[static_cast<std::size_t>(t * c.hidden + j)];
    const double r =
        1 / std::sqrt(squares / static_cast<double>(c.hidden) + static_cast<double>(args.eps));
    rstd.want.push_back(r);
    const double operations = 4 + std::sqrt(static_cast<double>(c.hidden));
    rstd.bound.push_back(statistics.chain(r, operations));
    for (std::int64_t j = 0; j < c.hidden; ++j) {
      const double y =
          s[static_cast<std::size_t>(t * c.hidden + j)] * r * weight[static_cast<std::size_t>(j)];
      out.want.push_back(y);
      out.bound.push_back(bound.chain(y, operations + 2));
    }
  }
  std::vector<OpOutput> outputs{out, rstd};
  if (c.delta) outputs.push_back(sum);
  add_amax_output(f, args.amax, args.out, outputs);
  return outputs;
}

inline std::vector<OpOutput> run_rmsnorm_backward(OpFixture& f, DType dtype, const NormCase& c) {
  const std::int64_t count = c.tokens * c.hidden;
  const Values dout = rounded(normal_values(count, 1), dtype);
  const Values s = rounded(normal_values(count, 2, 2.0), dtype);
  const Values weight = rounded(normal_values(c.hidden, 3), dtype);
  const Values dsum = rounded(normal_values(count, 4), dtype);
  const DType gradient = c.fp32_gradient ? DType::kF32 : dtype;
  const Values old = rounded(normal_values(c.hidden, 5), gradient);
  Values rstd;
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    double squares = 0;
    for (std::int64_t j = 0; j < c.hidden; ++j)
      squares += s[static_cast<std::size_t>(t * c.hidden + j)] *
                 s[static_cast<std::size_t>(t * c.hidden + j)];
    rstd.push_back(1 / std::sqrt(squares / static_cast<double>(c.hidden) + 1e-5));
  }
  rstd = rounded(rstd, statistics_type(dtype));
  const Shape shape{c.tokens, c.hidden};
  RmsNormBackward args;
  args.dout = f.input(dout, dtype, shape, c.gap);
  args.s = f.input(s, dtype, shape, c.gap);
  args.weight = f.input(weight, dtype, Shape{c.hidden});
  args.rstd = f.input(rstd, statistics_type(dtype), Shape{c.tokens});
  if (c.delta) args.dsum = f.input(dsum, dtype, shape, c.gap);
  args.dx = c.delta && c.in_place ? args.dsum : f.output(dtype, shape, c.gap);
  args.dweight =
      c.accumulate ? f.input(old, gradient, Shape{c.hidden}) : f.output(gradient, Shape{c.hidden});
  args.accumulate_dweight = c.accumulate;
  args.amax = amax_record(f, dtype);
  f.run(rmsnorm_backward, args);

  OpOutput dx{"dx", f.values(args.dx), {}, {}}, dweight{"dweight", f.values(args.dweight), {}, {}};
  const Bound bound = Bound::of(dtype, dtype), weight_bound = Bound::of(gradient, dtype);
  Values sums(static_cast<std::size_t>(c.hidden), 0.0),
      magnitudes(static_cast<std::size_t>(c.hidden), 0.0);
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    const double r = rstd[static_cast<std::size_t>(t)];
    double dot = 0, dot_magnitude = 0;
    for (std::int64_t j = 0; j < c.hidden; ++j) {
      const auto e = static_cast<std::size_t>(t * c.hidden + j), col = static_cast<std::size_t>(j);
      dot += dout[e] * weight[col] * s[e];
      dot_magnitude += std::abs(dout[e] * weight[col] * s[e]);
      sums[col] += dout[e] * s[e] * r;
      magnitudes[col] += std::abs(dout[e] * s[e] * r);
    }
    const double along = dot / static_cast<double>(c.hidden) * r * r;
    const double along_magnitude = dot_magnitude / static_cast<double>(c.hidden) * r * r;
    for (std::int64_t j = 0; j < c.hidden; ++j) {
      const auto e = static_cast<std::size_t>(t * c.hidden + j), col = static_cast<std::size_t>(j);
      const double residual = c.delta ? dsum[e] : 0.0;
      const double y = residual + r * (dout[e] * weight[col] - s[e] * along);
      dx.want.push_back(y);
      dx.bound.push_back(bound.sum(y, c.hidden,
                                   std::abs(residual) + r * (std::abs(dout[e] * weight[col]) +
                                                             std::abs(s[e]) * along_magnitude)));
    }
  }
  for (std::size_t j = 0; j < sums.size(); ++j) {
    const double base = c.accumulate ? old[j] : 0.0;
    dweight.want.push_back(base + sums[j]);
    dweight.bound.push_back(
        weight_bound.sum(base + sums[j], c.tokens, std::abs(base) + magnitudes[j]));
  }
  std::vector<OpOutput> outputs{dx, dweight};
  add_amax_output(f, args.amax, args.dx, outputs);
  return outputs;
}

inline void add_norm_cases(std::vector<OpCase>& cases) {
  const std::vector<NormCase> list{{1, 1},
                                   {1, 7, true},
                                   {13, 64, true, false, false, true},
                                   {37, 67, true, true, false, false, 5},
                                   {101, 96, true, true, true, true, 8},
                                   {600, 130, false, false, true},
                                   {3, 2053, true, true}};
  for (const DType dtype : float_types()) {
    for (const NormCase& c : list) {
      if (c.fp32_gradient && dtype == DType::kF64) continue;
      const std::string tag = "_" + dtype_tag(dtype) + "_" + std::to_string(c.tokens) + "x" +
                              std::to_string(c.hidden) + (c.delta ? "_residual" : "") +
                              (c.in_place ? "_inplace" : "") + (c.gap ? "_strided" : "");
      cases.push_back({"rmsnorm_forward" + tag, dtype,
                       [=](OpFixture& f) { return run_rmsnorm_forward(f, dtype, c); }});
      cases.push_back({"rmsnorm_backward" + tag + (c.accumulate ? "_acc" : "") +
                           (c.fp32_gradient ? "_to_fp32" : ""),
                       dtype, [=](OpFixture& f) { return run_rmsnorm_backward(f, dtype, c); }});
    }
  }
}

}  // namespace tessera::test
