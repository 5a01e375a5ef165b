// Cases of the op list: see op_cases.h.
#pragma once

#include "tests/kernels/op_cases.h"

namespace tessera::test {

struct RopeCase {
  std::int64_t tokens, heads_q, heads_kv, head_dim, rotary_dim;
  bool norm = false;
  bool in_place = false;
  bool accumulate = false;
  bool fp32_gradient = false;
  std::int64_t gap = 0;

  QkvLayout layout() const { return {heads_q, heads_kv, head_dim}; }
  std::string tag() const {
    return std::to_string(tokens) + "x" + std::to_string(heads_q) + "q" + std::to_string(heads_kv) + "kv" +
           std::to_string(head_dim) + "r" + std::to_string(rotary_dim) + (norm ? "_norm" : "") +
           (in_place ? "_inplace" : "") + (gap ? "_strided" : "");
  }
};

inline constexpr std::int64_t kRopePositions = 97;

struct RopeTables {
  Values cos, sin;
  std::vector<std::int32_t> positions;
  std::int64_t half;

  static RopeTables of(const RopeCase& c, DType dtype) {
    RopeTables tables;
    tables.half = c.rotary_dim / 2;
    for (std::int64_t p = 0; p < kRopePositions; ++p) {
      for (std::int64_t i = 0; i < tables.half; ++i) {
        const double angle = static_cast<double>(p) *
                             std::pow(10000.0, -static_cast<double>(2 * i) / static_cast<double>(c.rotary_dim));
        tables.cos.push_back(std::cos(angle));
        tables.sin.push_back(std::sin(angle));
      }
    }
    tables.cos = rounded(tables.cos, statistics_type(dtype));
    tables.sin = rounded(tables.sin, statistics_type(dtype));
    // Not monotonic: packed documents start over.
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      tables.positions.push_back(static_cast<std::int32_t>((t * 7 + 3) % kRopePositions));
    }
    return tables;
  }
};

// Element j of a head after rotation by +-position; `mag` receives the sum of the terms' magnitudes.
inline double rotated(const RopeTables& tables, const double* x, std::int64_t token, std::int64_t j,
                      double direction, double* mag) {
  const std::int64_t half = tables.half;
  *mag = std::abs(x[j]);
  if (j >= 2 * half) return x[j];
  const std::int64_t i = j % half, position = tables.positions[static_cast<std::size_t>(token)];
  const double c = tables.cos[static_cast<std::size_t>(position * half + i)];
  const double s = direction * tables.sin[static_cast<std::size_t>(position * half + i)];
  const double other = j < half ? -x[j + half] * s : x[j - half] * s;
  *mag = std::abs(x[j] * c) + std::abs(other);
  return x[j] * c + other;
}

inline double rms_rstd(const double* x, std::int64_t n, double eps) {
  double squares = 0;
  for (std::int64_t j = 0; j < n; ++j) squares += x[j] * x[j];
  return 1 / std::sqrt(squares / static_cast<double>(n) + eps);
}

