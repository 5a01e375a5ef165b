// The CUDA backend against the CPU backend at the widths of real models, where vector paths, many blocks
// and the library kernels are taken (op_values_test.cpp covers the corner cases), and against itself, bit
// for bit. Each comparison prints its error and bound.
#include <gtest/gtest.h>

#include <cstdio>
#include <numeric>

#include "kernels/gemm_choices.h"
#include "kernels/step_control.h"
#include "tests/support/op_fixture.h"

namespace tessera::test {
namespace {

struct Output {
  std::string name;
  Values values;
};
using RunCase = std::function<std::vector<Output>(OpFixture&)>;

struct ParityCase {
  std::string name;
  double bound;  // of |cuda - cpu| / |cpu|, Frobenius norms
  RunCase run;
};
std::ostream& operator<<(std::ostream& out, const ParityCase& c) { return out << c.name; }

double relative_error(const Values& got, const Values& want) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) {
      size += std::isfinite(want[i]) ? want[i] * want[i] : 0;
      continue;
    }
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return difference == 0 ? 0 : std::sqrt(difference / size);
}

// Both backends round the same sums to bf16: most results are equal, the rest differ by one unit. The sums
// themselves differ by fp32 rounding.
double bound_of(DType dtype, double terms = 1) {
  const double fp32 = epsilon_of(DType::kF32) * std::sqrt(terms + 16);
  return dtype == DType::kBF16 ? epsilon_of(DType::kBF16) / 2 : fp32;
}
std::string tag(DType dtype) { return std::string(name_of(dtype)); }

Values random(std::int64_t count, std::uint64_t seed, DType dtype, double scale = 1.0) {
  return rounded(normal_values(count, seed, scale), dtype);
}

ParityCase gemm_case(DType dtype, DType out, std::int64_t m, std::int64_t n, std::int64_t k, bool ta, bool tb,
                     bool accumulate, bool bias) {
  const std::string name = "gemm_" + tag(dtype) + "_" + tag(out) + "_" + std::to_string(m) + "x" + std::to_string(n) +
                           "x" + std::to_string(k) + (ta ? "_ta" : "") + (tb ? "_tb" : "") +
                           (accumulate ? "_add" : "") + (bias ? "_bias" : "");
  return {name, bound_of(out, static_cast<double>(k)), [=](OpFixture& f) {
            Gemm g;
            g.a = f.input(random(m * k, 1, dtype), dtype, ta ? Shape{k, m} : Shape{m, k});
            g.b = f.input(random(n * k, 2, dtype), dtype, tb ? Shape{n, k} : Shape{k, n});
            g.c = accumulate ? f.input(random(m * n, 3, out), out, Shape{m, n}) : f.output(out, Shape{m, n});
            if (bias) g.bias = f.input(random(n, 4, dtype), dtype, Shape{n});
            g.transpose_a = ta;
            g.transpose_b = tb;
            g.accumulate = accumulate;
            f.run(gemm, g);
            return std::vector<Output>{{"c", f.values(g.c)}};
          }};
}

ParityCase norm_case(DType dtype, std::int64_t tokens, std::int64_t hidden) {
  const std::string name = "rmsnorm_" + tag(dtype) + "_" + std::to_string(tokens) + "x" + std::to_string(hidden);
  return {name, bound_of(dtype, static_cast<double>(hidden + tokens)), [=](OpFixture& f) {
            const Shape shape{tokens, hidden};
            RmsNormForward a;
            a.x = f.input(random(tokens * hidden, 1, dtype), dtype, shape);
            a.delta = f.input(random(tokens * hidden, 2, dtype), dtype, shape);
            a.weight = f.input(random(hidden, 3, dtype), dtype, Shape{hidden});
            a.sum = f.output(dtype, shape);
            a.out = f.output(dtype, shape);
            a.rstd = f.output(DType::kF32, Shape{tokens});
            f.run(rmsnorm_forward, a);
            RmsNormBackward b;
            b.dout = f.input(random(tokens * hidden, 4, dtype), dtype, shape);
            b.s = a.sum;
            b.weight = a.weight;
            b.rstd = a.rstd;
            b.dsum = f.input(random(tokens * hidden, 5, dtype), dtype, shape);
            b.dx = b.dsum;
            b.dweight = f.input(random(hidden, 6, DType::kF32), DType::kF32, Shape{hidden});
            b.accumulate_dweight = true;
            f.run(rmsnorm_backward, b);
            return std::vector<Output>{{"sum", f.values(a.sum)},   {"out", f.values(a.out)},
                                       {"rstd", f.values(a.rstd)}, {"dx", f.values(b.dx)},
                                       {"dweight", f.values(b.dweight)}};
          }};
}

