// What the op cases cannot say: skipped steps, layout independence and unbiasedness of stochastic rounding.
#include <gtest/gtest.h>

#include "kernels/step_control.h"
#include "tests/support/op_fixture.h"

namespace tessera::test {
namespace {

struct Shard {
  Tensor weight, master, grad, m, v, segments, control;
};

AdamW arguments(const Shard& s) {
  AdamW args;
  args.weight = s.weight, args.master = s.master, args.grad = s.grad;
  args.m = s.m, args.v = s.v;
  args.segments = s.segments, args.control = s.control;
  return args;
}

StepControl applied_step() {
  StepControl control;
  control.learning_rate = 1e-3f;
  control.adam_step = 1;
  control.grad_scale = 1.0f;
  control.is_finite = control.has_targets = 1;
  control.rounding_key = derive_key(3, RandomPurpose::kStochasticRounding, 1);
  return control;
}

ShardSegment whole(std::int64_t n) {
  ShardSegment s;
  s.end = n;
  s.local_cols = s.global_cols = n;
  return s;
}

Shard make_shard(OpFixture& f, DType dtype, const Values& weight, const Values& grad,
                 const std::vector<ShardSegment>& segments, const StepControl& control) {
  const Shape shape{static_cast<std::int64_t>(weight.size())};
  Shard s;
  s.weight = f.input(weight, dtype, shape);
  s.grad = f.input(grad, dtype, shape);
  s.m = f.input(Values(weight.size(), 0.0), dtype, shape);
  s.v = f.input(Values(weight.size(), 0.0), dtype, shape);
  s.segments = f.bytes_of(segments);
  s.control = f.bytes_of(std::vector<StepControl>{control});
  return s;
}

TEST(AdamW, ChangesNothingWhenTheStepIsSkipped) {
  for (const bool is_finite : {false, true}) {
    StepControl control = applied_step();
    control.is_finite = is_finite;
    control.has_targets = !is_finite;
    OpFixture f;
    const Values weight = normal_values(50, 1);
    Values grad = normal_values(50, 2);
    if (!is_finite) grad[7] = NAN;
    const Shard s = make_shard(f, DType::kF32, weight, grad, {whole(50)}, control);
    f.run(adamw, arguments(s));
    expect_bitwise("weight", f.values(s.weight), rounded(weight, DType::kF32));
    expect_bitwise("m", f.values(s.m), Values(50, 0.0));
    expect_bitwise("v", f.values(s.v), Values(50, 0.0));
  }
}

// What is not finite in a gradient, or in the number of targets, runs through the norm into the control, and the step
// becomes a no-op that is told apart from a step without targets.
void expect_skipped_as_not_finite(double last_gradient, double denominator) {
  OpFixture f;
  const Values weight = normal_values(50, 1);
  Values grad = normal_values(50, 2);
  grad[49] = last_gradient;
  StepControl control;
  control.learning_rate = 1.0f;
  control.max_grad_norm = 1.0f;
  const Shard s = make_shard(f, DType::kF32, weight, grad, {whole(50)}, control);
  const Tensor sum = f.input({0.0}, DType::kF64, Shape{1});
  f.run(sum_of_squares, SumOfSquares{s.grad, s.segments, sum});
  f.run(step_control_finish, StepControlFinish{s.control, sum, f.input({denominator}, DType::kF64, Shape{1})});
  f.run(adamw, arguments(s));
  const auto result = f.object<StepControl>(s.control);
  EXPECT_EQ(result.is_finite, 0);
  EXPECT_EQ(result.has_targets, 1);
  EXPECT_EQ(result.adam_step, 0);
  expect_bitwise("weight", f.values(s.weight), rounded(weight, DType::kF32));
}
TEST(AdamW, IsSkippedByWhatIsNotFinite) {
  expect_skipped_as_not_finite(INFINITY, 5.0);
  expect_skipped_as_not_finite(NAN, 5.0);
  expect_skipped_as_not_finite(1.0, NAN);
}

// The first step of Adam moves every weight by lr / (1 + eps / |g|) against its gradient's sign.
TEST(AdamW, FirstStepMovesByTheLearningRate) {
  OpFixture f;
  const Shard s = make_shard(f, DType::kF32, {1.0, 1.0, -2.0}, {0.5, -3.0, 1e-3}, {whole(3)}, applied_step());
  f.run(adamw, arguments(s));
  expect_close("weight", f.values(s.weight), {1.0 - 1e-3, 1.0 + 1e-3, -2.0 - 1e-3}, {2e-7, 2e-7, 5e-7});
}

// A decay-exempt parameter with a zero gradient keeps its bits; another one shrinks.
TEST(AdamW, DecaysOnlyWhereTheSegmentSays) {
  OpFixture f;
  std::vector<ShardSegment> segments{whole(4), whole(4)};
  segments[0].end = 2;
  segments[1].begin = 2;
  segments[1].weight_decay = 0.1f;
  const Shard s = make_shard(f, DType::kF32, {1.5, -2.0, 1.5, -2.0}, Values(4, 0.0), segments, applied_step());
  f.run(adamw, arguments(s));
  expect_close("weight", f.values(s.weight), {1.5, -2.0, 1.5 * (1 - 1e-4), -2.0 * (1 - 1e-4)},
               {0.0, 0.0, 4e-7, 4e-7});
}

// Updates far below half a bf16 step vanish with rounding to nearest; on average they must not.
TEST(AdamW, StochasticRoundingIsUnbiased) {
  const std::int64_t n = 60000;
  StepControl control = applied_step();
  control.learning_rate = 1e-4f;
  OpFixture f;
  const Shard s = make_shard(f, DType::kBF16, Values(static_cast<std::size_t>(n), 1.0),
                             Values(static_cast<std::size_t>(n), 1.0), {whole(n)}, control);
  f.run(adamw, arguments(s));
  const double spacing = 0x1p-8;  // of bf16 below 1
  double moved_down = 0, mean_m = 0;
  for (const double w : f.values(s.weight)) {
    ASSERT_TRUE(w == 1.0 || w == 1.0 - spacing) << w;
    moved_down += w < 1.0;
  }
  for (const double m : f.values(s.m)) mean_m += m / static_cast<double>(n);
  // Binomial: five standard deviations around n * update / spacing.
  const double p = 1e-4 / spacing, sigma = std::sqrt(static_cast<double>(n) * p * (1 - p));
  EXPECT_NEAR(moved_down, static_cast<double>(n) * p, 5 * sigma);
  // m = 0.1 lies between two bf16 numbers 2^-11 apart: its mean is off by at most spacing / (2 sqrt n).
  EXPECT_NEAR(mean_m, 0.1, 5 * 0x1p-11 / 2 / std::sqrt(static_cast<double>(n)));
}

// A [rows, cols] parameter updated whole, and in two column pieces each cut into two shards.
TEST(AdamW, StochasticRoundingDoesNotDependOnTheLayout) {
  const std::int64_t rows = 30, cols = 14;
  const Values weight = normal_values(rows * cols, 1), grad = normal_values(rows * cols, 2);
  const StepControl control = applied_step();
  OpFixture f;
  ShardSegment all = whole(rows * cols);
  all.local_cols = all.global_cols = cols;
  all.stream = 9;
  const Shard reference = make_shard(f, DType::kBF16, weight, grad, {all}, control);
  f.run(adamw, arguments(reference));
  const Values want = f.values(reference.weight), want_m = f.values(reference.m), want_v = f.values(reference.v);
  for (const auto& [first_col, width] : {std::pair<std::int64_t, std::int64_t>{0, 5}, {5, 9}}) {
    const std::int64_t local = rows * width, cut = local / 2 + 1;
    for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{0, cut}, {cut, local}}) {
      Values w, g;
      std::vector<std::size_t> global;
      for (std::int64_t l = begin; l < end; ++l) {
        global.push_back(static_cast<std::size_t>(l / width * cols + first_col + l % width));
        w.push_back(weight[global.back()]);
        g.push_back(grad[global.back()]);
      }
      ShardSegment piece;
      piece.end = end - begin;
      piece.local_begin = begin;
      piece.local_cols = width;
      piece.global_cols = cols;
      piece.global_begin = first_col;
      piece.stream = 9;
      const Shard s = make_shard(f, DType::kBF16, w, g, {piece}, control);
      f.run(adamw, arguments(s));
      Values part, part_m, part_v;
      for (const std::size_t i : global) {
        part.push_back(want[i]);
        part_m.push_back(want_m[i]);
        part_v.push_back(want_v[i]);
      }
      expect_bitwise("weight", f.values(s.weight), part);
      expect_bitwise("m", f.values(s.m), part_m);
      expect_bitwise("v", f.values(s.v), part_v);
    }
  }
}

