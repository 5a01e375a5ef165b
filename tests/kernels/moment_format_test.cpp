// 8-bit moments: the codes as numbers, their rounding, and Adam with them beside Adam in fp32.
#include "kernels/moment_format.h"

#include <gtest/gtest.h>

#include "kernels/step_control.h"
#include "tests/kernels/cases/optimizer_cases.h"
#include "tests/support/op_fixture.h"

namespace tessera::test {
namespace {

TEST(MomentFormat, CodesAreTheNumbersOfTheFormat) {
  EXPECT_EQ(decode_m(0), 0.0f);
  EXPECT_EQ(decode_m(0x01), 0x1p-17f);
  EXPECT_EQ(decode_m(0x08), 0x1p-14f);
  EXPECT_EQ(decode_m(0x78), 1.0f);
  EXPECT_EQ(decode_m(0x7f), 1.875f);
  EXPECT_EQ(decode_m(0xff), -1.875f);
  EXPECT_EQ(decode_v(0x01), 0x1p-33f);
  EXPECT_EQ(decode_v(0x08), 0x1p-30f);
  EXPECT_EQ(decode_v(0xff), 1.875f);
  for (int code = 1; code < 256; ++code) {
    EXPECT_GT(decode_v(static_cast<std::uint8_t>(code)), decode_v(static_cast<std::uint8_t>(code - 1)));
    if (code < 128) {
      EXPECT_GT(decode_m(static_cast<std::uint8_t>(code)), decode_m(static_cast<std::uint8_t>(code - 1)));
    }
  }
}

// What checkpoints rely on: a number of the format under any scale is a bf16 number, and gets its code
// again whatever the noise.
TEST(MomentFormat, NumbersOfTheFormatStayWhatTheyAre) {
  for (const int exponent : {kLeastMomentScale, -37, -1, 0, 5, 100}) {
    const float scale = std::ldexp(1.0f, exponent);
    for (int i = 0; i < 256; ++i) {
      const auto code = static_cast<std::uint8_t>(i);
      for (const float value : {decode_m(code) * scale, decode_v(code) * scale}) {
        EXPECT_EQ(static_cast<float>(bf16(value)), value);
      }
      for (const std::uint32_t noise : {0u, kMomentNearest, 0xffffffffu}) {
        if (i != 0x80) {  // -0 is 0
          EXPECT_EQ(encode_m(decode_m(code) * scale * inverse_moment_scale(scale), noise), code);
        }
        EXPECT_EQ(encode_v(decode_v(code) * scale * inverse_moment_scale(scale), noise), code);
      }
    }
  }
}

TEST(MomentFormat, ScalesBringTheLargestIntoTheFormat) {
  for (const float largest : {1e-30f, 0.3f, 0.9374f, 0.9376f, 1.0f, 1.874f, 1.875f, 1.876f, 2.0f, 3e7f}) {
    const float scale = moment_scale(largest);
    EXPECT_LE(largest / scale, 1.875f) << largest;
    if (scale > std::ldexp(1.0f, kLeastMomentScale)) {
      EXPECT_GT(largest / scale, 1.875f / 2) << largest;
    }
    // The scale of what the largest was rounded to is the same.
    const float rounded = decode_v(encode_v(largest * inverse_moment_scale(scale), 0)) * scale;
    if (rounded >= 0.9376f * scale) {
      EXPECT_EQ(moment_scale(rounded), scale) << largest;
    }
  }
  EXPECT_EQ(moment_scale(0.0f), 0.0f);
  EXPECT_EQ(encode_m(5.0f * inverse_moment_scale(0.0f), 7), 0);
  EXPECT_EQ(encode_v(1e30f, 0), 0xff);
}

TEST(MomentFormat, RoundingIsUnbiased) {
  const PhiloxKey key = derive_key(7, RandomPurpose::kStochasticRounding, 3);
  const int draws = 40000;
  for (const float value : {1.1f, 0.4444f, 0x1.23p-9f, 0x1.8p-14f, 0x1.9p-16f, 0x1.1p-18f}) {
    double m = 0, v = 0;
    for (int i = 0; i < draws; ++i) {
      const RoundingNoise noise = rounding_noise(key, static_cast<std::uint64_t>(i));
      m += decode_m(encode_m(value, noise.m)) / draws;
      v += decode_v(encode_v(value, noise.v)) / draws;
    }
    // Five standard errors of a draw between neighbours a step apart; the noise has 20 bits.
    const double m_step = std::max(static_cast<double>(value) / 8, 0x1p-17), v_step = static_cast<double>(value) / 8;
    EXPECT_NEAR(m, value, 5 * m_step / 2 / std::sqrt(draws)) << value;
    EXPECT_NEAR(v, value, 5 * v_step / 2 / std::sqrt(draws)) << value;
  }
}

struct Adam {
  Tensor weight, grad, m, v, m_scale, v_scale, segments, control;
};

Adam start(OpFixture& f, std::int64_t n, DType moments) {
  Adam adam;
  ShardSegment segment;
  segment.end = segment.local_cols = segment.global_cols = n;
  const Values zeros(static_cast<std::size_t>(n), 0.0);
  adam.weight = f.input(normal_values(n, 1), DType::kF32, Shape{n});
  adam.grad = f.input(zeros, DType::kF32, Shape{n});
  adam.m = f.input(zeros, moments, Shape{n});
  adam.v = f.input(zeros, moments, Shape{n});
  if (moments == DType::kU8) {
    const Values scales(static_cast<std::size_t>(n / kMomentBlock), 0.0);
    adam.m_scale = f.input(scales, DType::kF32, Shape{n / kMomentBlock});
    adam.v_scale = f.input(scales, DType::kF32, Shape{n / kMomentBlock});
  }
  adam.segments = f.bytes_of(std::vector<ShardSegment>{segment});
  adam.control = f.bytes_of(std::vector<StepControl>{StepControl{}});
  return adam;
}

void step(OpFixture& f, const Adam& adam, const Values& grad, int number, float beta2) {
  StepControl control;
  control.learning_rate = 1e-2f;
  control.adam_step = number;
  control.grad_scale = 1.0f;
  control.is_finite = control.has_targets = 1;
  control.rounding_key = derive_key(3, RandomPurpose::kStochasticRounding, static_cast<std::uint64_t>(number));
  f.write(adam.control, [&] {
    Values bytes(sizeof control);
    const auto* raw = reinterpret_cast<const unsigned char*>(&control);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = raw[i];
    return bytes;
  }());
  f.write(adam.grad, grad);
  AdamW args;
  args.weight = adam.weight, args.grad = adam.grad, args.m = adam.m, args.v = adam.v;
  args.m_scale = adam.m_scale, args.v_scale = adam.v_scale;
  args.segments = adam.segments, args.control = adam.control;
  args.beta2 = beta2;
  f.run(adamw, args);
}

// A noisy quadratic bowl whose directions differ by three decades in curvature within a block. With
// moments of 8 bits it is descended as with fp32: rounding makes an update's direction about 13%
// noise (8% from m, half of 20% from v), and noise of relative size r costs r^2 of the progress.
TEST(MomentFormat, AdamDescendsAsInFp32) {
  const std::int64_t n = 2 * kMomentBlock;
  for (const float beta2 : {0.95f, 0.999f}) {
    std::vector<double> losses[2];
    for (const DType moments : {DType::kF32, DType::kU8}) {
      OpFixture f;
      const Adam adam = start(f, n, moments);
      for (int number = 1; number <= 300; ++number) {
        const Values noise = normal_values(n, static_cast<std::uint64_t>(100 + number), 0.3);
        const Values weight = f.values(adam.weight);
        Values grad(weight.size());
        double loss = 0;
        for (std::size_t i = 0; i < weight.size(); ++i) {
          const double curvature = std::pow(10.0, -3.0 * static_cast<double>(i % kMomentBlock) / kMomentBlock);
          grad[i] = curvature * (weight[i] + noise[i]);
          // Adam does not see curvature, so nor does the measure of what is left.
          loss += weight[i] * weight[i] / static_cast<double>(n);
        }
        losses[moments == DType::kU8 ? 1 : 0].push_back(loss);
        step(f, adam, grad, number, beta2);
      }
    }
    EXPECT_LT(losses[0].back(), 0.1 * losses[0].front());
    for (std::size_t i = 0; i < losses[0].size(); ++i) {
      EXPECT_NEAR(losses[1][i], losses[0][i], 0.03 * losses[0][i] + 0.002) << beta2 << " step " << i;
    }
  }
}

// Blocks decide the codes, so any cut between blocks gives the same bits.
TEST(MomentFormat, CutsBetweenBlocksChangeNothing) {
  const std::int64_t n = 3 * kMomentBlock;
  OpFixture f;
  const Adam whole = start(f, n, DType::kU8);
  const Values first = normal_values(n, 5), second = normal_values(n, 6);
  step(f, whole, first, 1, 0.95f);
  step(f, whole, second, 2, 0.95f);
  const Values weight = normal_values(n, 1);
  for (std::int64_t begin = 0; begin < n; begin += kMomentBlock) {
    const auto part = [&](const Values& values) {
      return Values(values.begin() + begin, values.begin() + begin + kMomentBlock);
    };
    Adam piece = start(f, kMomentBlock, DType::kU8);
    f.write(piece.weight, part(weight));
    ShardSegment segment;
    segment.end = kMomentBlock;
    segment.local_begin = begin;
    segment.local_cols = segment.global_cols = n;
    piece.segments = f.bytes_of(std::vector<ShardSegment>{segment});
    step(f, piece, part(first), 1, 0.95f);
    step(f, piece, part(second), 2, 0.95f);
    expect_bitwise("weight", f.values(piece.weight), part(f.values(whole.weight)));
    expect_bitwise("m", f.values(piece.m), part(f.values(whole.m)));
    expect_bitwise("v", f.values(piece.v), part(f.values(whole.v)));
  }
}

TEST(MomentFormat, AdamRefusesHalfABlockAndScalesWithoutCodes) {
  OpFixture f;
  AdamW args;
  args.grad = f.input(Values(300, 0.0), DType::kF32, Shape{300});
  args.weight = f.input(Values(300, 0.0), DType::kF32, Shape{300});
  args.m = f.input(Values(300, 0.0), DType::kU8, Shape{300});
  args.v = f.input(Values(300, 0.0), DType::kU8, Shape{300});
  EXPECT_THROW(f.run(adamw, args), Error);
}

}  // namespace
}  // namespace tessera::test
