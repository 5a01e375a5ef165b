// Tensors of more than 2^31 elements on a GPU, where an index of 32 bits would wrap: the last rows
// of each row-wise op equal, bit for bit, the same op over those rows alone. (A micro-batch of 128k
// tokens of an 8B model has gate_up rows of 3.7e9 elements.)
#include <gtest/gtest.h>

#include <deque>

#include "engine/core/philox.h"
#include "engine/device/buffer.h"
#include "engine/device/stream.h"
#include "engine/memory/scratch.h"
#include "kernels/ops.h"

namespace tessera::test {
namespace {

constexpr std::int64_t kElements = (std::int64_t{1} << 31) + (std::int64_t{1} << 22);
constexpr std::int64_t kTailRows = 5;

class CudaLarge : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
    context_ = make_context(Device{DeviceKind::kCuda, 0});
    if (context_->available_bytes() < (std::size_t{48} << 30)) {
      GTEST_SKIP() << "needs 48 GiB of free GPU memory";
    }
    stream_ = context_->make_stream("large");
  }

  Tensor empty(DType dtype, Shape shape) {
    const std::size_t bytes = static_cast<std::size_t>(shape.numel()) * size_of(dtype);
    buffers_.emplace_back(*context_, bytes);
    return Tensor(buffers_.back().data(), dtype, shape, context_->device());
  }
  Tensor random(DType dtype, Shape shape, float mean = 0, float std = 1) {
    FillNormal fill;
    fill.out = empty(dtype, shape);
    fill.key = derive_key(11, RandomPurpose::kSynthetic, 0, ++seed_);
    fill.global_cols = shape.cols();
    fill.mean = mean;
    fill.std = std;
    run(fill_normal, fill);
    return fill.out;
  }
  Tensor zeros(DType dtype, Shape shape) {
    const Tensor t = empty(dtype, shape);
    stream_->set_zero(t.data, t.bytes());
    return t;
  }

  template <typename Arguments>
  void run(void (*op)(const Arguments&, Stream&), const Arguments& arguments) {
    const std::size_t bytes = workspace(arguments, context_->capabilities()) + 4096;
    ScratchStack scratch(*stream_, bytes);
    op(arguments, *stream_);
    stream_->synchronize();
  }

  std::vector<unsigned char> bytes_of(const Tensor& t) {
    EXPECT_TRUE(t.is_dense());
    std::vector<unsigned char> bytes(t.bytes());
    stream_->copy_bytes(bytes.data(), t.data, bytes.size());
    stream_->synchronize();
    return bytes;
  }
  static Tensor tail(const Tensor& t) { return t.row_slice(t.rows() - kTailRows, kTailRows); }
  void expect_tail(const Tensor& whole, const Tensor& part, const char* what) {
    EXPECT_EQ(bytes_of(tail(whole)), bytes_of(part)) << what;
  }

  std::unique_ptr<BackendContext> context_;
  std::unique_ptr<Stream> stream_;
  std::deque<Buffer> buffers_;
  std::uint64_t seed_ = 0;
};

TEST_F(CudaLarge, FillNormal) {
  const std::int64_t cols = 4096;
  const Tensor whole = random(DType::kBF16, Shape{kElements / cols, cols});
  FillNormal fill;
  fill.out = empty(DType::kBF16, Shape{kTailRows, cols});
  fill.key = derive_key(11, RandomPurpose::kSynthetic, 0, 1);
  fill.first_row = whole.rows() - kTailRows;
  fill.global_cols = cols;
  fill.std = 1;
  run(fill_normal, fill);
  expect_tail(whole, fill.out, "values");
}

TEST_F(CudaLarge, SwiGlu) {
  const std::int64_t ffn = 14336;
  const std::int64_t rows = kElements / ffn;
  SwiGluForward forward{
      random(DType::kBF16, Shape{rows, 2 * ffn}), empty(DType::kBF16, Shape{rows, ffn}), {}};
  run(swiglu_forward, forward);
  const SwiGluForward small{tail(forward.gate_up), empty(DType::kBF16, Shape{kTailRows, ffn}), {}};
  run(swiglu_forward, small);
  expect_tail(forward.out, small.out, "out");
  SwiGluBackward backward{
      forward.out, forward.gate_up, empty(DType::kBF16, Shape{rows, 2 * ffn}), {}};
  run(swiglu_backward, backward);
  const SwiGluBackward small_backward{tail(backward.dout),
                                      tail(backward.gate_up),
                                      empty(DType::kBF16, Shape{kTailRows, 2 * ffn}),
                                      {}};
  run(swiglu_backward, small_backward);
  expect_tail(backward.dgate_up, small_backward.dgate_up, "dgate_up");
}

