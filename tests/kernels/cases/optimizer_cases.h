// Gradient norm, step control, AdamW and initial values.
#pragma once

#include "kernels/step_control.h"
#include "tests/kernels/op_cases.h"

namespace tessera::test {

struct AdamWCase {
  DType weight, grad, moment;
  bool master = false;
  std::int64_t size = 40000;
};

// Three parameters with gaps between them; the last is a column piece of a wider matrix.
inline std::vector<ShardSegment> optimizer_segments(std::int64_t size) {
  ShardSegment first, second, third;
  first.begin = 0, first.end = size / 3;
  first.local_cols = first.global_cols = std::max<std::int64_t>(1, size);
  first.weight_decay = 0.1f;
  second.begin = size / 3 + (size > 64 ? 7 : 0), second.end = size / 2;
  second.local_cols = second.global_cols = 1;
  second.lr_scale = 0.5f, second.count_in_norm = 0, second.stream = 3;
  third.begin = size / 2, third.end = size;
  third.local_begin = 11, third.global_begin = 20, third.local_cols = 8, third.global_cols = 24;
  third.weight_decay = 0.01f, third.stream = 4;
  return {first, second, third};
}

// Values as 8-bit moments: codes, scales, and what they stand for.
struct MomentCodes {
  Values codes, scales, values;
};
inline MomentCodes encode_moments(const Values& values, bool is_signed) {
  MomentCodes result;
  for (std::size_t block = 0; block < values.size(); block += kMomentBlock) {
    float largest = 0;
    for (std::size_t i = block; i < block + kMomentBlock; ++i) {
      largest = std::max(largest, static_cast<float>(std::abs(values[i])));
    }
    const float scale = moment_scale(largest);
    result.scales.push_back(scale);
    for (std::size_t i = block; i < block + kMomentBlock; ++i) {
      const float scaled = static_cast<float>(values[i]) * inverse_moment_scale(scale);
      const std::uint8_t code = is_signed ? encode_m(scaled, kMomentNearest) : encode_v(scaled, kMomentNearest);
      result.codes.push_back(code);
      result.values.push_back((is_signed ? decode_m(code) : decode_v(code)) * scale);
    }
  }
  return result;
}
inline Values decode_moments(const Values& codes, const Values& scales, bool is_signed) {
  Values result;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const auto code = static_cast<std::uint8_t>(codes[i]);
    result.push_back((is_signed ? decode_m(code) : decode_v(code)) * scales[i / kMomentBlock]);
  }
  return result;
}
// The distance between neighbouring codes at each of these values, within blocks of their scales: an
// eighth of a value's power of two, down to the least distance under the scale. That may be twice as
// large where rounding moves the block's largest value over a power of two.
inline Values moment_steps(const Values& values, bool is_signed) {
  Values steps;
  for (std::size_t block = 0; block < values.size(); block += kMomentBlock) {
    double largest = 0;
    for (std::size_t i = block; i < block + kMomentBlock; ++i) largest = std::max(largest, std::abs(values[i]));
    const double least = 2 * static_cast<double>(moment_scale(static_cast<float>(largest))) * std::ldexp(1, is_signed ? -17 : -33);
    for (std::size_t i = block; i < block + kMomentBlock; ++i) {
      steps.push_back(std::max(std::abs(values[i]) / 8, least));
    }
  }
  return steps;
}

