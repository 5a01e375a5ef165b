#include "kernels/cross_entropy.h"

#include "kernels/check.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

void check_columns(const ArgumentCheck& arg, const Tensor& logits, std::int64_t first_row,
                   std::int64_t valid_cols) {
  CHECK(first_row >= 0, "[{}] first_row is {}, expected a global token id", arg.op(), first_row);
  CHECK(valid_cols >= 0 && valid_cols <= logits.cols(),
        "[{}] valid_cols is {}, expected 0 to {} to match logits {}", arg.op(), valid_cols,
        logits.cols(), to_string(logits.shape));
}

}  // namespace

void check(const CrossEntropyStats& args) {
  ArgumentCheck arg("cross_entropy_stats");
  arg.matrix("logits", args.logits);
  arg.dtype("logits", args.logits, {DType::kBF16, DType::kF32, DType::kF64});
  arg.shape("targets", args.targets, Shape{args.logits.rows()}, "logits", args.logits);
  arg.dtype("targets", args.targets, {DType::kI32});
  arg.shape("stats", args.stats, Shape{args.logits.rows(), 3}, "logits", args.logits);
  arg.dtype("stats", args.stats, {compute_dtype(args.logits.dtype)});
  arg.dense("stats", args.stats);
  arg.separate("stats", args.stats, "logits", args.logits);
  check_columns(arg, args.logits, args.first_row, args.valid_cols);
}

std::size_t workspace(const CrossEntropyStats&, const Capabilities&) { return 0; }

void check(const CrossEntropyCombine& args) {
  ArgumentCheck arg("cross_entropy_combine");
  arg.defined("stats", args.stats);
  arg.dtype("stats", args.stats, {DType::kF32, DType::kF64});
  CHECK(args.stats.shape.rank == 3 && args.stats.shape[2] == 3 && args.stats.shape[0] >= 1,
        "[cross_entropy_combine] stats is {}, expected [shards, C, 3]", to_string(args.stats.shape));
  arg.dense("stats", args.stats);
  const Shape rows{args.stats.shape[1]};
  arg.shape("targets", args.targets, rows, "stats", args.stats);
  arg.dtype("targets", args.targets, {DType::kI32});
  arg.shape("lse", args.lse, rows, "stats", args.stats);
  arg.dtype("lse", args.lse, {args.stats.dtype});
  if (args.nll.defined()) {
    arg.shape("nll", args.nll, rows, "stats", args.stats);
    arg.dtype("nll", args.nll, {args.stats.dtype});
    arg.separate("nll", args.nll, "lse", args.lse);
  }
  if (args.loss_sum.defined()) {
    arg.shape("loss_sum", args.loss_sum, Shape{1}, "a single sum over", args.stats);
    arg.dtype("loss_sum", args.loss_sum, {DType::kF64});
  }
}

std::size_t workspace(const CrossEntropyCombine&, const Capabilities&) { return 0; }

void check(const CrossEntropyBackward& args) {
  ArgumentCheck arg("cross_entropy_backward");
  arg.matrix("logits", args.logits);
  arg.dtype("logits", args.logits, {DType::kBF16, DType::kF32, DType::kF64});
  arg.shape("targets", args.targets, Shape{args.logits.rows()}, "logits", args.logits);
  arg.dtype("targets", args.targets, {DType::kI32});
  arg.shape("lse", args.lse, Shape{args.logits.rows()}, "logits", args.logits);
  arg.dtype("lse", args.lse, {compute_dtype(args.logits.dtype)});
  check_columns(arg, args.logits, args.first_row, args.valid_cols);
}

std::size_t workspace(const CrossEntropyBackward&, const Capabilities&) { return 0; }

}  // namespace tessera
