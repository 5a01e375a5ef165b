// Cases of the op list: see op_cases.h.
#pragma once

#include "tests/kernels/op_cases.h"

namespace tessera::test {

struct LossCase {
  std::int64_t rows, vocab;    // true vocabulary
  int shards = 1;
  std::int64_t shard_cols = 0; // columns of a shard, padding included; 0: vocab / shards rounded up
  double center = 0;           // all logits are about this
  bool all_ignored = false;
};

// All three ops in a row, the shards one after the other as tensor-parallel ranks would.
inline std::vector<OpOutput> run_cross_entropy(OpFixture& f, DType dtype, const LossCase& c) {
  const std::int64_t cols = c.shard_cols > 0 ? c.shard_cols : (c.vocab + c.shards - 1) / c.shards;
  Values logits = normal_values(c.rows * c.vocab, 1, 2.0);
  for (double& logit : logits) logit += c.center;
  logits = rounded(logits, dtype);
  std::vector<std::int32_t> targets;
  for (std::int64_t t = 0; t < c.rows; ++t) {
    const auto target = static_cast<std::int32_t>(t == 0 ? c.vocab - 1 : (t * 7919) % c.vocab);
    targets.push_back(c.all_ignored || t % 5 == 3 ? -100 : target);
  }
  const DType statistics = statistics_type(dtype);
  const Tensor target_ids = f.integers(targets);
  const Tensor stats = f.output(statistics, Shape{c.shards, c.rows, 3});
  std::vector<CrossEntropyBackward> shards;
  for (int s = 0; s < c.shards; ++s) {
    const std::int64_t first = s * cols, valid = std::clamp<std::int64_t>(c.vocab - first, 0, cols);
    Values piece;
    for (std::int64_t t = 0; t < c.rows; ++t) {
      // Padding holds large values, which must not matter.
      for (std::int64_t j = 0; j < cols; ++j) {
        piece.push_back(j < valid ? logits[static_cast<std::size_t>(t * c.vocab + first + j)] : 1000.0);
      }
    }
    CrossEntropyStats args;
    args.logits = f.input(piece, dtype, Shape{c.rows, cols}, 3);
    args.targets = target_ids;
    args.stats = stats.reshape(Shape{c.shards * c.rows, 3}).row_slice(s * c.rows, c.rows);
    args.first_row = first;
    args.valid_cols = valid;
    f.run(cross_entropy_stats, args);
    CrossEntropyBackward backward;
    backward.logits = args.logits;
    backward.targets = target_ids;
    backward.first_row = first;
    backward.valid_cols = valid;
    shards.push_back(backward);
  }
  CrossEntropyCombine combine;
  combine.stats = stats;
  combine.targets = target_ids;
  combine.lse = f.output(statistics, Shape{c.rows});
  combine.nll = f.output(statistics, Shape{c.rows});
  const double before = 2.5;
  combine.loss_sum = f.input({before}, DType::kF64, Shape{1});
  f.run(cross_entropy_combine, combine);

  OpOutput lse{"lse", f.values(combine.lse), {}, {}}, nll{"nll", f.values(combine.nll), {}, {}};
  OpOutput loss{"loss_sum", f.values(combine.loss_sum), {before}, {1e-12 * static_cast<double>(c.rows)}};
  const double u = epsilon_of(statistics) / 2, stored = epsilon_of(dtype) / 2;
  const double k = std::sqrt(static_cast<double>(c.vocab)) + 16;
  std::vector<OpOutput> outputs;
  Values sums;
  for (std::int64_t t = 0; t < c.rows; ++t) {
    const double* row = logits.data() + t * c.vocab;
    const double top = *std::max_element(row, row + c.vocab);
    double sum = 0;
    for (std::int64_t j = 0; j < c.vocab; ++j) sum += std::exp(row[j] - top);
    sums.push_back(top + std::log(sum));
    lse.want.push_back(sums.back());
    // exp of a difference x errs by about (1 + |x|) u; its sum over the row by k u.
    const double error = 2 * u * (k + 16);
    lse.bound.push_back(error + u * std::abs(sums.back()));
    const std::int32_t target = targets[static_cast<std::size_t>(t)];
    const double row_loss = target < 0 ? 0.0 : sums.back() - row[target];
    nll.want.push_back(row_loss);
    // The maximum and the target's logit are exact; their difference is taken at their size.
    nll.bound.push_back(target < 0 ? 0.0 : error + u * (std::abs(row_loss) + std::abs(sums.back())));
    loss.want[0] += row_loss;
    loss.bound[0] += nll.bound.back();
  }
  for (int s = 0; s < c.shards; ++s) {
    CrossEntropyBackward& args = shards[static_cast<std::size_t>(s)];
    args.lse = combine.lse;
    f.run(cross_entropy_backward, args);
    OpOutput d{"dlogits" + std::to_string(s), f.values(args.logits), {}, {}};
    for (std::int64_t t = 0; t < c.rows; ++t) {
      const std::int32_t target = targets[static_cast<std::size_t>(t)];
      for (std::int64_t j = 0; j < cols; ++j) {
        double y = 0, bound = 0;
        if (target >= 0 && j < args.valid_cols) {
          const std::int64_t id = args.first_row + j;
          const double logit = logits[static_cast<std::size_t>(t * c.vocab + id)];
          const double p = std::exp(logit - sums[static_cast<std::size_t>(t)]);
          y = p - (id == target ? 1.0 : 0.0);
          // The stored lse is off by its bound, which multiplies p.
          bound = stored * std::abs(y) * (1 + 1e-6) + p * (lse.bound[static_cast<std::size_t>(t)] + 40 * u) +
                  (id == target ? u : 0.0) + Bound::tiny();
        }
        d.want.push_back(y);
        d.bound.push_back(bound);
      }
    }
    outputs.push_back(d);
  }
  outputs.push_back(lse);
  outputs.push_back(nll);
  outputs.push_back(loss);
  return outputs;
}

inline void add_cross_entropy_cases(std::vector<OpCase>& cases) {
  const std::vector<LossCase> list{
      {1, 2},
      {7, 37, 1, 48},               // padded columns
      {6, 1003, 1, 1024, -40},      // a zero-filled lane would dominate
      {6, 1003, 2, 512, -40},
      {5, 1003, 4, 256, 60},
      {4, 130, 3, 64, -40},         // the last shard is all padding but two
      {4, 128, 3, 64},              // the last shard is all padding
      {3, 32000, 1, 32000, -40},
      {2, 65537, 2, 32896, -40},
      {2, 151936, 1, 0, -40},
      {9, 50, 2, 0, 0, true},
  };
  for (const DType dtype : float_types()) {
    for (const LossCase& c : list) {
      cases.push_back({"cross_entropy_" + dtype_tag(dtype) + "_" + std::to_string(c.rows) + "x" +
                           std::to_string(c.vocab) + "_in_" + std::to_string(c.shards) +
                           (c.shard_cols ? "_of_" + std::to_string(c.shard_cols) : "") +
                           (c.all_ignored ? "_ignored" : ""),
                       dtype, [=](OpFixture& f) { return run_cross_entropy(f, dtype, c); }});
    }
  }
}

}  // namespace tessera::test