inline std::vector<OpOutput> run_adamw(OpFixture& f, const AdamWCase& c) {
  const std::int64_t n = c.size;
  Values weight = normal_values(n, 1), m = normal_values(n, 3, 1e-2), v = normal_values(n, 4, 1e-2);
  for (double& x : v) x *= x;
  const DType parameter = c.master ? DType::kF32 : c.weight;
  const bool has_codes = c.moment == DType::kU8;
  weight = rounded(weight, parameter);
  MomentCodes m_codes, v_codes;
  if (has_codes) {
    m_codes = encode_moments(m, true), v_codes = encode_moments(v, false);
    m = m_codes.values, v = v_codes.values;
  } else {
    m = rounded(m, c.moment);
    v = rounded(v, c.moment);
  }
  const Values grad = rounded(normal_values(n, 2, 3.0), c.grad);
  const std::vector<ShardSegment> segments = optimizer_segments(n);
  StepControl control;
  control.learning_rate = 1e-2f;
  control.rounding_key = derive_key(5, RandomPurpose::kStochasticRounding, 7);
  control.adam_step = 3;
  control.grad_scale = 0.01f;
  control.is_finite = control.has_targets = 1;
  AdamW args;
  args.weight = f.input(weight, c.weight, Shape{n});
  if (c.master) args.master = f.input(weight, DType::kF32, Shape{n});
  args.grad = f.input(grad, c.grad, Shape{n});
  args.m = f.input(has_codes ? m_codes.codes : m, c.moment, Shape{n});
  args.v = f.input(has_codes ? v_codes.codes : v, c.moment, Shape{n});
  if (has_codes) {
    args.m_scale = f.input(m_codes.scales, DType::kF32, Shape{n / kMomentBlock});
    args.v_scale = f.input(v_codes.scales, DType::kF32, Shape{n / kMomentBlock});
  }
  args.segments = f.bytes_of(segments);
  args.control = f.bytes_of(std::vector<StepControl>{control});
  f.run(adamw, args);

  OpOutput w{"weight", f.values(args.weight), {}, {}}, p{"master", {}, {}, {}};
  OpOutput m_out{"m", f.values(args.m), m, Values(m.size(), 0.0)}, v_out{"v", f.values(args.v), v, Values(v.size(), 0.0)};
  if (c.master) p.got = f.values(args.master);
  Values want = weight, bound(weight.size(), 0.0);
  const double u = epsilon_of(DType::kF32) / 2, b1 = static_cast<double>(args.beta1), b2 = static_cast<double>(args.beta2);
  for (const ShardSegment& s : segments) {
    for (auto i = static_cast<std::size_t>(s.begin); i < static_cast<std::size_t>(s.end); ++i) {
      const double g = grad[i] * static_cast<double>(control.grad_scale);
      const double new_m = b1 * m[i] + (1 - b1) * g, new_v = b2 * v[i] + (1 - b2) * g * g;
      const double rate = static_cast<double>(control.learning_rate) * static_cast<double>(s.lr_scale);
      const double direction = new_m / (1 - std::pow(b1, 3)) / (std::sqrt(new_v / (1 - std::pow(b2, 3))) + static_cast<double>(args.eps));
      want[i] = weight[i] - rate * (static_cast<double>(s.weight_decay) * weight[i] + direction);
      // 1 - beta is only as good as beta in fp32: u / (1 - beta) relative.
      const double m_error = 8 * u * (std::abs(b1 * m[i]) + std::abs((1 - b1) * g) * 2);
      const double v_error = 8 * u * (b2 * v[i] + (1 - b2) * g * g / (1 - b2) * 0.1);
      const double relative = m_error / std::max(std::abs(new_m), 1e-30) + v_error / std::max(new_v, 1e-30) + 16 * u;
      bound[i] = 4 * u * std::abs(weight[i]) + rate * (std::abs(direction) * relative + 4 * u * std::abs(weight[i]));
      m_out.want[i] = new_m;
      v_out.want[i] = new_v;
      // Stochastic rounding may go to either neighbour.
      const double step = c.moment == DType::kBF16 ? epsilon_of(DType::kBF16) : 0;
      m_out.bound[i] = m_error + step * std::abs(new_m);
      v_out.bound[i] = v_error + step * new_v;
    }
  }
  if (has_codes) {
    // Stochastic rounding may go to either neighbour, also in between the segments where a scale grew.
    m_out.got = decode_moments(m_out.got, f.values(args.m_scale), true);
    v_out.got = decode_moments(v_out.got, f.values(args.v_scale), false);
    const Values m_steps = moment_steps(m_out.want, true), v_steps = moment_steps(v_out.want, false);
    for (std::size_t i = 0; i < m_steps.size(); ++i) {
      m_out.bound[i] += m_steps[i];
      v_out.bound[i] += v_steps[i];
    }
  }
  std::vector<OpOutput> outputs{m_out, v_out};
  if (c.master) {
    p.want = want;
    p.bound = bound;
    outputs.push_back(p);
    w.want = rounded(want, c.weight);
    for (std::size_t i = 0; i < bound.size(); ++i) {
      w.bound.push_back(c.weight == DType::kF32 || bound[i] == 0 ? bound[i] : bound[i] + epsilon_of(c.weight) * std::abs(want[i]));
    }
  } else {
    w.want = want;
    for (std::size_t i = 0; i < bound.size(); ++i) {
      w.bound.push_back(bound[i] == 0 ? 0 : bound[i] + (c.weight == DType::kBF16 ? epsilon_of(c.weight) * std::abs(want[i]) : 0));
    }
  }
  outputs.push_back(w);
  return outputs;
}

inline std::vector<OpOutput> run_sum_of_squares(OpFixture& f, DType dtype, std::int64_t n) {
  const Values grad = rounded(normal_values(n, 1, 50.0), dtype);
  const std::vector<ShardSegment> segments = optimizer_segments(n);
  SumOfSquares args;
  args.grad = f.input(grad, dtype, Shape{n});
  args.segments = f.bytes_of(segments);
  args.sum = f.input({17.0}, DType::kF64, Shape{1});
  f.run(sum_of_squares, args);
  OpOutput out{"sum", f.values(args.sum), {17.0}, {}};
  for (const ShardSegment& s : segments) {
    if (s.count_in_norm == 0) continue;
    for (auto i = static_cast<std::size_t>(s.begin); i < static_cast<std::size_t>(s.end); ++i) out.want[0] += grad[i] * grad[i];
  }
  out.bound.push_back(1e-15 * static_cast<double>(n + 4) * out.want[0]);
  return {out};
}

