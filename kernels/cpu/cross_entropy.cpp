// Softmax statistics of a vocabulary shard, their combination, and softmax - onehot in place. Rows are
// independent; the loss is summed in row order. Bound by memory (exp is vectorised).
#include "kernels/cross_entropy.h"

#include <cmath>
#include <limits>

#include "kernels/cpu/common.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/ops.h"

namespace tessera::cpu {
namespace {

// Largest element; NaN is not looked for (it comes back through the sum of exponentials).
template <typename T>
Compute<T> row_maximum(const T* x, std::int64_t n) {
  Compute<T> best = -std::numeric_limits<Compute<T>>::infinity();
#pragma omp simd reduction(max : best)
  for (std::int64_t j = 0; j < n; ++j) best = load(x[j]) > best ? load(x[j]) : best;
  return best;
}

template <typename T>
void stats_row(const CrossEntropyStats& args, std::int64_t t) {
  using C = Compute<T>;
  const T* logits = row<T>(args.logits, t);
  C* stats = static_cast<C*>(args.stats.data) + 3 * t;
  const std::int64_t valid = args.valid_cols;
  const C maximum = row_maximum(logits, valid);
  const C shift = std::isinf(maximum) && maximum < 0 ? C(0) : maximum;
  stats[0] = maximum;
  stats[1] = static_cast<C>(fixed_sum<C>(valid, [=](std::int64_t j) { return exp_of(load(logits[j]) - shift); }));
  const std::int64_t target = static_cast<const std::int32_t*>(args.targets.data)[t];
  const std::int64_t col = target - args.first_row;
  stats[2] = target >= 0 && col >= 0 && col < valid ? load(logits[col]) : C(0);
}

template <typename C>
void combine(const CrossEntropyCombine& args) {
  const std::int64_t shards = args.stats.shape[0], count = args.stats.shape[1];
  const C* stats = static_cast<const C*>(args.stats.data);
  const auto* targets = static_cast<const std::int32_t*>(args.targets.data);
  C* lse = static_cast<C*>(args.lse.data);
  C* nll = args.nll.defined() ? static_cast<C*>(args.nll.data) : nullptr;
  double loss = 0;
  for (std::int64_t t = 0; t < count; ++t) {
    const auto shard = [&](std::int64_t s) { return stats + (s * count + t) * 3; };
    double maximum = -std::numeric_limits<double>::infinity();
    double target_logit = 0;
    for (std::int64_t s = 0; s < shards; ++s) {
      maximum = std::max(maximum, static_cast<double>(shard(s)[0]));
      target_logit += static_cast<double>(shard(s)[2]);
    }
    double sum = 0;
    for (std::int64_t s = 0; s < shards; ++s) {
      // A shard of padding only has the maximum -inf and no mass.
      if (shard(s)[1] == C(0)) continue;
      sum += std::exp(static_cast<double>(shard(s)[0]) - maximum) * static_cast<double>(shard(s)[1]);
    }
    const double log_sum = std::log(sum);
    lse[t] = static_cast<C>(maximum + log_sum);
    // maximum - target first: no rounding at the size of the logits enters the loss.
    const double row_loss = targets[t] < 0 ? 0.0 : (maximum - target_logit) + log_sum;
    if (nll != nullptr) nll[t] = static_cast<C>(row_loss);
    loss += row_loss;
  }
  if (args.loss_sum.defined()) *static_cast<double*>(args.loss_sum.data) += loss;
}

template <typename T>
void backward_row(const CrossEntropyBackward& args, std::int64_t t) {
  using C = Compute<T>;
  T* logits = row<T>(args.logits, t);
  const std::int64_t target = static_cast<const std::int32_t*>(args.targets.data)[t];
  if (target < 0) {
    std::fill(logits, logits + args.logits.cols(), store<T>(C(0)));
    return;
  }
  const C lse = static_cast<const C*>(args.lse.data)[t];
  const std::int64_t col = target - args.first_row;
  const bool is_here = col >= 0 && col < args.valid_cols;
  const C at_target = is_here ? exp_of(load(logits[col]) - lse) - C(1) : C(0);
#pragma omp simd
  for (std::int64_t j = 0; j < args.valid_cols; ++j) logits[j] = store<T>(exp_of(load(logits[j]) - lse));
  if (is_here) logits[col] = store<T>(at_target);
  std::fill(logits + args.valid_cols, logits + args.logits.cols(), store<T>(C(0)));
}

}  // namespace

void cross_entropy_stats(const CrossEntropyStats& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    visit_float(args.logits.dtype, [&]<typename T>(TypeTag<T>) {
      team.parallel_for(args.logits.rows(), row_grain(4 * args.logits.cols()),
                        [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) stats_row<T>(args, t);
      });
    });
  });
}

void cross_entropy_combine(const CrossEntropyCombine& args, Stream& stream) {
  as_cpu(stream).enqueue([args] {
    if (args.stats.dtype == DType::kF64) return combine<double>(args);
    combine<float>(args);
  });
}

void cross_entropy_backward(const CrossEntropyBackward& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    visit_float(args.logits.dtype, [&]<typename T>(TypeTag<T>) {
      team.parallel_for(args.logits.rows(), row_grain(4 * args.logits.cols()),
                        [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) backward_row<T>(args, t);
      });
    });
  });
}

}  // namespace tessera::cpu