inline std::vector<OpOutput> run_rope_forward(OpFixture& f, DType dtype, const RopeCase& c) {
  const QkvLayout layout = c.layout();
  const RopeTables tables = RopeTables::of(c, dtype);
  const Values in = rounded(normal_values(c.tokens * layout.cols(), 1, 2.0), dtype);
  const Values q_norm = rounded(normal_values(c.head_dim, 2), dtype);
  const Values k_norm = rounded(normal_values(c.head_dim, 3), dtype);
  const DType statistics = statistics_type(dtype);
  const Shape shape{c.tokens, layout.cols()}, table_shape{kRopePositions, tables.half};
  const std::int64_t heads = c.heads_q + c.heads_kv;
  QkvRopeForward args;
  args.layout = layout;
  args.in = f.input(in, dtype, shape, c.gap);
  args.out = c.in_place ? args.in : f.output(dtype, shape, c.gap);
  args.cos = f.input(tables.cos, statistics, table_shape);
  args.sin = f.input(tables.sin, statistics, table_shape);
  args.positions = f.integers(tables.positions);
  if (c.norm) {
    args.q_norm = f.input(q_norm, dtype, Shape{c.head_dim});
    args.k_norm = f.input(k_norm, dtype, Shape{c.head_dim});
    args.rstd = f.output(statistics, Shape{c.tokens, heads});
  }
  f.run(qkv_rope_forward, args);

  OpOutput out{"out", f.values(args.out), {}, {}}, rstd{"rstd", {}, {}, {}};
  if (c.norm) rstd.got = f.values(args.rstd);
  const Bound bound = Bound::of(dtype, dtype), rstd_bound = Bound::of(statistics, dtype);
  const double operations = 6 + std::sqrt(static_cast<double>(c.head_dim));
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    for (std::int64_t h = 0; h < heads + c.heads_kv; ++h) {
      const double* x = in.data() + t * layout.cols() + h * c.head_dim;
      Values head(x, x + c.head_dim);
      if (c.norm && h < heads) {
        const double r = rms_rstd(x, c.head_dim, static_cast<double>(args.eps));
        rstd.want.push_back(r);
        rstd.bound.push_back(rstd_bound.chain(r, operations));
        const Values& weight = h < c.heads_q ? q_norm : k_norm;
        for (std::size_t j = 0; j < head.size(); ++j) head[j] *= r * weight[j];
      }
      for (std::int64_t j = 0; j < c.head_dim; ++j) {
        double magnitude = 0;
        const double y = h < heads ? rotated(tables, head.data(), t, j, 1, &magnitude)
                                   : head[static_cast<std::size_t>(j)];
        out.want.push_back(y);
        // v is copied bit for bit; so is what lies past rotary_dim when there is no norm.
        const bool is_copied = h >= heads || (!c.norm && j >= 2 * tables.half);
        out.bound.push_back(is_copied ? 0
                                      : bound.chain(y, 0) + operations * bound.compute * magnitude);
      }
    }
  }
  std::vector<OpOutput> outputs{out};
  if (c.norm) outputs.push_back(rstd);
  return outputs;
}