ParityCase rope_case(DType dtype, std::int64_t tokens, QkvLayout layout, std::int64_t rotary, bool norm) {
  const std::string name = "rope_" + tag(dtype) + "_" + std::to_string(tokens) + "x" + std::to_string(layout.heads_q) +
                           "x" + std::to_string(layout.heads_kv) + "x" + std::to_string(layout.head_dim) +
                           (norm ? "_norm" : "");
  return {name, bound_of(dtype, static_cast<double>(tokens * layout.heads_q)), [=](OpFixture& f) {
            const std::int64_t positions = 512;
            const Shape shape{tokens, layout.cols()};
            Values cos, sin;
            for (std::int64_t p = 0; p < positions; ++p) {
              for (std::int64_t i = 0; i < rotary / 2; ++i) {
                const double angle = static_cast<double>(p) *
                                     std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(rotary));
                cos.push_back(std::cos(angle));
                sin.push_back(std::sin(angle));
              }
            }
            std::vector<std::int32_t> position;
            for (std::int64_t t = 0; t < tokens; ++t) position.push_back(static_cast<std::int32_t>((t * 37) % positions));
            QkvRopeForward a;
            a.in = f.input(random(shape.numel(), 1, dtype), dtype, shape);
            a.out = norm ? f.output(dtype, shape) : a.in;
            a.cos = f.input(cos, DType::kF32, Shape{positions, rotary / 2});
            a.sin = f.input(sin, DType::kF32, Shape{positions, rotary / 2});
            a.positions = f.integers(position);
            a.layout = layout;
            if (norm) {
              a.q_norm = f.input(random(layout.head_dim, 2, dtype), dtype, Shape{layout.head_dim});
              a.k_norm = f.input(random(layout.head_dim, 3, dtype), dtype, Shape{layout.head_dim});
              a.rstd = f.output(DType::kF32, Shape{tokens, layout.heads_q + layout.heads_kv});
            }
            f.run(qkv_rope_forward, a);
            QkvRopeBackward b;
            b.d = f.input(random(shape.numel(), 4, dtype), dtype, shape);
            b.cos = a.cos;
            b.sin = a.sin;
            b.positions = a.positions;
            b.layout = layout;
            std::vector<Output> outputs{{"out", f.values(a.out)}};
            if (norm) {
              b.in = a.in;
              b.q_norm = a.q_norm;
              b.k_norm = a.k_norm;
              b.rstd = a.rstd;
              b.dq_norm = f.output(DType::kF32, Shape{layout.head_dim});
              b.dk_norm = f.output(DType::kF32, Shape{layout.head_dim});
            }
            f.run(qkv_rope_backward, b);
            outputs.push_back({"d", f.values(b.d)});
            if (norm) {
              outputs.push_back({"dq_norm", f.values(b.dq_norm)});
              outputs.push_back({"dk_norm", f.values(b.dk_norm)});
            }
            return outputs;
          }};
}

ParityCase swiglu_case(DType dtype, std::int64_t tokens, std::int64_t ffn) {
  return {"swiglu_" + tag(dtype) + "_" + std::to_string(tokens) + "x" + std::to_string(ffn), bound_of(dtype),
          [=](OpFixture& f) {
            SwiGluForward a;
            a.gate_up = f.input(random(tokens * 2 * ffn, 1, dtype, 2.0), dtype, Shape{tokens, 2 * ffn});
            a.out = f.output(dtype, Shape{tokens, ffn});
            f.run(swiglu_forward, a);
            SwiGluBackward b;
            b.dout = f.input(random(tokens * ffn, 2, dtype), dtype, Shape{tokens, ffn});
            b.gate_up = a.gate_up;
            b.dgate_up = f.output(dtype, Shape{tokens, 2 * ffn});
            f.run(swiglu_backward, b);
            return std::vector<Output>{{"out", f.values(a.out)}, {"dgate_up", f.values(b.dgate_up)}};
          }};
}

