// Cases of the op list: see op_cases.h.
#pragma once

#include <numeric>

#include "tests/kernels/op_cases.h"

namespace tessera::test {

struct EmbeddingCase {
  std::int64_t tokens, rows, hidden, first_row;
  bool accumulate = false;
  bool fp32_gradient = false;
  std::int64_t gap = 0;
};

// Token ids around the shard [first_row, first_row + rows): some in other shards, some repeated often.
inline std::vector<std::int32_t> embedding_tokens(const EmbeddingCase& c) {
  std::vector<std::int32_t> tokens;
  const PhiloxKey key = derive_key(9, RandomPurpose::kSynthetic);
  const std::int64_t vocabulary = c.first_row + c.rows + (c.first_row > 0 ? 5 : 0);
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    const std::uint32_t bits = philox_bits(key, static_cast<std::uint64_t>(t));
    // A third of all positions hold one token.
    tokens.push_back(static_cast<std::int32_t>(bits % 3 == 0 ? c.first_row : bits / 3 % static_cast<std::uint32_t>(vocabulary)));
  }
  return tokens;
}

inline std::vector<std::int32_t> sorted_positions(const std::vector<std::int32_t>& tokens) {
  std::vector<std::int32_t> order(tokens.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return tokens[static_cast<std::size_t>(a)] < tokens[static_cast<std::size_t>(b)];
  });
  return order;
}

inline std::vector<OpOutput> run_embedding_forward(OpFixture& f, DType dtype, const EmbeddingCase& c) {
  const Values weight = rounded(normal_values(c.rows * c.hidden, 1), dtype);
  const std::vector<std::int32_t> tokens = embedding_tokens(c);
  EmbeddingForward args;
  args.tokens = f.integers(tokens);
  args.weight = f.input(weight, dtype, Shape{c.rows, c.hidden}, c.gap);
  args.out = f.output(dtype, Shape{c.tokens, c.hidden}, c.gap);
  args.first_row = c.first_row;
  f.run(embedding_forward, args);
  OpOutput out{"out", f.values(args.out), {}, {}};
  for (const std::int32_t token : tokens) {
    const std::int64_t r = token - c.first_row;
    for (std::int64_t j = 0; j < c.hidden; ++j) {
      out.want.push_back(r >= 0 && r < c.rows ? weight[static_cast<std::size_t>(r * c.hidden + j)] : 0.0);
      out.bound.push_back(0);
    }
  }
  return {out};
}

inline std::vector<OpOutput> run_embedding_backward(OpFixture& f, DType dtype, const EmbeddingCase& c) {
  const DType gradient = c.fp32_gradient ? DType::kF32 : dtype;
  const Values dout = rounded(normal_values(c.tokens * c.hidden, 1), dtype);
  const Values old = rounded(normal_values(c.rows * c.hidden, 2), gradient);
  const std::vector<std::int32_t> tokens = embedding_tokens(c);
  EmbeddingBackward args;
  args.tokens = f.integers(tokens);
  args.order = f.integers(sorted_positions(tokens));
  args.dout = f.input(dout, dtype, Shape{c.tokens, c.hidden}, c.gap);
  const Shape shape{c.rows, c.hidden};
  args.dweight = c.accumulate ? f.input(old, gradient, shape, c.gap) : f.output(gradient, shape, c.gap);
  args.first_row = c.first_row;
  args.accumulate = c.accumulate;
  f.run(embedding_backward, args);
  OpOutput out{"dweight", f.values(args.dweight), {}, {}};
  const Bound bound = Bound::of(gradient, dtype);
  for (std::int64_t r = 0; r < c.rows; ++r) {
    for (std::int64_t j = 0; j < c.hidden; ++j) {
      double sum = c.accumulate ? old[static_cast<std::size_t>(r * c.hidden + j)] : 0.0;
      double magnitude = std::abs(sum);
      std::int64_t terms = 0;
      for (std::int64_t t = 0; t < c.tokens; ++t) {
        if (tokens[static_cast<std::size_t>(t)] - c.first_row != r) continue;
        sum += dout[static_cast<std::size_t>(t * c.hidden + j)];
        magnitude += std::abs(dout[static_cast<std::size_t>(t * c.hidden + j)]);
        ++terms;
      }
      out.want.push_back(sum);
      out.bound.push_back(terms == 0 ? 0 : bound.sum(sum, terms, magnitude));
    }
  }
  return {out};
}

inline void add_embedding_cases(std::vector<OpCase>& cases) {
  const std::vector<EmbeddingCase> list{{1, 1, 1, 0},
                                        {37, 11, 7, 0},
                                        {130, 67, 24, 67, true, false, 3},
                                        {211, 300, 523, 13, false, true},
                                        {64, 40, 16, 0, true, true}};
  for (const DType dtype : float_types()) {
    for (const EmbeddingCase& c : list) {
      if (c.fp32_gradient && dtype == DType::kF64) continue;
      const std::string tag = "_" + dtype_tag(dtype) + "_" + std::to_string(c.tokens) + "x" +
                              std::to_string(c.rows) + "x" + std::to_string(c.hidden);
      cases.push_back({"embedding_forward" + tag, dtype,
                       [=](OpFixture& f) { return run_embedding_forward(f, dtype, c); }});
      cases.push_back({"embedding_backward" + tag + (c.accumulate ? "_acc" : "") + (c.fp32_gradient ? "_to_fp32" : ""),
                       dtype, [=](OpFixture& f) { return run_embedding_backward(f, dtype, c); }});
    }
  }
}

}  // namespace tessera::test