inline std::vector<OpOutput> run_rope_backward(OpFixture& f, DType dtype, const RopeCase& c) {
  const QkvLayout layout = c.layout();
  const RopeTables tables = RopeTables::of(c, dtype);
  const Values in = rounded(normal_values(c.tokens * layout.cols(), 1, 2.0), dtype);
  const Values d = rounded(normal_values(c.tokens * layout.cols(), 6), dtype);
  const Values q_norm = rounded(normal_values(c.head_dim, 2), dtype);
  const Values k_norm = rounded(normal_values(c.head_dim, 3), dtype);
  const DType statistics = statistics_type(dtype), gradient = c.fp32_gradient ? DType::kF32 : dtype;
  const Values old_q = rounded(normal_values(c.head_dim, 4), gradient);
  const Values old_k = rounded(normal_values(c.head_dim, 5), gradient);
  const Shape shape{c.tokens, layout.cols()}, table_shape{kRopePositions, tables.half};
  const std::int64_t heads = c.heads_q + c.heads_kv;
  Values rstd;
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    for (std::int64_t h = 0; h < heads; ++h) {
      rstd.push_back(rms_rstd(in.data() + t * layout.cols() + h * c.head_dim, c.head_dim, 1e-6));
    }
  }
  rstd = rounded(rstd, statistics);
  QkvRopeBackward args;
  args.layout = layout;
  args.d = f.input(d, dtype, shape, c.gap);
  args.cos = f.input(tables.cos, statistics, table_shape);
  args.sin = f.input(tables.sin, statistics, table_shape);
  args.positions = f.integers(tables.positions);
  if (c.norm) {
    args.in = f.input(in, dtype, shape, c.gap);
    args.q_norm = f.input(q_norm, dtype, Shape{c.head_dim});
    args.k_norm = f.input(k_norm, dtype, Shape{c.head_dim});
    args.rstd = f.input(rstd, statistics, Shape{c.tokens, heads});
    args.dq_norm = c.accumulate ? f.input(old_q, gradient, Shape{c.head_dim})
                                : f.output(gradient, Shape{c.head_dim});
    args.dk_norm = f.output(gradient, Shape{c.head_dim});  // the two flags are independent
    args.accumulate_dq_norm = c.accumulate;
  }
  f.run(qkv_rope_backward, args);

  OpOutput out{"d", f.values(args.d), {}, {}};
  OpOutput dq{"dq_norm", {}, {}, {}}, dk{"dk_norm", {}, {}, {}};
  const Bound bound = Bound::of(dtype, dtype), weight_bound = Bound::of(gradient, dtype);
  const auto width = static_cast<std::size_t>(c.head_dim);
  Values sums[2] = {Values(width, 0.0), Values(width, 0.0)};
  Values magnitudes[2] = {Values(width, 0.0), Values(width, 0.0)};
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    for (std::int64_t h = 0; h < heads + c.heads_kv; ++h) {
      const std::int64_t offset = t * layout.cols() + h * c.head_dim;
      const double* dy = d.data() + offset;
      const double* x = in.data() + offset;
      Values dn(width), magnitude(width);
      for (std::size_t j = 0; j < width; ++j) {
        dn[j] = h < heads ? rotated(tables, dy, t, static_cast<std::int64_t>(j), -1, &magnitude[j]) : dy[j];
      }
      double dot = 0, dot_magnitude = 0, r = 1;
      const Values& weight = h < c.heads_q ? q_norm : k_norm;
      const bool is_normalised = c.norm && h < heads;
      if (is_normalised) {
        r = rstd[static_cast<std::size_t>(t * heads + h)];
        for (std::size_t j = 0; j < width; ++j) {
          dot += dn[j] * weight[j] * x[j] / static_cast<double>(width);
          dot_magnitude += std::abs(magnitude[j] * weight[j] * x[j]) / static_cast<double>(width);
          sums[h >= c.heads_q][j] += dn[j] * x[j] * r;
          magnitudes[h >= c.heads_q][j] += std::abs(magnitude[j] * x[j] * r);
        }
      }
      for (std::size_t j = 0; j < width; ++j) {
        if (is_normalised) {
          const double y = r * (dn[j] * weight[j] - x[j] * r * r * dot);
          out.want.push_back(y);
          out.bound.push_back(bound.sum(y, c.head_dim + 8,
                                        r * (magnitude[j] * std::abs(weight[j]) +
                                             std::abs(x[j]) * r * r * dot_magnitude)));
        } else {
          out.want.push_back(dn[j]);
          const bool is_copied = h >= heads || static_cast<std::int64_t>(j) >= 2 * tables.half;
          out.bound.push_back(is_copied ? 0 : bound.chain(dn[j], 0) + 4 * bound.compute * magnitude[j]);
        }
      }
    }
  }
  if (!c.norm) return {out};
  dq.got = f.values(args.dq_norm);
  dk.got = f.values(args.dk_norm);
  for (std::size_t j = 0; j < width; ++j) {
    const double base = c.accumulate ? old_q[j] : 0.0;
    dq.want.push_back(base + sums[0][j]);
    dq.bound.push_back(weight_bound.sum(dq.want[j], c.tokens * c.heads_q, std::abs(base) + magnitudes[0][j]));
    dk.want.push_back(sums[1][j]);
    dk.bound.push_back(weight_bound.sum(dk.want[j], c.tokens * c.heads_kv, magnitudes[1][j]));
  }
  return {out, dq, dk};
}

inline void add_rope_cases(std::vector<OpCase>& cases) {
  const std::vector<RopeCase> list{
      {1, 1, 1, 2, 2},
      {13, 4, 2, 16, 16, false, true},
      {37, 3, 1, 24, 10, false, false, false, false, 5},  // partial rotation, odd head count
      {5, 2, 2, 64, 64, true},
      {67, 6, 2, 32, 32, true, false, true, false, 8},
      {40, 2, 1, 20, 12, true, false, true, true},
  };
  for (const DType dtype : float_types()) {
    for (const RopeCase& c : list) {
      if (c.fp32_gradient && dtype == DType::kF64) continue;
      const std::string tag = "_" + dtype_tag(dtype) + "_" + c.tag();
      cases.push_back({"qkv_rope_forward" + tag, dtype,
                       [=](OpFixture& f) { return run_rope_forward(f, dtype, c); }});
      cases.push_back({"qkv_rope_backward" + tag + (c.accumulate ? "_acc" : ""), dtype,
                       [=](OpFixture& f) { return run_rope_backward(f, dtype, c); }});
    }
  }
}

}  // namespace tessera::test