ParityCase cross_entropy_case(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t valid) {
  return {"cross_entropy_" + tag(dtype) + "_" + std::to_string(rows) + "x" + std::to_string(cols),
          bound_of(dtype, static_cast<double>(cols)), [=](OpFixture& f) {
            std::vector<std::int32_t> targets;
            for (std::int64_t t = 0; t < rows; ++t) {
              targets.push_back(t % 7 == 3 ? -100 : static_cast<std::int32_t>((t * 7919) % valid));
            }
            CrossEntropyStats a;
            a.logits = f.input(random(rows * cols, 1, dtype, 3.0), dtype, Shape{rows, cols});
            a.targets = f.integers(targets);
            a.stats = f.output(DType::kF32, Shape{rows, 3});
            a.valid_cols = valid;
            f.run(cross_entropy_stats, a);
            CrossEntropyCombine c;
            c.stats = Tensor(a.stats.data, DType::kF32, Shape{1, rows, 3}, a.stats.device);
            c.targets = a.targets;
            c.lse = f.output(DType::kF32, Shape{rows});
            c.nll = f.output(DType::kF32, Shape{rows});
            c.loss_sum = f.input({1.5}, DType::kF64, Shape{1});
            f.run(cross_entropy_combine, c);
            CrossEntropyBackward b;
            b.logits = a.logits;
            b.targets = a.targets;
            b.lse = c.lse;
            b.valid_cols = valid;
            f.run(cross_entropy_backward, b);
            return std::vector<Output>{{"lse", f.values(c.lse)},
                                       {"nll", f.values(c.nll)},
                                       {"loss", f.values(c.loss_sum)},
                                       {"dlogits", f.values(b.logits)}};
          }};
}

ParityCase embedding_case(DType dtype, std::int64_t tokens, std::int64_t rows, std::int64_t hidden) {
  return {"embedding_" + tag(dtype) + "_" + std::to_string(tokens) + "x" + std::to_string(hidden),
          bound_of(dtype, static_cast<double>(tokens)), [=](OpFixture& f) {
            std::vector<std::int32_t> ids, order(static_cast<std::size_t>(tokens));
            // One very common token, and some of another shard.
            for (std::int64_t t = 0; t < tokens; ++t) {
              ids.push_back(static_cast<std::int32_t>(t % 3 == 0 ? 5 : (t * 131) % (rows + 10)));
            }
            std::iota(order.begin(), order.end(), 0);
            std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
              return ids[static_cast<std::size_t>(a)] < ids[static_cast<std::size_t>(b)];
            });
            EmbeddingForward a;
            a.tokens = f.integers(ids);
            a.weight = f.input(random(rows * hidden, 1, dtype), dtype, Shape{rows, hidden});
            a.out = f.output(dtype, Shape{tokens, hidden});
            a.first_row = 2;
            f.run(embedding_forward, a);
            EmbeddingBackward b;
            b.tokens = a.tokens;
            b.order = f.integers(order);
            b.dout = f.input(random(tokens * hidden, 2, dtype), dtype, Shape{tokens, hidden});
            b.dweight = f.output(DType::kF32, Shape{rows, hidden});
            b.first_row = 2;
            f.run(embedding_backward, b);
            b.accumulate = true;
            f.run(embedding_backward, b);
            return std::vector<Output>{{"out", f.values(a.out)}, {"dweight", f.values(b.dweight)}};
          }};
}

struct Documents {
  std::string name;
  std::vector<std::int32_t> queries, keys;
  std::int64_t heads_q, heads_kv, head_dim, window;
  std::int64_t extra_rows;
};