inline std::vector<OpOutput> run_step_control(OpFixture& f, double sum, double denominator, float limit) {
  StepControl control;
  control.max_grad_norm = limit;
  control.adam_step = 41;
  StepControlFinish args;
  args.control = f.bytes_of(std::vector<StepControl>{control});
  args.sum = f.input({sum}, DType::kF64, Shape{1});
  args.denominator = f.input({denominator}, DType::kF64, Shape{1});
  f.run(step_control_finish, args);
  const auto got = f.object<StepControl>(args.control);
  const double norm = denominator > 0 ? std::sqrt(sum) / denominator : 0;
  const double clip = limit > 0 ? std::min(1.0, static_cast<double>(limit) / (norm + 1e-6)) : 1.0;
  const bool is_finite = std::isfinite(norm), applies = is_finite && denominator > 0;
  OpOutput flags{"flags",
                 {static_cast<double>(got.is_finite), static_cast<double>(got.has_targets), static_cast<double>(got.adam_step)},
                 {is_finite ? 1.0 : 0.0, denominator > 0 ? 1.0 : 0.0, applies ? 42.0 : 41.0},
                 {0, 0, 0}};
  if (!applies) return {flags};
  OpOutput scalars{"scalars",
                   {got.grad_norm, got.grad_scale, got.sum_of_squares, got.denominator},
                   {norm, clip / denominator, sum, denominator},
                   {1e-6 * norm, 1e-6 * clip / denominator, 0, 0}};
  return {flags, scalars};
}

inline std::vector<OpOutput> run_fill_normal(OpFixture& f, DType dtype, float mean, float std) {
  const std::int64_t rows = 7, cols = 33, global_cols = 70;
  FillNormal args;
  args.out = f.output(dtype, Shape{rows, cols}, 3);
  args.key = derive_key(11, RandomPurpose::kInit, 0, 5);
  args.first_row = 3;
  args.first_col = 20;
  args.global_cols = global_cols;
  args.mean = mean;
  args.std = std;
  f.run(fill_normal, args);
  OpOutput out{"out", f.values(args.out), {}, {}};
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      const double z = philox_normal(args.key, static_cast<std::uint64_t>((3 + i) * global_cols + 20 + j));
      const double y = static_cast<double>(mean) + static_cast<double>(std) * z;
      out.want.push_back(y);
      // log, sqrt, sin and cos of a GPU differ from the host's by a few ulp; the angle is up to 2 pi.
      out.bound.push_back(std == 0 ? epsilon_of(dtype) / 2 * std::abs(y)
                                   : epsilon_of(dtype) / 2 * std::abs(y) + 1e-5 * static_cast<double>(std));
    }
  }
  return {out};
}

inline void add_optimizer_cases(std::vector<OpCase>& cases) {
  using enum DType;
  for (const AdamWCase& c : {AdamWCase{kF32, kF32, kF32}, AdamWCase{kF32, kF32, kF32, false, 61},
                             AdamWCase{kBF16, kF32, kF32, true}, AdamWCase{kBF16, kBF16, kBF16},
                             AdamWCase{kBF16, kBF16, kBF16, true}, AdamWCase{kF32, kBF16, kBF16},
                             AdamWCase{kF32, kF32, kF32, true}, AdamWCase{kF32, kF32, kU8, false, 40960},
                             AdamWCase{kBF16, kBF16, kU8, false, 256}, AdamWCase{kBF16, kBF16, kU8, true, 17664},
                             AdamWCase{kBF16, kF32, kU8, false, 40960}}) {
    cases.push_back({"adamw_" + dtype_tag(c.weight) + "_grad_" + dtype_tag(c.grad) + "_moments_" +
                         dtype_tag(c.moment) + (c.master ? "_master" : "") + "_" + std::to_string(c.size),
                     c.weight, [=](OpFixture& f) { return run_adamw(f, c); }});
  }
  for (const DType dtype : {kF32, kBF16}) {
    for (const std::int64_t n : {std::int64_t{3}, std::int64_t{1000}, std::int64_t{70001}}) {
      cases.push_back({"sum_of_squares_" + dtype_tag(dtype) + "_" + std::to_string(n), dtype,
                       [=](OpFixture& f) { return run_sum_of_squares(f, dtype, n); }});
    }
  }
  const auto control = [&](const char* name, double sum, double denominator, float limit) {
    cases.push_back({std::string("step_control_") + name, kF32,
                     [=](OpFixture& f) { return run_step_control(f, sum, denominator, limit); }});
  };
  control("below_limit", 4.0, 8.0, 1.0f);
  control("clipped", 1e8, 10.0, 0.5f);
  control("no_limit", 1e8, 10.0, 0.0f);
  control("no_gradient", 0.0, 10.0, 1.0f);
  control("no_targets", 0.0, 0.0, 1.0f);
  control("infinite", INFINITY, 10.0, 1.0f);
  control("not_a_number", NAN, 10.0, 1.0f);
  for (const DType dtype : float_types()) {
    cases.push_back({"fill_normal_" + dtype_tag(dtype), dtype, [=](OpFixture& f) { return run_fill_normal(f, dtype, 0.25f, 0.02f); }});
    cases.push_back({"fill_constant_" + dtype_tag(dtype), dtype, [=](OpFixture& f) { return run_fill_normal(f, dtype, 1.0f, 0.0f); }});
  }
}

}  // namespace tessera::test
