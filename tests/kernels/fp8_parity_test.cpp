// The FP8 passes and products of the CUDA backend against the CPU backend at the widths of real
// models, where many tiles and the library's large kernels are taken (cases/quantize_cases.h covers
// the corners).
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "kernels/quantize.h"
#include "tests/support/op_fixture.h"

namespace tessera::test {
namespace {

class Fp8Parity : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

struct Copies {
  Values amax, row, column, scale;
};

Copies cast(OpFixture& f, std::int64_t rows, std::int64_t cols, DType format) {
  const Values in = rounded(normal_values(rows * cols, 3, 0.7), DType::kBF16);
  Quantize args;
  args.in = f.input(in, DType::kBF16, Shape{rows, cols});
  args.amax = f.input({0}, DType::kF32, Shape{1});
  f.run(amax, Amax{args.in, args.amax});
  args.row = f.output(format, Shape{rows, cols});
  args.column = f.output(format, Shape{cols, fp8_depth(rows)});
  args.scale = f.output(DType::kF32, Shape{1});
  f.run(quantize, args);
  return {f.values(args.amax), f.values(args.row), f.values(args.column), f.values(args.scale)};
}

TEST_F(Fp8Parity, CastsAreTheCpusToTheBit) {
  for (const auto& [rows, cols, format] :
       std::vector<std::tuple<std::int64_t, std::int64_t, DType>>{{1024, 4096, DType::kF8E4M3},
                                                                  {777, 1536, DType::kF8E5M2},
                                                                  {333, 2000, DType::kF8E4M3}}) {
    OpFixture cpu, gpu(Device{DeviceKind::kCuda, 0});
    const Copies want = cast(cpu, rows, cols, format);
    const Copies got = cast(gpu, rows, cols, format);
    expect_bitwise("amax", got.amax, want.amax);
    expect_bitwise("scale", got.scale, want.scale);
    expect_bitwise("row", got.row, want.row);
    expect_bitwise("column", got.column, want.column);
  }
}

struct BlockCopies {
  Values row, row_scale, column, column_scale;
};

BlockCopies cast_blocks(OpFixture& f, std::int64_t rows, std::int64_t cols, DType format,
                        ScaleMode mode) {
  const Values in = rounded(normal_values(rows * cols, 3, 0.7), DType::kBF16);
  QuantizeBlocks args;
  args.mode = mode;
  args.in = f.input(in, DType::kBF16, Shape{rows, cols});
  args.row = f.output(format, Shape{rows, cols});
  args.row_scale = f.output(DType::kF32, scale_shape(mode, rows, cols));
  args.column = f.output(format, Shape{cols, fp8_depth(rows)});
  args.column_scale = f.output(DType::kF32, scale_shape(mode, cols, fp8_depth(rows)));
  f.run(quantize_blocks, args);
  return {f.values(args.row), f.values(args.row_scale), f.values(args.column),
          f.values(args.column_scale)};
}

TEST_F(Fp8Parity, BlockCastsAreTheCpusToTheBit) {
  for (const ScaleMode mode : {ScaleMode::kVector, ScaleMode::kBlock}) {
    for (const auto& [rows, cols, format] :
         std::vector<std::tuple<std::int64_t, std::int64_t, DType>>{{1024, 4096, DType::kF8E4M3},
                                                                    {777, 1536, DType::kF8E5M2},
                                                                    {333, 2000, DType::kF8E4M3}}) {
      OpFixture cpu, gpu(Device{DeviceKind::kCuda, 0});
      const BlockCopies want = cast_blocks(cpu, rows, cols, format, mode);
      const BlockCopies got = cast_blocks(gpu, rows, cols, format, mode);
      expect_bitwise("row_scale", got.row_scale, want.row_scale);
      expect_bitwise("column_scale", got.column_scale, want.column_scale);
      expect_bitwise("row", got.row, want.row);
      expect_bitwise("column", got.column, want.column);
    }
  }
}

struct Product {
  DType a, c;
  std::int64_t m, n, k;
  bool accumulate, fast;
};

Values multiply(OpFixture& f, const Product& p) {
  Gemm args;
  args.a = f.input(rounded(normal_values(p.m * p.k, 1, 30), p.a), p.a, Shape{p.m, p.k});
  args.b = f.input(rounded(normal_values(p.n * p.k, 2, 30), DType::kF8E4M3), DType::kF8E4M3,
                   Shape{p.n, p.k});
  args.c = f.input(rounded(normal_values(p.m * p.n, 4), p.c), p.c, Shape{p.m, p.n});
  args.transpose_b = true;
  args.accumulate = p.accumulate;
  args.scale_a = f.input({1e-3}, DType::kF32, Shape{1});
  args.scale_b = f.input({3e-2}, DType::kF32, Shape{1});
  args.fast_accumulation = p.fast;
  f.run(gemm, args);
  return f.values(args.c);
}

struct BlockProduct {
  DType a, c;
  ScaleMode mode_b;  // a's is kVector
  std::int64_t m, n, k;
  bool accumulate;
};

Values multiply_blocks(OpFixture& f, const BlockProduct& p) {
  const auto operand = [&](std::int64_t rows, std::uint64_t seed, DType format, ScaleMode mode) {
    QuantizeBlocks cast;
    cast.mode = mode;
    cast.in = f.input(rounded(normal_values(rows * p.k, seed, 0.3), DType::kBF16), DType::kBF16,
                      Shape{rows, p.k});
    cast.row = f.output(format, Shape{rows, p.k});
    cast.row_scale = f.output(DType::kF32, scale_shape(mode, rows, p.k));
    f.run(quantize_blocks, cast);
    return cast;
  };
  const QuantizeBlocks a = operand(p.m, 1, p.a, ScaleMode::kVector);
  const QuantizeBlocks b = operand(p.n, 2, DType::kF8E4M3, p.mode_b);
  Gemm args;
  args.a = a.row;
  args.b = b.row;
  args.c = f.input(rounded(normal_values(p.m * p.n, 4), p.c), p.c, Shape{p.m, p.n});
  args.transpose_b = true;
  args.accumulate = p.accumulate;
  args.scale_mode_a = a.mode;
  args.scale_mode_b = b.mode;
  args.scale_a = a.row_scale;
  args.scale_b = b.row_scale;
  f.run(gemm, args);
  return f.values(args.c);
}

// Forward, gradient of the input, gradient of the weight; the last has rows that the library does
// not take, so its operands are decoded.
TEST_F(Fp8Parity, ProductsWithBlockScalesLieWithinTheTensorCoresPrecision) {
  const DType e4m3 = DType::kF8E4M3, e5m2 = DType::kF8E5M2, bf16 = DType::kBF16, fp32 = DType::kF32;
  const ScaleMode vector = ScaleMode::kVector, block = ScaleMode::kBlock;
  for (const BlockProduct& p :
       std::vector<BlockProduct>{{e4m3, bf16, block, 512, 1024, 4096, false},
                                 {e5m2, bf16, block, 384, 1024, 2048, false},
                                 {e4m3, bf16, vector, 1024, 768, 2048, true},
                                 {e4m3, fp32, vector, 1024, 768, 2048, true},
                                 {e5m2, fp32, vector, 1024, 768, 2048, true},
                                 {e5m2, bf16, vector, 1024, 768, 2064, true},
                                 {e4m3, bf16, block, 509, 1024, 4096, false}}) {
    OpFixture cpu(Device{}, 2), gpu(Device{DeviceKind::kCuda, 0}),
        again(Device{DeviceKind::kCuda, 0});
    const Values want = multiply_blocks(cpu, p);
    const Values got = multiply_blocks(gpu, p);
    expect_bitwise("repeated", multiply_blocks(again, p), got);
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      difference += (got[i] - want[i]) * (got[i] - want[i]);
      size += want[i] * want[i];
    }
    const double error = std::sqrt(difference / size);
    const double bound = 0x1p-13 * 2 * 8 + (p.c == bf16 ? epsilon_of(bf16) / 2 : 1e-6);
    std::printf("  %s x e4m3 (%s) -> %s, m %lld k %lld%s: error %.2e, bound %.2e\n",
                std::string(name_of(p.a)).c_str(), p.mode_b == block ? "block" : "vector",
                std::string(name_of(p.c)).c_str(), static_cast<long long>(p.m),
                static_cast<long long>(p.k), p.accumulate ? ", added" : "", error, bound);
    EXPECT_LE(error, bound);
  }
}

// Tensor cores cut each instruction's terms at about 2^-13 of the largest; with fast accumulation
// also the sum so far, k / 32 times. The cuts of many instructions add up like a random walk.
TEST_F(Fp8Parity, ProductsLieWithinTheTensorCoresPrecision) {
  const DType e4m3 = DType::kF8E4M3, e5m2 = DType::kF8E5M2, bf16 = DType::kBF16, fp32 = DType::kF32;
  for (const Product& p : std::vector<Product>{{e4m3, bf16, 512, 1024, 4096, false, true},
                                               {e4m3, bf16, 512, 1024, 4096, false, false},
                                               {e5m2, bf16, 384, 1024, 2048, false, false},
                                               {e5m2, fp32, 1024, 768, 2048, true, false},
                                               {e5m2, bf16, 1024, 768, 2048, true, true}}) {
    OpFixture cpu(Device{}, 2), gpu(Device{DeviceKind::kCuda, 0}),
        again(Device{DeviceKind::kCuda, 0});
    const Values want = multiply(cpu, p);
    const Values got = multiply(gpu, p);
    expect_bitwise("repeated", multiply(again, p), got);
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      difference += (got[i] - want[i]) * (got[i] - want[i]);
      size += want[i] * want[i];
    }
    const double error = std::sqrt(difference / size);
    const double cuts = 0x1p-13 * std::sqrt(static_cast<double>(p.fast ? p.k / 32 : 4)) * 8;
    const double bound = cuts + (p.c == bf16 ? epsilon_of(bf16) / 2 : 1e-6);
    std::printf("  %s x e4m3 -> %s, k %lld%s%s: error %.2e, bound %.2e\n",
                std::string(name_of(p.a)).c_str(), std::string(name_of(p.c)).c_str(),
                static_cast<long long>(p.k), p.accumulate ? ", added" : "", p.fast ? ", fast" : "",
                error, bound);
    EXPECT_LE(error, bound);
  }
}

}  // namespace
}  // namespace tessera::test
