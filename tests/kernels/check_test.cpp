// check() refuses wrong arguments with a message that names the op, the argument, what it is and
// what was expected; and accepts what the contracts allow.
#include <gtest/gtest.h>

#include "kernels/check.h"
#include "kernels/ops.h"
#include "kernels/step_control.h"
#include "tests/support/expect_error.h"

namespace tessera::test {
namespace {

// Memory of the test's tensors; never read.
alignas(256) unsigned char memory[1 << 16];

Tensor tensor(Shape shape, DType dtype = DType::kF32, std::size_t offset = 0) {
  return Tensor(memory + offset, dtype, shape, Device{});
}
Tensor meta(Shape shape, DType dtype = DType::kF32) {
  return Tensor(nullptr, dtype, shape, Device{DeviceKind::kMeta, 0});
}

template <typename Arguments>
void expect_refused(std::initializer_list<std::string_view> parts, const Arguments& args) {
  expect_error(ErrorKind::kInternal, parts, [&] { check(args); });
}

TEST(Check, NamesTheShapeThatWasExpected) {
  RmsNormForward args;
  args.x = meta({8192, 2048});
  args.weight = meta({4096});
  args.out = meta({8192, 2048});
  expect_refused({"[rmsnorm_forward] weight is [4096], expected [2048] to match x [8192, 2048]"},
                 args);
}

TEST(Check, NamesMissingWrongTypedAndMisplacedTensors) {
  RmsNormForward args;
  expect_refused({"[rmsnorm_forward] x is missing"}, args);
  args.x = meta({4, 8});
  args.weight = meta({8}, DType::kBF16);
  args.out = meta({4, 8});
  expect_refused({"weight is bf16, expected fp32"}, args);
  args.weight = tensor({8});
  expect_refused({"weight is on cpu, expected meta like x"}, args);
  args.weight = meta({8});
  args.delta = meta({4, 8});
  expect_refused({"delta and sum belong together"}, args);
  args.sum = args.x;
  EXPECT_NO_THROW(check(args));
  args.rstd = meta({4}, DType::kBF16);
  expect_refused({"rstd is bf16, expected fp32"}, args);
}

TEST(Check, RefusesMemoryThatIsMissingMisalignedOrTooNarrow) {
  SwiGluForward args{tensor({4, 16}), tensor({4, 8}, DType::kF32, 4096)};
  EXPECT_NO_THROW(check(args));
  args.out.data = nullptr;
  expect_refused({"[swiglu_forward] out fp32 [4, 8] on cpu has no memory"}, args);
  args.out.data = memory + 4098;
  expect_refused({"out", "not aligned to its elements"}, args);
  args.out = tensor({4, 8}, DType::kF32, 4096);
  args.out.row_stride = 7;
  expect_refused({"out [4, 8] has row stride 7, expected at least 8"}, args);
}

TEST(Check, FindsOverlap) {
  SwiGluForward args{tensor({4, 16}), tensor({4, 8}, DType::kF32, 128)};
  expect_refused({"[swiglu_forward] out shares memory with gate_up"}, args);
  // The left half of a wider matrix beside its right half.
  Tensor wide = tensor({4, 24});
  args.gate_up = wide.col_slice(0, 16);
  args.out = wide.col_slice(16, 8);
  EXPECT_NO_THROW(check(args));
  args.out = wide.col_slice(15, 8);
  expect_refused({"out shares memory with gate_up"}, args);
  SwiGluBackward backward{tensor({4, 8}, DType::kF32, 8192), tensor({4, 16}), tensor({4, 16})};
  EXPECT_NO_THROW(check(backward));
  backward.dgate_up = tensor({4, 16}, DType::kF32, 4);
  expect_refused({"dgate_up overlaps gate_up without being the same view"}, backward);
}

TEST(Overlap, KnowsInterleavedColumns) {
  const Tensor wide = tensor({6, 30});
  EXPECT_FALSE(overlaps(wide.col_slice(0, 10), wide.col_slice(10, 20)));
  EXPECT_FALSE(overlaps(wide.col_slice(10, 20), wide.col_slice(0, 10)));
  EXPECT_TRUE(overlaps(wide.col_slice(0, 11), wide.col_slice(10, 5)));
  EXPECT_TRUE(overlaps(wide.col_slice(10, 5), wide.col_slice(0, 11)));
  EXPECT_FALSE(overlaps(wide.row_slice(0, 2), wide.row_slice(2, 4)));
  EXPECT_FALSE(overlaps(wide.col_slice(20, 10), wide.row_slice(2, 1).col_slice(0, 20)));
  EXPECT_TRUE(overlaps(wide.col_slice(20, 10), wide.row_slice(2, 1).col_slice(0, 21)));
  EXPECT_FALSE(overlaps(wide, meta({6, 30})));
  EXPECT_FALSE(overlaps(wide, tensor({0, 30})));
}

TEST(Check, GemmNamesBothOperands) {
  Gemm args{meta({4, 8}), meta({9, 5}), meta({4, 5})};
  expect_refused({"[gemm] b is [9, 5], expected inner size 8 to match a [4, 8]"}, args);
  args.b = meta({8, 5});
  EXPECT_NO_THROW(check(args));
  args.transpose_a = true;
  expect_refused({"expected inner size 4 to match a [4, 8] transposed"}, args);
  args.transpose_a = false;
  args.c = meta({5, 4});
  expect_refused({"[gemm] c is [5, 4], expected [4, 5]"}, args);
  args.c = meta({4, 5}, DType::kBF16);
  expect_refused({"c is bf16, expected fp32"}, args);
  args = {meta({4, 8}, DType::kBF16), meta({8, 5}, DType::kBF16), meta({4, 5})};
  EXPECT_NO_THROW(check(args));
  args.bias = meta({4}, DType::kBF16);
  expect_refused({"bias is [4], expected [5] to match c [4, 5]"}, args);
  args.bias = meta({5});
  expect_refused({"bias is fp32, expected bf16"}, args);
}

TEST(Check, GemmOfFp8NamesWhatHopperWants) {
  const DType e4m3 = DType::kF8E4M3, e5m2 = DType::kF8E5M2;
  Gemm args{meta({5, 32}, e5m2), meta({16, 32}, e5m2), meta({5, 16}, DType::kBF16)};
  args.transpose_b = true;
  expect_refused({"[gemm] a and b are both e5m2"}, args);
  args.b = meta({16, 32}, e4m3);
  expect_refused({"[gemm] scale_a is missing"}, args);
  args.scale_a = args.scale_b = meta({1});
  EXPECT_NO_THROW(check(args));
  args.bias = meta({16});
  expect_refused({"bias is fp32, expected bf16"}, args);
  args.bias = Tensor{};
  args.b = meta({32, 16}, e4m3);
  args.transpose_b = false;
  expect_refused({"a [m, k] by b [n, k] transposed only"}, args);
  args = {meta({5, 24}, e4m3), meta({16, 24}, e4m3), meta({5, 16})};
  args.transpose_b = true;
  args.scale_a = args.scale_b = meta({1});
  expect_refused({"[gemm] FP8 operands give k 24 and n 16, expected multiples of 16"}, args);
  args = {tensor({2, 16}, e4m3), tensor({16, 16}, e4m3, 1024), tensor({2, 16}, DType::kF32, 4096)};
  args.transpose_b = true;
  args.scale_a = args.scale_b = tensor({1}, DType::kF32, 8192);
  EXPECT_NO_THROW(check(args));
  args.a.row_stride = 24;
  expect_refused({"rows of an FP8 operand [2, 16] with stride 24"}, args);
  args = {meta({4, 16}, DType::kBF16), meta({16, 16}, DType::kBF16), meta({4, 16})};
  args.fast_accumulation = true;
  expect_refused({"scales and fast accumulation belong to FP8 operands"}, args);
}

TEST(Check, CastLossesNeedTheRowCopy) {
  CastLosses args;
  args.in = meta({4, 8});
  args.row = meta({8, 4}, DType::kF8E4M3);
  args.counts = meta({2}, DType::kI64);
  expect_refused({"[cast_losses] row is [8, 4]", "[4, 8]"}, args);
  args.row = meta({4, 8}, DType::kF8E4M3);
  args.counts = meta({2});
  expect_refused({"[cast_losses] counts is fp32"}, args);
}

TEST(Check, QuantizeNamesItsCopies) {
  Quantize args;
  args.in = meta({20, 32}, DType::kBF16);
  args.amax = args.scale = meta({1});
  expect_refused({"[quantize] neither row nor column is given"}, args);
  args.row = meta({20, 32}, DType::kF8E4M3);
  args.column = meta({32, 16}, DType::kF8E4M3);
  expect_refused({"column is [32, 16], expected 32 rows of at least 20 to match in [20, 32]"},
                 args);
  args.column = meta({32, 32}, DType::kF8E5M2);
  expect_refused({"column is e5m2, expected e4m3"}, args);
  args.column = meta({32, 32}, DType::kF8E4M3);
  EXPECT_NO_THROW(check(args));
  args.amax = meta({2});
  expect_refused({"[quantize] amax is [2], expected [1]"}, args);
  expect_refused({"[transpose] out is [30, 20], expected 32 rows of at least 20"},
                 Transpose{meta({20, 32}, DType::kU8), meta({30, 20}, DType::kU8)});
  expect_refused({"[amax] in is int32, expected bf16 or fp32"},
                 Amax{meta({4}, DType::kI32), meta({1})});
}

TEST(Check, BlockScalesHaveTheLibrarysShapes) {
  const DType e4m3 = DType::kF8E4M3;
  Gemm args{meta({136, 272}, e4m3), meta({144, 272}, e4m3), meta({136, 144}, DType::kBF16)};
  args.transpose_b = true;
  args.scale_mode_a = ScaleMode::kVector;
  args.scale_a = meta({3, 136});
  args.scale_b = meta({1});
  expect_refused({"one operand has a scale for the tensor, the other for blocks of it"}, args);
  args.scale_mode_b = ScaleMode::kBlock;
  expect_refused({"scale_b is [1], expected [2, 4]"}, args);
  args.scale_b = meta({2, 4});
  EXPECT_NO_THROW(check(args));
  args.fast_accumulation = true;
  expect_refused({"fast accumulation does not go with scales for blocks"}, args);
  args.fast_accumulation = false;
  args.scale_mode_a = ScaleMode::kBlock;
  expect_refused({"both operands have scales for 128 x 128 blocks"}, args);
  args.scale_mode_a = ScaleMode::kVector;
  args.scale_a = meta({136, 3});
  expect_refused({"scale_a is [136, 3], expected [3, 136]"}, args);

  QuantizeBlocks cast;
  cast.in = meta({20, 144}, DType::kBF16);
  expect_refused({"[quantize_blocks] neither row nor column is given"}, cast);
  cast.row = meta({20, 144}, e4m3);
  expect_refused({"row_scale is missing"}, cast);
  cast.row_scale = meta({2, 20});
  EXPECT_NO_THROW(check(cast));
  cast.column = meta({144, 32}, e4m3);
  cast.column_scale = meta({1, 20});
  expect_refused({"column_scale is [1, 20], expected [1, 144]"}, cast);
  cast.mode = ScaleMode::kTensor;
  expect_refused({"mode is kTensor, expected kVector or kBlock"}, cast);
}

// Scratch is planned without a GPU: panels of a bounded size, however large the operands.
TEST(Check, ProductsWithBlockScalesPlanPanels) {
  Capabilities target;
  target.target = DeviceKind::kCuda;
  target.gemm_workspace = 1 << 20;
  const auto bytes_of = [&](std::int64_t m, std::int64_t n, std::int64_t k) {
    Gemm args{meta({m, k}, DType::kF8E4M3), meta({n, k}, DType::kF8E4M3),
              meta({m, n}, DType::kBF16)};
    args.transpose_b = true;
    args.scale_mode_a = args.scale_mode_b = ScaleMode::kVector;
    args.scale_a = meta(scale_shape(ScaleMode::kVector, m, k));
    args.scale_b = meta(scale_shape(ScaleMode::kVector, n, k));
    check(args);
    return workspace(args, target) - target.gemm_workspace;
  };
  EXPECT_EQ(bytes_of(64, 128, 32), std::size_t{2 * (64 + 128) * 32});
  EXPECT_EQ(bytes_of(65536, 28672, 4096), std::size_t{2 * 2 * 2048 * 4096});
  // At least 128 rows, whatever their length.
  EXPECT_EQ(bytes_of(4096, 4096, 131072), std::size_t{2 * 2 * 128} * 131072);
}

TEST(Check, AttentionNamesHeadsAndBounds) {
  AttentionForward args;
  args.shape = {6, 4, 8, 0, 16, 1.0f};
  expect_refused({"[attention_forward] 6 query heads over 4 key heads: expected a multiple"}, args);
  args.shape.heads_kv = 2;
  args.q = meta({10, 48});
  args.k = meta({10, 20});
  expect_refused({"k is [10, 20], expected 2 heads of 8 = 16 columns"}, args);
  args.k = meta({10, 16});
  args.v = meta({9, 16});
  expect_refused({"v is [9, 16], expected [10, 16] to match k"}, args);
  args.v = args.k;
  args.out = meta({10, 48});
  args.lse = meta({10, 2});
  expect_refused({"lse is [10, 2], expected [10, 6]"}, args);
  args.lse = meta({10, 6});
  args.cu_q = meta({1}, DType::kI32);
  expect_refused({"cu_q is [1], expected [max_documents + 1]"}, args);
  args.cu_q = meta({3}, DType::kI32);
  args.cu_k = meta({4}, DType::kI32);
  expect_refused({"cu_k is [4], expected [3] to match cu_q [3]"}, args);
  args.cu_k = args.cu_q;
  EXPECT_NO_THROW(check(args));
}

TEST(Check, RopeNamesColumnsAndTables) {
  QkvRopeForward args;
  args.layout = {4, 2, 16};
  args.in = meta({7, 100});
  expect_refused({"[qkv_rope_forward] in is [7, 100], expected 128 columns"}, args);
  args.in = args.out = meta({7, 128});
  args.cos = args.sin = meta({64, 9});
  args.positions = meta({7}, DType::kI32);
  expect_refused({"cos is [64, 9], expected at most head_dim / 2 = 8 columns"}, args);
  args.cos = args.sin = meta({64, 8});
  args.positions = meta({8}, DType::kI32);
  expect_refused({"positions is [8], expected [7]"}, args);
  args.positions = meta({7}, DType::kI32);
  EXPECT_NO_THROW(check(args));
  args.q_norm = meta({16});
  expect_refused({"q_norm and k_norm belong together"}, args);
}

TEST(Check, CrossEntropyNamesTheColumns) {
  CrossEntropyStats args{meta({5, 64}), meta({5}, DType::kI32), meta({5, 3}), 0, 65};
  expect_refused({"[cross_entropy_stats] valid_cols is 65, expected 0 to 64"}, args);
  args.valid_cols = 64;
  EXPECT_NO_THROW(check(args));
  args.stats = meta({5, 2});
  expect_refused({"stats is [5, 2], expected [5, 3]"}, args);
  CrossEntropyCombine combine;
  combine.stats = meta({5, 3});
  expect_refused({"stats is [5, 3], expected [shards, C, 3]"}, combine);
}

TEST(Check, OptimizerNamesBytesAndSizes) {
  AdamW args;
  args.weight = args.master = args.grad = args.m = args.v = meta({100});
  args.segments = meta({static_cast<std::int64_t>(sizeof(ShardSegment)) + 1}, DType::kU8);
  args.control = meta({static_cast<std::int64_t>(sizeof(StepControl))}, DType::kU8);
  expect_refused({"[adamw] segments holds", "expected a multiple of"}, args);
  args.segments = meta({static_cast<std::int64_t>(sizeof(ShardSegment))}, DType::kU8);
  EXPECT_NO_THROW(check(args));
  args.control = meta({8}, DType::kU8);
  expect_refused({"control is [8], expected"}, args);
  args.control = meta({static_cast<std::int64_t>(sizeof(StepControl))}, DType::kU8);
  args.v = meta({99});
  expect_refused({"[adamw] v is [99], expected [100] to match grad [100]"}, args);
  args.v = meta({100});
  args.beta2 = 1.0f;
  expect_refused({"beta2 1"}, args);
}

TEST(Check, SumPartsMayWriteOneOfItsParts) {
  SumParts args{tensor({12}), tensor({4}, DType::kF32, 16), 3};
  EXPECT_NO_THROW(check(args));
  args.out = tensor({4}, DType::kF32, 8);
  expect_refused({"[sum_parts] out shares memory with in"}, args);
  args.out = tensor({5}, DType::kF32, 4096);
  expect_refused({"in is [12], expected 3 parts of the 5 elements of out"}, args);
}

TEST(Check, OthersNameTheirFirstMistake) {
  expect_refused({"[embedding_forward] out is [3, 7], expected [3, 8]"},
                 EmbeddingForward{meta({3}, DType::kI32), meta({10, 8}), meta({3, 7})});
  expect_refused({"[embedding_backward] order is [4], expected [3]"},
                 EmbeddingBackward{meta({3}, DType::kI32), meta({4}, DType::kI32), meta({3, 8}),
                                   meta({10, 8})});
  expect_refused({"[add] b is [3, 4], expected [4, 3] to match a [4, 3]"},
                 Add{meta({4, 3}), meta({3, 4}), meta({4, 3})});
  expect_refused({"[scale] in is int32, expected fp64"}, Scale{meta({4}, DType::kI32), meta({4})});
  expect_refused({"[column_sum] out is [4], expected [3]"}, ColumnSum{meta({4, 3}), meta({4})});
  expect_refused({"[fill_normal] out [4, 3] at (0, 0) does not fit 2 global columns"},
                 FillNormal{meta({4, 3}), {}, 0, 0, 2});
  expect_refused({"[sum_of_squares] sum is fp32, expected fp64"},
                 SumOfSquares{meta({4}), meta({0}, DType::kU8), meta({1})});
  expect_refused(
      {"[step_control_finish] control is [3]"},
      StepControlFinish{meta({3}, DType::kU8), meta({1}, DType::kF64), meta({1}, DType::kF64)});
}

}  // namespace
}  // namespace tessera::test
