#include "parallel/overlap.h"

#include <algorithm>
#include <numeric>

#include "engine/core/error.h"
#include "engine/memory/scratch.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

std::vector<int> all_ranks(const Communicator& group) {
  std::vector<int> ranks(static_cast<std::size_t>(group.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

Overlap::Overlap(Communicator& group, Stream& compute, Stream& exchange)
    : group_(group.subgroup(all_ranks(group), group.name() + " pieces")),
      compute_(&compute),
      exchange_(&exchange) {
  BackendContext& context = compute.context();
  forked_ = context.make_event();
  gathered_ = context.make_event();
  scattered_ = context.make_event();
  for (int step = 0; step < size(); ++step) exchanged_.push_back(context.make_event());
}

void Overlap::fork() {
  if (!has_two_streams()) return;
  compute_->record(*forked_);
  exchange_->wait(*forked_);
}

void Overlap::mark(Event& event) {
  if (has_two_streams()) exchange_->record(event);
}

void Overlap::join(Event& event) {
  if (has_two_streams()) compute_->wait(event);
}

void Overlap::gather_gemm(const Tensor& own, const Tensor& whole, const Product& product) {
  const std::int64_t rows = own.rows();
  CHECK(whole.rows() == rows * size(), "[gather_gemm] a whole of {} rows, expected {} of {} ranks",
        whole.rows(), rows, size());
  const auto piece = [&](int rank) { return whole.row_slice(rank * rows, rows); };
  fork();
  for (int step = 1; step < size(); ++step) {
    {
      const GroupScope pair(*group_);
      group_->send(own, neighbour(-step), *exchange_);
      group_->recv(piece(neighbour(step)), neighbour(step), *exchange_);
    }
    mark(*exchanged_[static_cast<std::size_t>(step)]);
  }
  copy_tensor(own, piece(group_->rank()), *exchange_);
  mark(*gathered_);
  product(group_->rank(), own);
  for (int step = 1; step < size(); ++step) {
    join(*exchanged_[static_cast<std::size_t>(step)]);
    product(neighbour(step), piece(neighbour(step)));
  }
  finish_gather();
}

void Overlap::gemm_scatter(const Tensor& own, const Product& product) {
  const std::int64_t rows = own.rows();
  // What arrives, by the rank that computed it, and what leaves: two pieces, so that one may be
  // computed while the other is sent.
  const ScratchTensor parts(*compute_, own.dtype, Shape{rows * size(), own.cols()});
  const int slots = std::min(2, size() - 1);
  const ScratchTensor leaving(*compute_, own.dtype, Shape{rows * slots, own.cols()});
  const auto part = [&](int rank) { return parts->row_slice(rank * rows, rows); };
  for (int step = 1; step < size(); ++step) {
    const int to = neighbour(step);
    const int from = neighbour(-step);
    const Tensor piece = leaving->row_slice((step - 1) % slots * rows, rows);
    if (step > slots) join(*exchanged_[static_cast<std::size_t>(step - slots)]);
    product(to, piece);
    fork();
    {
      const GroupScope pair(*group_);
      group_->send(piece, to, *exchange_);
      group_->recv(part(from), from, *exchange_);
    }
    mark(*exchanged_[static_cast<std::size_t>(step)]);
  }
  product(group_->rank(), part(group_->rank()));
  if (size() > 1) join(*exchanged_.back());
  sum_parts(SumParts{*parts, own, size()}, *compute_);
}

void Overlap::start_gather(const Tensor& own, const Tensor& whole) {
  fork();
  group_->all_gather(own, whole, *exchange_);
  mark(*gathered_);
}

void Overlap::start_scatter(const Tensor& whole, const Tensor& own) {
  fork();
  group_->reduce_scatter(whole, own, ReduceOp::kSum, *exchange_);
  mark(*scattered_);
}

}  // namespace tessera
