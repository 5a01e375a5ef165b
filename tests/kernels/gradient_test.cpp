// Every backward against central differences of its forward in fp64: along a random direction in all
// inputs at once, and for single elements. The scalar is <out, dout> for a fixed random dout.
#include <gtest/gtest.h>

#include <functional>

#include "tests/kernels/cases/attention_cases.h"
#include "tests/kernels/cases/embedding_cases.h"
#include "tests/kernels/cases/rope_cases.h"
#include "tests/support/op_fixture.h"

namespace tessera::test {
namespace {

constexpr DType kF64 = DType::kF64;

double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

Values moved(const Values& x, const Values& direction, double step) {
  Values y = x;
  for (std::size_t i = 0; i < y.size(); ++i) y[i] += step * direction[i];
  return y;
}

// `scalar` of the input blocks, and the gradient that the backward op gives for each block.
void expect_gradients(const std::vector<Values>& inputs, const std::vector<Values>& gradients,
                      const std::function<double(const std::vector<Values>&)>& scalar) {
  ASSERT_EQ(inputs.size(), gradients.size());
  // The error of a central difference is step^2 f''' / 6 + eps |f| / step: about 1e-10 each here.
  const double step = 1e-5, tolerance = 1e-7;
  const auto difference = [&](const std::vector<Values>& directions) {
    std::vector<Values> plus, minus;
    for (std::size_t b = 0; b < inputs.size(); ++b) {
      plus.push_back(moved(inputs[b], directions[b], step));
      minus.push_back(moved(inputs[b], directions[b], -step));
    }
    return (scalar(plus) - scalar(minus)) / (2 * step);
  };
  std::vector<Values> zero;
  for (const Values& x : inputs) zero.emplace_back(x.size(), 0.0);
  for (std::size_t b = 0; b < inputs.size(); ++b) {
    ASSERT_EQ(inputs[b].size(), gradients[b].size()) << "input " << b;
    std::vector<Values> directions = zero;
    directions[b] = normal_values(static_cast<std::int64_t>(inputs[b].size()), 100 + b);
    const double want = difference(directions), got = dot(gradients[b], directions[b]);
    EXPECT_NEAR(got, want, tolerance * (1 + std::abs(want))) << "input " << b << ", a random direction";
    const std::size_t stride = std::max<std::size_t>(1, inputs[b].size() / 40);
    for (std::size_t i = 0; i < inputs[b].size(); i += stride) {
      directions = zero;
      directions[b][i] = 1;
      const double element = difference(directions);
      EXPECT_NEAR(gradients[b][i], element, tolerance * (1 + std::abs(element)))
          << "input " << b << ", element " << i;
    }
  }
}

TEST(GemmGradient, ProductsOfTheGradientMatchFiniteDifferences) {
  const std::int64_t m = 5, n = 7, k = 3;
  const Values x = normal_values(m * k, 1), w = normal_values(n * k, 2), dy = normal_values(m * n, 3);
  OpFixture f;
  const Tensor dy_t = f.input(dy, kF64, Shape{m, n});
  const Tensor dx = f.output(kF64, Shape{m, k}), dw = f.output(kF64, Shape{n, k});
  f.run(gemm, Gemm{dy_t, f.input(w, kF64, Shape{n, k}), dx});
  f.run(gemm, Gemm{dy_t, f.input(x, kF64, Shape{m, k}), dw, true});
  expect_gradients({x, w}, {f.values(dx), f.values(dw)}, [&](const std::vector<Values>& in) {
    OpFixture g;
    const Tensor y = g.output(kF64, Shape{m, n});
    g.run(gemm, Gemm{g.input(in[0], kF64, Shape{m, k}), g.input(in[1], kF64, Shape{n, k}), y, false, true});
    return dot(g.values(y), dy);
  });
}

TEST(EmbeddingGradient, BackwardMatchesFiniteDifference) {
  const EmbeddingCase c{19, 7, 5, 2};
  const std::vector<std::int32_t> tokens = embedding_tokens(c);
  const Values weight = normal_values(c.rows * c.hidden, 1), dout = normal_values(c.tokens * c.hidden, 2);
  OpFixture f;
  EmbeddingBackward backward;
  backward.tokens = f.integers(tokens);
  backward.order = f.integers(sorted_positions(tokens));
  backward.dout = f.input(dout, kF64, Shape{c.tokens, c.hidden});
  backward.dweight = f.output(kF64, Shape{c.rows, c.hidden});
  backward.first_row = c.first_row;
  f.run(embedding_backward, backward);
  expect_gradients({weight}, {f.values(backward.dweight)}, [&](const std::vector<Values>& in) {
    OpFixture g;
    EmbeddingForward forward;
    forward.tokens = g.integers(tokens);
    forward.weight = g.input(in[0], kF64, Shape{c.rows, c.hidden});
    forward.out = g.output(kF64, Shape{c.tokens, c.hidden});
    forward.first_row = c.first_row;
    g.run(embedding_forward, forward);
    return dot(g.values(forward.out), dout);
  });
}

// Two outputs: the norm, and the sum that continues as residual stream.
TEST(RmsNormGradient, BackwardMatchesFiniteDifference) {
  for (const auto& [tokens, hidden] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {3, 7}, {18, 13}}) {
    const Shape shape{tokens, hidden};
    const Values x = normal_values(tokens * hidden, 1), delta = normal_values(tokens * hidden, 2);
    const Values weight = normal_values(hidden, 3);
    const Values dout = normal_values(tokens * hidden, 4), dsum = normal_values(tokens * hidden, 5);
    OpFixture f;
    const auto forward = [&, tokens = tokens, hidden = hidden](OpFixture& g, const std::vector<Values>& in) {
      RmsNormForward args;
      args.x = g.input(in[0], kF64, shape);
      args.delta = g.input(in[1], kF64, shape);
      args.weight = g.input(in[2], kF64, Shape{hidden});
      args.sum = g.output(kF64, shape);
      args.out = g.output(kF64, shape);
      args.rstd = g.output(kF64, Shape{tokens});
      g.run(rmsnorm_forward, args);
      return args;
    };
    const RmsNormForward done = forward(f, {x, delta, weight});
    RmsNormBackward backward;
    backward.dout = f.input(dout, kF64, shape);
    backward.s = done.sum;
    backward.weight = done.weight;
    backward.rstd = done.rstd;
    backward.dsum = f.input(dsum, kF64, shape);
    backward.dx = backward.dsum;
    backward.dweight = f.output(kF64, Shape{hidden});
    f.run(rmsnorm_backward, backward);
    const Values dx = f.values(backward.dx);
    expect_gradients({x, delta, weight}, {dx, dx, f.values(backward.dweight)},
                     [&](const std::vector<Values>& in) {
      OpFixture g;
      const RmsNormForward args = forward(g, in);
      return dot(g.values(args.out), dout) + dot(g.values(args.sum), dsum);
    });
  }
}

TEST(RopeGradient, BackwardMatchesFiniteDifference) {
  for (const bool norm : {false, true}) {
    const RopeCase c{17, 3, 2, 10, 6, norm};
    const QkvLayout layout = c.layout();
    const RopeTables tables = RopeTables::of(c, kF64);
    const Shape shape{c.tokens, layout.cols()}, table_shape{kRopePositions, tables.half};
    const Values in = normal_values(shape.numel(), 1), q_norm = normal_values(c.head_dim, 2);
    const Values k_norm = normal_values(c.head_dim, 3), dout = normal_values(shape.numel(), 4);
    const auto forward = [&](OpFixture& g, const std::vector<Values>& values) {
      QkvRopeForward args;
      args.layout = layout;
      args.in = g.input(values[0], kF64, shape);
      args.out = g.output(kF64, shape);
      args.cos = g.input(tables.cos, kF64, table_shape);
      args.sin = g.input(tables.sin, kF64, table_shape);
      args.positions = g.integers(tables.positions);
      if (norm) {
        args.q_norm = g.input(values[1], kF64, Shape{c.head_dim});
        args.k_norm = g.input(values[2], kF64, Shape{c.head_dim});
        args.rstd = g.output(kF64, Shape{c.tokens, c.heads_q + c.heads_kv});
      }
      g.run(qkv_rope_forward, args);
      return args;
    };
    std::vector<Values> inputs{in};
    if (norm) inputs = {in, q_norm, k_norm};
    OpFixture f;
    const QkvRopeForward done = forward(f, inputs);
    QkvRopeBackward backward;
    backward.layout = layout;
    backward.d = f.input(dout, kF64, shape);
    backward.cos = done.cos;
    backward.sin = done.sin;
    backward.positions = done.positions;
    if (norm) {
      backward.in = done.in;
      backward.q_norm = done.q_norm;
      backward.k_norm = done.k_norm;
      backward.rstd = done.rstd;
      backward.dq_norm = f.output(kF64, Shape{c.head_dim});
      backward.dk_norm = f.output(kF64, Shape{c.head_dim});
    }
    f.run(qkv_rope_backward, backward);
    std::vector<Values> gradients{f.values(backward.d)};
    if (norm) {
      gradients.push_back(f.values(backward.dq_norm));
      gradients.push_back(f.values(backward.dk_norm));
    }
    expect_gradients(inputs, gradients, [&](const std::vector<Values>& values) {
      OpFixture g;
      return dot(g.values(forward(g, values).out), dout);
    });
  }
}

TEST(AttentionGradient, BackwardMatchesFiniteDifference) {
  const std::vector<AttentionCase> list{
      {"packed", {3, 9, 0, 1}, {3, 9, 0, 1}, 4, 2, 5, 0, 2},
      {"window", {12, 4}, {12, 4}, 2, 1, 4, 5},
      {"chunk", {3, 0, 5}, {7, 2, 70}, 2, 2, 3},
  };
  for (const AttentionCase& c : list) {
    const std::vector<std::int32_t> cu_q = cumulative(c.queries), cu_k = cumulative(c.keys);
    const Shape q_shape{cu_q.back() + c.extra_rows, c.heads_q * c.head_dim};
    const Shape k_shape{cu_k.back() + c.extra_rows, c.heads_kv * c.head_dim};
    const Values q = normal_values(q_shape.numel(), 1), k = normal_values(k_shape.numel(), 2);
    const Values v = normal_values(k_shape.numel(), 3), dout = normal_values(q_shape.numel(), 4);
    const auto forward = [&](OpFixture& g, const std::vector<Values>& in) {
      AttentionForward args;
      args.shape = {c.heads_q, c.heads_kv, c.head_dim, c.window, 128, 0.5f};
      args.q = g.input(in[0], kF64, q_shape);
      args.k = g.input(in[1], kF64, k_shape);
      args.v = g.input(in[2], kF64, k_shape);
      args.out = g.output(kF64, q_shape);
      args.lse = g.output(kF64, Shape{q_shape[0], c.heads_q});
      args.cu_q = g.integers(cu_q);
      args.cu_k = g.integers(cu_k);
      g.run(attention_forward, args);
      return args;
    };
    OpFixture f;
    const AttentionForward done = forward(f, {q, k, v});
    AttentionBackward backward;
    backward.dout = f.input(dout, kF64, q_shape);
    backward.q = done.q, backward.k = done.k, backward.v = done.v;
    backward.out = done.out, backward.lse = done.lse;
    backward.dq = f.output(kF64, q_shape);
    backward.dk = f.output(kF64, k_shape);
    backward.dv = f.output(kF64, k_shape);
    backward.cu_q = done.cu_q, backward.cu_k = done.cu_k;
    backward.shape = done.shape;
    f.run(attention_backward, backward);
    SCOPED_TRACE(c.tag);
    expect_gradients({q, k, v}, {f.values(backward.dq), f.values(backward.dk), f.values(backward.dv)},
                     [&](const std::vector<Values>& in) {
      OpFixture g;
      return dot(g.values(forward(g, in).out), dout);
    });
  }
}

TEST(SwiGluGradient, BackwardMatchesFiniteDifference) {
  const std::int64_t tokens = 5, ffn = 11;
  const Values in = normal_values(tokens * 2 * ffn, 1, 2.0), dout = normal_values(tokens * ffn, 2);
  OpFixture f;
  SwiGluBackward backward;
  backward.dout = f.input(dout, kF64, Shape{tokens, ffn});
  backward.gate_up = f.input(in, kF64, Shape{tokens, 2 * ffn});
  backward.dgate_up = f.output(kF64, Shape{tokens, 2 * ffn});
  f.run(swiglu_backward, backward);
  expect_gradients({in}, {f.values(backward.dgate_up)}, [&](const std::vector<Values>& values) {
    OpFixture g;
    SwiGluForward forward{g.input(values[0], kF64, Shape{tokens, 2 * ffn}), g.output(kF64, Shape{tokens, ffn})};
    g.run(swiglu_forward, forward);
    return dot(g.values(forward.out), dout);
  });
}

TEST(CrossEntropyGradient, BackwardMatchesFiniteDifference) {
  const std::int64_t rows = 6, cols = 13, valid = 11;
  const Values logits = normal_values(rows * cols, 1, 2.0);
  const std::vector<std::int32_t> targets{4, -100, 10, 0, -1, 7};
  const auto loss = [&](OpFixture& g, const Values& values, CrossEntropyBackward* backward) {
    CrossEntropyStats stats;
    stats.logits = g.input(values, kF64, Shape{rows, cols});
    stats.targets = g.integers(targets);
    stats.stats = g.output(kF64, Shape{rows, 3});
    stats.valid_cols = valid;
    g.run(cross_entropy_stats, stats);
    CrossEntropyCombine combine;
    combine.stats = stats.stats.reshape(Shape{1, rows, 3});
    combine.targets = stats.targets;
    combine.lse = g.output(kF64, Shape{rows});
    combine.loss_sum = g.input({0.0}, kF64, Shape{1});
    g.run(cross_entropy_combine, combine);
    if (backward != nullptr) *backward = {stats.logits, stats.targets, combine.lse, 0, valid};
    return g.values(combine.loss_sum)[0];
  };
  OpFixture f;
  CrossEntropyBackward backward;
  loss(f, logits, &backward);
  f.run(cross_entropy_backward, backward);
  expect_gradients({logits}, {f.values(backward.logits)}, [&](const std::vector<Values>& in) {
    OpFixture g;
    return loss(g, in[0], nullptr);
  });
}

TEST(ColumnSumGradient, IsTheGradientOfABias) {
  const std::int64_t m = 9, n = 5, k = 4;
  const Values x = normal_values(m * k, 1), w = normal_values(k * n, 2), bias = normal_values(n, 3);
  const Values dy = normal_values(m * n, 4);
  OpFixture f;
  ColumnSum sum{f.input(dy, kF64, Shape{m, n}), f.output(kF64, Shape{n})};
  f.run(column_sum, sum);
  expect_gradients({bias}, {f.values(sum.out)}, [&](const std::vector<Values>& in) {
    OpFixture g;
    Gemm args{g.input(x, kF64, Shape{m, k}), g.input(w, kF64, Shape{k, n}), g.output(kF64, Shape{m, n})};
    args.bias = g.input(in[0], kF64, Shape{n});
    g.run(gemm, args);
    return dot(g.values(args.c), dy);
  });
}

}  // namespace
}  // namespace tessera::test