TEST(AdamW, NoiseDiffersByParameterAndStep) {
  const StepControl control = applied_step();
  const Values weight(400, 1.0), grad = normal_values(400, 2);
  OpFixture f;
  const auto update = [&](std::int32_t stream, std::uint32_t step) {
    ShardSegment s = whole(400);
    s.stream = stream;
    StepControl c = control;
    c.rounding_key.step = step;
    const Shard shard = make_shard(f, DType::kBF16, weight, grad, {s}, c);
    f.run(adamw, arguments(shard));
    return f.values(shard.m);
  };
  EXPECT_EQ(update(1, 1), update(1, 1));
  EXPECT_NE(update(1, 1), update(2, 1));
  EXPECT_NE(update(1, 1), update(1, 2));
}

TEST(AdamW, RefusesSegmentsOutsideTheShard) {
  OpFixture f;
  ShardSegment s = whole(5);
  const Shard shard = make_shard(f, DType::kF32, Values(4, 1.0), Values(4, 1.0), {s}, applied_step());
  EXPECT_THROW(f.run(adamw, arguments(shard)), Error);
}

// The same element whichever piece of the parameter it is drawn for.
TEST(FillNormal, DoesNotDependOnTheLayout) {
  OpFixture f;
  const PhiloxKey key = derive_key(1, RandomPurpose::kInit, 0, 2);
  const auto fill = [&](std::int64_t rows, std::int64_t cols, std::int64_t row, std::int64_t col) {
    FillNormal args{f.output(DType::kF32, Shape{rows, cols}), key, row, col, 11, 0.0f, 1.0f};
    f.run(fill_normal, args);
    return f.values(args.out);
  };
  const Values all = fill(9, 11, 0, 0), piece = fill(4, 5, 3, 6);
  for (std::int64_t i = 0; i < 4; ++i) {
    for (std::int64_t j = 0; j < 5; ++j) {
      EXPECT_EQ(piece[static_cast<std::size_t>(i * 5 + j)], all[static_cast<std::size_t>((i + 3) * 11 + j + 6)]);
    }
  }
}

TEST(FillNormal, HasTheMomentsOfANormalDistribution) {
  OpFixture f;
  const std::int64_t n = 100000;
  FillNormal args{f.output(DType::kF32, Shape{n}), derive_key(1, RandomPurpose::kInit), 0, 0, n, 0.5f, 2.0f};
  f.run(fill_normal, args);
  double mean = 0, square = 0, fourth = 0;
  for (const double x : f.values(args.out)) {
    const double z = (x - 0.5) / 2;
    mean += z, square += z * z, fourth += z * z * z * z;
  }
  // Five standard errors of each moment of n standard normal draws.
  const double root = std::sqrt(static_cast<double>(n));
  EXPECT_NEAR(mean / static_cast<double>(n), 0, 5 / root);
  EXPECT_NEAR(square / static_cast<double>(n), 1, 5 * std::sqrt(2.0) / root);
  EXPECT_NEAR(fourth / static_cast<double>(n), 3, 5 * std::sqrt(96.0) / root);
}

}  // namespace
}  // namespace tessera::test
