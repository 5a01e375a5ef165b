#include "tools/bench/soak.h"

#include <algorithm>
#include <functional>
#include <memory>

#include "engine/memory/scratch.h"
#include "kernels/ops.h"
#include "tools/bench/operands.h"

namespace tessera {
namespace {

// Logits of a product are taken in pieces of this many bytes, as the head does
// (models/lm_head.cpp).
constexpr std::int64_t kChunkBytes = std::int64_t{1} << 30;
constexpr double kSlice = 0.1;  // seconds between two looks at the clock

// A stream with the scratch of the ops that a measurement runs.
class Bench {
 public:
  explicit Bench(BackendContext& context)
      : stream(context.make_stream("bench")),
        operands(*stream),
        begin(context.make_event()),
        end(context.make_event()) {}

  template <typename Arguments>
  void need(const Arguments& args) {
    scratch_bytes_ = std::max(scratch_bytes_, workspace(args, stream->context().capabilities()));
  }
  void attach() { scratch_ = std::make_unique<ScratchStack>(*stream, scratch_bytes_ + 4096); }

  double seconds(const std::function<void()>& body, std::int64_t times) {
    stream->record(*begin);
    for (std::int64_t i = 0; i < times; ++i) body();
    stream->record(*end);
    end->synchronize();
    return end->milliseconds_since(*begin) / 1e3;
  }

  // Work per second of `body`, which does `work` each time, over `total` seconds.
  SoakedRate soak(const std::function<void()>& body, double work, double total) {
    body();
    stream->synchronize();
    const double once = std::max(1e-7, seconds(body, 1));
    const auto times = std::max<std::int64_t>(1, static_cast<std::int64_t>(kSlice / once));
    SoakedRate rate;
    double passed = 0, late_seconds = 0, late_work = 0;
    do {
      const double slice = seconds(body, times);
      passed += slice;
      if (rate.burst == 0) rate.burst = work * static_cast<double>(times) / slice;
      if (passed < total / 2) continue;
      late_seconds += slice;
      late_work += work * static_cast<double>(times);
    } while (passed < total);
    rate.soaked = late_work / late_seconds;
    return rate;
  }

  std::unique_ptr<Stream> stream;
  Operands operands;
  std::unique_ptr<Event> begin, end;