ParityCase attention_case(DType dtype, const Documents& c, bool is_packed) {
  // bf16: probabilities and their gradients are rounded before the second product.
  const double bound = dtype == DType::kBF16 ? 2 * epsilon_of(DType::kBF16) : 2e-5;
  return {"attention_" + tag(dtype) + "_" + c.name + (is_packed ? "_packed" : ""), bound, [=](OpFixture& f) {
            std::vector<std::int32_t> cu_q{0}, cu_k{0};
            for (const std::int32_t n : c.queries) cu_q.push_back(cu_q.back() + n);
            for (const std::int32_t n : c.keys) cu_k.push_back(cu_k.back() + n);
            const std::int64_t tq = cu_q.back() + c.extra_rows, tk = cu_k.back() + c.extra_rows;
            const std::int64_t q_cols = c.heads_q * c.head_dim, k_cols = c.heads_kv * c.head_dim;
            AttentionForward a;
            a.shape = {c.heads_q, c.heads_kv, c.head_dim, c.window,
                       *std::max_element(c.keys.begin(), c.keys.end()),
                       static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.head_dim)))};
            AttentionBackward b;
            if (is_packed) {
              const std::int64_t cols = q_cols + 2 * k_cols;
              const Tensor qkv = f.input(random(tq * cols, 1, dtype), dtype, Shape{tq, cols});
              const Tensor dqkv = f.output(dtype, Shape{tq, cols});
              a.q = qkv.col_slice(0, q_cols), b.dq = dqkv.col_slice(0, q_cols);
              a.k = qkv.col_slice(q_cols, k_cols), b.dk = dqkv.col_slice(q_cols, k_cols);
              a.v = qkv.col_slice(q_cols + k_cols, k_cols), b.dv = dqkv.col_slice(q_cols + k_cols, k_cols);
            } else {
              a.q = f.input(random(tq * q_cols, 1, dtype), dtype, Shape{tq, q_cols});
              a.k = f.input(random(tk * k_cols, 2, dtype), dtype, Shape{tk, k_cols});
              a.v = f.input(random(tk * k_cols, 3, dtype), dtype, Shape{tk, k_cols});
              b.dq = f.output(dtype, a.q.shape);
              b.dk = f.output(dtype, a.k.shape);
              b.dv = f.output(dtype, a.v.shape);
            }
            a.out = f.output(dtype, Shape{tq, q_cols});
            a.lse = f.output(DType::kF32, Shape{tq, c.heads_q});
            a.cu_q = f.integers(cu_q);
            a.cu_k = is_packed ? a.cu_q : f.integers(cu_k);
            f.run(attention_forward, a);
            b.dout = f.input(random(tq * q_cols, 4, dtype), dtype, Shape{tq, q_cols});
            b.q = a.q, b.k = a.k, b.v = a.v, b.out = a.out, b.lse = a.lse;
            b.cu_q = a.cu_q, b.cu_k = a.cu_k, b.shape = a.shape;
            f.run(attention_backward, b);
            return std::vector<Output>{{"out", f.values(a.out)},
                                       {"lse", f.values(a.lse.row_slice(0, cu_q.back()))},
                                       {"dq", f.values(b.dq)},
                                       {"dk", f.values(b.dk)},
                                       {"dv", f.values(b.dv)}};
          }};
}