TEST_F(CudaLarge, RmsNorm) {
  const std::int64_t hidden = 4096;
  const std::int64_t rows = kElements / hidden;
  const auto forward = [&](const Tensor& x, const Tensor& weight) {
    RmsNormForward a;
    a.x = x;
    a.weight = weight;
    a.out = empty(DType::kBF16, x.shape);
    a.rstd = empty(DType::kF32, Shape{x.rows()});
    run(rmsnorm_forward, a);
    return a;
  };
  const Tensor weight = random(DType::kBF16, Shape{hidden}, 1, 0.1f);
  const RmsNormForward whole = forward(random(DType::kBF16, Shape{rows, hidden}), weight);
  const RmsNormForward part = forward(tail(whole.x), weight);
  expect_tail(whole.out, part.out, "out");
  const auto backward = [&](const RmsNormForward& f, const Tensor& dout) {
    RmsNormBackward b;
    b.dout = dout;
    b.s = f.x;
    b.weight = weight;
    b.rstd = f.rstd;
    b.dx = empty(DType::kBF16, f.x.shape);
    run(rmsnorm_backward, b);
    return b;
  };
  const RmsNormBackward whole_backward = backward(whole, whole.out);
  expect_tail(whole_backward.dx, backward(part, tail(whole.out)).dx, "dx");
}

TEST_F(CudaLarge, AddScaleAndCasts) {
  const std::int64_t cols = 8192;
  const Shape shape{kElements / cols, cols};
  const Shape small{kTailRows, cols};
  const Tensor a = random(DType::kBF16, shape);
  const Add whole_sum{a, random(DType::kBF16, shape), empty(DType::kBF16, shape)};
  run(add, whole_sum);
  const Add part_sum{tail(a), tail(whole_sum.b), empty(DType::kBF16, small)};
  run(add, part_sum);
  expect_tail(whole_sum.out, part_sum.out, "add");
  const Scale whole_scale{a, empty(DType::kF8E4M3, shape), 100.0};
  run(scale, whole_scale);
  const Scale part_scale{tail(a), empty(DType::kF8E4M3, small), 100.0};
  run(scale, part_scale);
  expect_tail(whole_scale.out, part_scale.out, "scale");
}

TEST_F(CudaLarge, AmaxAndQuantize) {
  const std::int64_t cols = 4096;
  const Shape shape{kElements / cols, cols};
  Quantize whole;
  whole.in = random(DType::kBF16, shape);
  whole.amax = zeros(DType::kF32, Shape{1});
  run(amax, Amax{whole.in, whole.amax});
  whole.row = empty(DType::kF8E4M3, shape);
  whole.column = empty(DType::kF8E4M3, Shape{cols, fp8_depth(shape.rows())});
  whole.scale = empty(DType::kF32, Shape{1});
  run(quantize, whole);
  Quantize part = whole;
  part.in = tail(whole.in);
  part.row = empty(DType::kF8E4M3, Shape{kTailRows, cols});
  part.column = Tensor();
  run(quantize, part);
  expect_tail(whole.row, part.row, "row copy");
  // The transposed copy of the last column's last elements, one run of bytes.
  const std::int64_t depth = whole.column.cols();
  const auto column =
      bytes_of(whole.column.reshape(Shape{cols * depth})
                   .flat_slice((cols - 1) * depth + shape.rows() - kTailRows, kTailRows));
  const auto row = bytes_of(part.row);
  for (std::int64_t r = 0; r < kTailRows; ++r) {
    EXPECT_EQ(column[static_cast<std::size_t>(r)],
              row[static_cast<std::size_t>(r * cols + cols - 1)])
        << r;
  }
}

TEST_F(CudaLarge, GemmOutput) {
  const std::int64_t n = 16384;
  const std::int64_t k = 64;
  const std::int64_t rows = kElements / n;
  Gemm whole;
  whole.a = random(DType::kBF16, Shape{rows, k});
  whole.b = random(DType::kBF16, Shape{n, k});
  whole.c = empty(DType::kF32, Shape{rows, n});
  whole.transpose_b = true;
  run(gemm, whole);
  Gemm part = whole;
  part.a = tail(whole.a);
  part.c = empty(DType::kF32, Shape{kTailRows, n});
  run(gemm, part);
  // Another algorithm may add the 64 products in another order.
  const auto got = bytes_of(tail(whole.c));
  const auto want = bytes_of(part.c);
  const auto* x = reinterpret_cast<const float*>(got.data());
  const auto* y = reinterpret_cast<const float*>(want.data());
  for (std::int64_t i = 0; i < kTailRows * n; ++i) ASSERT_NEAR(x[i], y[i], 1e-3) << i;
}

TEST_F(CudaLarge, SumOfSquares) {
  SumOfSquares a;
  a.grad = random(DType::kBF16, Shape{kElements});
  ShardSegment segment;
  segment.begin = 0;
  segment.end = kElements;
  segment.local_cols = kElements;
  segment.global_cols = kElements;
  a.segments = empty(DType::kU8, Shape{static_cast<std::int64_t>(sizeof segment)});
  stream_->copy_bytes(a.segments.data, &segment, sizeof segment);
  a.sum = zeros(DType::kF64, Shape{1});
  run(sum_of_squares, a);
  double sum = 0;
  stream_->copy_bytes(&sum, a.sum.data, sizeof sum);
  stream_->synchronize();
  // The mean square of n normal numbers is 1 with a deviation of sqrt(2 / n): 3e-5 here; rounding
  // to bf16 adds up to 3e-6.
  EXPECT_NEAR(sum / static_cast<double>(kElements), 1.0, 2e-4);
}

}  // namespace
}  // namespace tessera::test