 private:
  std::size_t scratch_bytes_ = 256;
  std::unique_ptr<ScratchStack> scratch_;
};

// A product with operands of its own.
Gemm make_product(Operands& operands, const StepProduct& p, std::int64_t m, std::int64_t k,
                  const RuntimeOptions& options) {
  Gemm g;
  g.accumulate = p.is_wgrad;
  const DType out = p.is_wgrad ? options.params.gradients : options.params.compute;
  g.c = operands.tensor(out, Shape{m, p.n});
  if (!p.is_fp8) {
    const DType compute = options.params.compute;
    g.transpose_a = p.is_wgrad;
    g.transpose_b = !p.is_gradient;
    g.a = operands.tensor(compute, p.is_wgrad ? Shape{k, m} : Shape{m, k});
    g.b = operands.tensor(compute, g.transpose_b ? Shape{p.n, k} : Shape{k, p.n}, 0.02f);
    return g;
  }
  // FP8 products want the inner dim last in both operands.
  const QuantRecipe& recipe = options.recipe;
  g.transpose_b = true;
  g.a = operands.tensor(p.is_gradient ? recipe.gradient : recipe.forward, Shape{m, k});
  g.b = operands.tensor(recipe.forward, Shape{p.n, k});
  g.fast_accumulation = !p.is_gradient || recipe.fast_gradients;
  if (recipe.scaling == QuantScaling::kBlockwise) {
    g.scale_mode_a = ScaleMode::kVector;
    g.scale_mode_b = p.is_wgrad ? ScaleMode::kVector : ScaleMode::kBlock;
  }
  g.scale_a = operands.tensor(DType::kF32, scale_shape(g.scale_mode_a, m, k), 1e-3f);
  g.scale_b = operands.tensor(DType::kF32, scale_shape(g.scale_mode_b, p.n, k), 1e-3f);
  return g;
}

}  // namespace

SoakedRate soak_products(BackendContext& context, const StepWork& work,
                         const RuntimeOptions& options, std::int64_t micro_batches, bool fp8,
                         double seconds) {
  Bench bench(context);
  struct Entry {
    Gemm args;
    std::int64_t count = 0;
  };
  std::vector<Entry> entries;
  double flops = 0;
  std::int64_t rounds = 0;
  for (const StepProduct& p : work.products) {
    if (p.is_fp8 != fp8) continue;
    // The widest products run in pieces of their tokens.
    std::int64_t m = p.m, k = p.k, pieces = 1;
    const auto row = static_cast<std::int64_t>(size_of(options.params.compute));
    std::int64_t& tokens = p.is_wgrad ? k : m;
    const std::int64_t wide = p.is_wgrad ? p.m : std::max(p.n, p.k);
    while (tokens % 2 == 0 && tokens > 128 && tokens * wide * row > kChunkBytes) {
      tokens /= 2;
      pieces *= 2;
    }
    Entry entry{make_product(bench.operands, p, m, k, options),
                std::max<std::int64_t>(1, p.count / micro_batches) * pieces};
    bench.need(entry.args);
    flops += 2.0 * static_cast<double>(m) * static_cast<double>(p.n) * static_cast<double>(k) *
             static_cast<double>(entry.count);
    rounds = std::max(rounds, entry.count);
    entries.push_back(entry);
  }
  if (entries.empty()) return {};
  bench.attach();
  const auto round = [&] {
    for (std::int64_t i = 0; i < rounds; ++i) {
      for (const Entry& entry : entries) {
        if (i < entry.count) gemm(entry.args, *bench.stream);
      }
    }
  };
  return bench.soak(round, flops, seconds);
}

AttentionRates soak_attention(BackendContext& context, const AttentionShape& shape, DType dtype,
                              std::int64_t rows, bool deterministic, double seconds) {
  Bench bench(context);
  const std::int64_t tokens = rows * shape.max_length;
  const std::int64_t q = shape.heads_q * shape.head_dim, kv = shape.heads_kv * shape.head_dim;
  std::vector<std::int32_t> bounds;
  for (std::int64_t row = 0; row <= rows; ++row) {
    bounds.push_back(static_cast<std::int32_t>(row * shape.max_length));
  }
  const Tensor qkv = bench.operands.tensor(dtype, Shape{tokens, q + 2 * kv});
  const Tensor dqkv = bench.operands.tensor(dtype, Shape{tokens, q + 2 * kv});
  AttentionForward forward;
  forward.q = qkv.col_slice(0, q);
  forward.k = qkv.col_slice(q, kv);
  forward.v = qkv.col_slice(q + kv, kv);
  forward.out = bench.operands.tensor(dtype, Shape{tokens, q});
  forward.lse = bench.operands.tensor(DType::kF32, Shape{tokens, shape.heads_q});
  forward.cu_q = forward.cu_k = bench.operands.upload(DType::kI32, bounds);
  forward.shape = shape;
  AttentionBackward backward;
  backward.dout = bench.operands.tensor(dtype, Shape{tokens, q});
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.out = forward.out;
  backward.lse = forward.lse;
  backward.dq = dqkv.col_slice(0, q);
  backward.dk = dqkv.col_slice(q, kv);
  backward.dv = dqkv.col_slice(q + kv, kv);
  backward.cu_q = backward.cu_k = forward.cu_q;
  backward.shape = shape;
  backward.deterministic = deterministic;
  bench.need(forward);
  bench.need(backward);
  bench.attach();
  const double flops = 2.0 * static_cast<double>(tokens) * static_cast<double>(shape.max_length) *
                       static_cast<double>(q);
  AttentionRates rates;
  rates.forward =
      bench.soak([&] { attention_forward(forward, *bench.stream); }, flops, seconds / 2);
  rates.backward =
      bench.soak([&] { attention_backward(backward, *bench.stream); }, 2.5 * flops, seconds / 2);
  return rates;
}

double copy_rate(BackendContext& context) {
  const std::size_t bytes = std::size_t{context.device().kind == DeviceKind::kCuda ? 2048u : 128u}
                            << 20;
  const auto stream = context.make_stream("copy");
  const auto begin = context.make_event(), end = context.make_event();
  const Buffer from(context, bytes), to(context, bytes);
  stream->set_zero(from.data(), bytes);
  stream->copy_bytes(to.data(), from.data(), bytes);  // touches every page once
  std::vector<double> times;
  for (int i = 0; i < 10; ++i) {
    stream->record(*begin);
    stream->copy_bytes(to.data(), from.data(), bytes);
    stream->record(*end);
    end->synchronize();
    times.push_back(end->milliseconds_since(*begin) / 1e3);
  }
  std::sort(times.begin(), times.end());
  return 2.0 * static_cast<double>(bytes) / times[times.size() / 2];
}

double square_product_rate(BackendContext& context, std::int64_t size, double seconds) {
  Bench bench(context);
  Gemm args;
  args.a = bench.operands.tensor(DType::kF32, Shape{size, size});
  args.b = bench.operands.tensor(DType::kF32, Shape{size, size});
  args.c = bench.operands.tensor(DType::kF32, Shape{size, size});
  bench.need(args);
  bench.attach();
  const auto once = [&] { gemm(args, *bench.stream); };
  once();
  std::vector<double> times;
  for (double passed = 0; passed < seconds || times.size() < 3; passed += times.back()) {
    times.push_back(bench.seconds(once, 1));
  }
  std::sort(times.begin(), times.end());
  const auto n = static_cast<double>(size);
  return 2 * n * n * n / times[times.size() / 2];
}

}  // namespace tessera