ParityCase optimizer_case(DType weight, DType state, DType grad, bool master) {
  const std::string name = "adamw_" + tag(weight) + "_" + tag(state) + "_" + tag(grad) + (master ? "_master" : "");
  // A rounding decision of a stochastically rounded value may fall the other way: one unit in bf16.
  const bool is_noisy = state == DType::kBF16 || (weight == DType::kBF16 && !master);
  return {name, is_noisy ? epsilon_of(DType::kBF16) / 4 : bound_of(weight, 16), [=](OpFixture& f) {
            const std::int64_t n = 300'007;
            std::vector<ShardSegment> segments;
            std::int64_t at = 3;
            for (std::int32_t s = 0; at + 10 < n; ++s) {
              ShardSegment segment;
              segment.begin = at;
              segment.end = std::min<std::int64_t>(n - 2, at + 1 + (s * 7919) % 20'000);
              segment.local_begin = s;
              segment.global_begin = 1000 * s;
              segment.local_cols = 5 + s;
              segment.global_cols = 50 + 3 * s;
              segment.lr_scale = s % 2 == 0 ? 1.0f : 0.5f;
              segment.weight_decay = s % 3 == 0 ? 0.0f : 0.1f;
              segment.count_in_norm = s % 4 == 1 ? 0 : 1;
              segment.stream = s;
              segments.push_back(segment);
              at = segment.end + (s % 5 == 0 ? 13 : 0);
            }
            const Shape shape{n};
            AdamW a;
            a.weight = f.input(random(n, 1, weight), weight, shape);
            if (master) a.master = f.input(random(n, 1, DType::kF32), DType::kF32, shape);
            a.grad = f.input(random(n, 2, grad), grad, shape);
            a.m = f.input(random(n, 3, state, 0.1), state, shape);
            Values v = random(n, 4, state, 0.1);
            for (double& value : v) value = std::abs(value);
            a.v = f.input(v, state, shape);
            a.segments = f.bytes_of(segments);
            StepControl control;
            control.step = 4;
            control.adam_step = 3;
            control.learning_rate = 1e-2f;
            control.max_grad_norm = 1.0f;
            control.rounding_key = derive_key(42, RandomPurpose::kStochasticRounding, 4);
            a.control = f.bytes_of(std::vector<StepControl>{control});
            SumOfSquares squares;
            squares.grad = a.grad;
            squares.segments = a.segments;
            squares.sum = f.input({0.25}, DType::kF64, Shape{1});
            f.run(sum_of_squares, squares);
            StepControlFinish finish;
            finish.control = a.control;
            finish.sum = squares.sum;
            finish.denominator = f.input({100.0}, DType::kF64, Shape{1});
            f.run(step_control_finish, finish);
            f.run(adamw, a);
            const auto result = f.object<StepControl>(a.control);
            std::vector<Output> outputs{{"sum", f.values(squares.sum)},
                                        {"control", {result.grad_norm, result.grad_scale,
                                                     static_cast<double>(result.adam_step),
                                                     static_cast<double>(result.is_finite)}},
                                        {"weight", f.values(a.weight)},
                                        {"m", f.values(a.m)},
                                        {"v", f.values(a.v)}};
            if (master) outputs.push_back({"master", f.values(a.master)});
            return outputs;
          }};
}

ParityCase elementwise_case(DType dtype, std::int64_t rows, std::int64_t cols) {
  return {"elementwise_" + tag(dtype) + "_" + std::to_string(rows) + "x" + std::to_string(cols),
          bound_of(dtype, static_cast<double>(rows)), [=](OpFixture& f) {
            const Shape shape{rows, cols};
            const Tensor x = f.input(random(rows * cols, 1, dtype), dtype, shape);
            const Tensor y = f.input(random(rows * cols, 2, dtype), dtype, shape);
            const Tensor sum = f.output(dtype, shape);
            f.run(add, Add{x, y, sum});
            const Tensor wide = f.input(random(rows * cols, 3, DType::kF32), DType::kF32, shape);
            f.run(add, Add{wide, y, wide});
            const Tensor e4m3 = f.output(DType::kF8E4M3, shape), e5m2 = f.output(DType::kF8E5M2, shape);
            f.run(scale, Scale{x, e4m3, 300.0});
            f.run(scale, Scale{x, e5m2, 0.01});
            const Tensor columns = f.input(random(cols, 4, dtype), dtype, Shape{cols});
            f.run(column_sum, ColumnSum{x, columns, true});
            const Tensor parts = x.reshape(Shape{rows * cols});
            const Tensor total = f.output(dtype, Shape{rows * cols / 4});
            f.run(sum_parts, SumParts{parts, total, 4, false});
            const Tensor best = f.output(dtype, Shape{rows * cols / 4});
            f.run(sum_parts, SumParts{parts, best, 4, true});
            FillNormal fill;
            fill.out = f.output(dtype, shape);
            fill.key = derive_key(7, RandomPurpose::kInit, 0, 3);
            fill.first_row = 3;
            fill.first_col = 5;
            fill.global_cols = 2 * cols;
            fill.std = 0.02f;
            f.run(fill_normal, fill);
            return std::vector<Output>{{"add", f.values(sum)},      {"add_wide", f.values(wide)},
                                       {"e4m3", f.values(e4m3)},    {"e5m2", f.values(e5m2)},
                                       {"column_sum", f.values(columns)}, {"sum_parts", f.values(total)},
                                       {"max_parts", f.values(best)}, {"normal", f.values(fill.out)}};
          }};
}

// `lengths` and `count` documents without tokens, which cost the library scratch all the same.
std::vector<std::int32_t> with_empty(std::vector<std::int32_t> lengths, std::size_t count) {
  lengths.resize(lengths.size() + count, 0);
  return lengths;
}
Documents self_attention(const std::string& name, const std::vector<std::int32_t>& lengths, std::int64_t heads_q,
                         std::int64_t heads_kv, std::int64_t head_dim, std::int64_t window, std::int64_t extra_rows) {
  return {name, lengths, lengths, heads_q, heads_kv, head_dim, window, extra_rows};
}

std::vector<ParityCase> parity_cases() {
  const DType bf = DType::kBF16, fp = DType::kF32;
  std::vector<ParityCase> cases;
  for (const DType t : {bf, fp}) {
    cases.push_back(gemm_case(t, t, 384, 3072, 2048, false, true, false, false));
    cases.push_back(gemm_case(t, t, 384, 2048, 3072, false, false, false, false));
    cases.push_back(gemm_case(t, fp, 512, 1024, 384, true, false, true, false));
    cases.push_back(gemm_case(t, t, 257, 131, 67, false, true, true, true));
    cases.push_back(gemm_case(t, fp, 129, 120, 1000, false, true, false, true));
    cases.push_back(gemm_case(t, t, 1, 4096, 1024, false, true, false, true));
    for (const std::int64_t hidden : {2048, 4096, 5120, 8192, 12288, 20000, 4100}) {
      cases.push_back(norm_case(t, 301, hidden));
    }
    cases.push_back(rope_case(t, 211, {32, 8, 64}, 64, false));
    cases.push_back(rope_case(t, 211, {32, 8, 128}, 128, false));
    cases.push_back(rope_case(t, 211, {32, 8, 128}, 128, true));
    cases.push_back(rope_case(t, 700, {4, 2, 256}, 256, true));
    cases.push_back(rope_case(t, 211, {6, 2, 80}, 32, true));
    cases.push_back(rope_case(t, 211, {6, 2, 80}, 32, false));
    cases.push_back(swiglu_case(t, 97, 8192));
    cases.push_back(swiglu_case(t, 33, 14336));
    cases.push_back(swiglu_case(t, 33, 1001));
    cases.push_back(cross_entropy_case(t, 64, 128256, 128256));
    cases.push_back(cross_entropy_case(t, 33, 32064, 32003));
    cases.push_back(cross_entropy_case(t, 33, 1003, 1001));
    cases.push_back(embedding_case(t, 4096, 3000, 2048));
    cases.push_back(embedding_case(t, 777, 100, 99));
    cases.push_back(elementwise_case(t, 512, 4096));
    cases.push_back(elementwise_case(t, 77, 1004));
    cases.push_back(attention_case(t, {"llama8b", {512, 700}, {512, 700}, 32, 8, 128, 0, 0}, true));
    cases.push_back(attention_case(t, {"llama1b", {300, 1, 0, 723, 0}, {300, 1, 0, 723, 0}, 32, 8, 64, 0, 33}, true));
    cases.push_back(attention_case(t, {"window", {900, 150}, {900, 150}, 8, 8, 128, 200, 0}, true));
    cases.push_back(attention_case(t, {"chunks", {200, 64}, {800, 64}, 8, 2, 128, 0, 5}, false));
    cases.push_back(attention_case(t, {"head96", {300, 80}, {300, 80}, 6, 3, 96, 0, 0}, true));
    cases.push_back(attention_case(t, {"head256", {200, 80}, {200, 80}, 4, 1, 256, 0, 0}, true));
    cases.push_back(attention_case(t, {"many", std::vector<std::int32_t>(40, 31), std::vector<std::int32_t>(40, 31), 8, 2, 64, 0, 0}, true));
    // Heads in several turns of the library, then too many documents for it. Heads of 64 and 128 have kernels of
    // their own on Hopper; the others show those for any GPU.
    cases.push_back(attention_case(t, self_attention("turns", with_empty({512, 300}, 450), 32, 8, 96, 0, 0), true));
    cases.push_back(attention_case(t, self_attention("own_window96", with_empty({900, 150}, 1000), 8, 8, 96, 200, 0), true));
    cases.push_back(attention_case(t, self_attention("own128", with_empty({512, 700}, 2000), 32, 8, 128, 0, 0), true));
    cases.push_back(attention_case(t, self_attention("own64", with_empty({300, 1, 723}, 2000), 32, 8, 64, 0, 33), true));
    cases.push_back(attention_case(t, self_attention("own_window128", with_empty({900, 150}, 1000), 8, 8, 128, 200, 0), true));
    cases.push_back(attention_case(t, self_attention("own_window64", with_empty({257, 131}, 8000), 4, 1, 64, 37, 5), true));
    cases.push_back(attention_case(t, self_attention("own_odd", with_empty({131, 67, 1, 5}, 2000), 6, 2, 72, 0, 0), true));
    cases.push_back(attention_case(t, {"own_chunks64", {1, 77, 0}, {300, 129, 40}, 8, 4, 64, 50, 3}, false));
    cases.push_back(attention_case(t, {"own_chunks48", {1, 77, 0}, {300, 129, 40}, 8, 4, 48, 50, 3}, false));
    cases.push_back(attention_case(t, self_attention("long64", {2500, 1100}, 4, 2, 64, 0, 3), true));
  }
  cases.push_back(optimizer_case(bf, bf, bf, false));
  cases.push_back(optimizer_case(bf, fp, bf, true));
  cases.push_back(optimizer_case(bf, fp, fp, true));
  cases.push_back(optimizer_case(fp, fp, fp, false));
  cases.push_back(optimizer_case(bf, bf, fp, true));
  return cases;
}

class CudaParity : public ::testing::TestWithParam<ParityCase> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_P(CudaParity, MatchesCpuAndRepeats) {
  const ParityCase& c = GetParam();
  OpFixture cpu(Device{}, 8), first(Device{DeviceKind::kCuda, 0}), second(Device{DeviceKind::kCuda, 0});
  const auto want = c.run(cpu), got = c.run(first), again = c.run(second);
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = relative_error(got[i].values, want[i].values);
    std::printf("  %-44s %-10s error %.2e, bound %.2e\n", c.name.c_str(), got[i].name.c_str(), error, c.bound);
    EXPECT_LE(error, c.bound) << got[i].name;  // false for NaN
    expect_bitwise(got[i].name, got[i].values, again[i].values);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaParity, ::testing::ValuesIn(parity_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(CudaGemmChoices, ExportImportAndAutotuneGiveTheSameBits) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  const RunCase run = gemm_case(DType::kBF16, DType::kF32, 512, 1024, 768, true, false, true, false).run;
  ContextOptions options;
  options.autotune_gemm = true;
  OpFixture tuned(Device{DeviceKind::kCuda, 0}, options);
  const auto first = run(tuned);
  const std::string text = export_gemm_choices(tuned.context());
  EXPECT_NE(text.find("choices"), std::string::npos);
  OpFixture resumed(Device{DeviceKind::kCuda, 0});
  EXPECT_GE(import_gemm_choices(resumed.context(), text), 1);
  const auto second = run(resumed);
  expect_bitwise("c", first[0].values, second[0].values);
  EXPECT_THROW(import_gemm_choices(resumed.context(), "not an export"), Error);
}

}  // namespace
}  // namespace tessera::test
