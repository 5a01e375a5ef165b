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

Overlap::Overlap(Communicator& group, Stream& compute, Stream& exchange, bool puts)
    : group_(group.subgroup(all_ranks(group), group.name() + " pieces")),
      compute_(&compute),
      exchange_(&exchange) {
  BackendContext& context = compute.context();
  forked_ = context.make_event();
  gathered_ = context.make_event();
  scattered_ = context.make_event();
  for (int step = 0; step < size(); ++step) exchanged_.push_back(context.make_event());
  if (!puts || size() == 1) return;
  scratch_ = compute.scratch().memory();
  if (!scratch_.defined()) return;
  window_ = group_->make_window(scratch_, 2 * size(), context);
  for (int rank = 0; has_window() && rank < size(); ++rank) {
    CHECK(window_->bytes_of(rank) == scratch_.bytes(),
          "[overlap] rank {} has {} bytes of scratch, this one {}", rank, window_->bytes_of(rank),
          scratch_.bytes());
  }
}

// Flag r: what rank r sends is here. Flag size + r: what goes to rank r may be written there.
void Overlap::open_landings() {
  if (!has_window()) return;
  ++round_;
  for (int step = 1; step < size(); ++step) {
    window_->signal(neighbour(step), size() + group_->rank(), round_, *exchange_);
  }
}

template <typename Landing>
void Overlap::pass(const Tensor& own, int to, int from, Landing&& landing) {
  if (!has_window()) {
    const GroupScope pair(*group_);
    group_->send(own, to, *exchange_);
    group_->recv(landing(from), from, *exchange_);
    return;
  }
  const Tensor there = landing(group_->rank());
  const auto offset = static_cast<const char*>(there.data) - static_cast<const char*>(scratch_.data);
  CHECK(offset >= 0 && static_cast<std::size_t>(offset) + own.bytes() <= scratch_.bytes(),
        "[overlap] a message would land outside the scratch of the compute stream");
  window_->wait(size() + to, round_, *exchange_);
  window_->put(own.data, own.bytes(), to, static_cast<std::size_t>(offset), *exchange_);
  window_->signal(to, group_->rank(), round_, *exchange_);
  window_->wait(from, round_, *exchange_);
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

void Overlap::exchange_pieces(const Tensor& own, const Tensor& whole) {
  const std::int64_t rows = own.rows();
  CHECK(whole.rows() == rows * size(), "[overlap] a whole of {} rows, expected {} of each of {} ranks",
        whole.rows(), rows, size());
  const auto piece = [&](int rank) { return whole.row_slice(rank * rows, rows); };
  fork();
  open_landings();
  for (int step = 1; step < size(); ++step) {
    pass(own, neighbour(-step), neighbour(step), piece);
    mark(*exchanged_[static_cast<std::size_t>(step)]);
  }
  copy_tensor(own, piece(group_->rank()), *exchange_);
  mark(*gathered_);
}

void Overlap::gather_gemm(const Tensor& own, const Tensor& whole, const Product& product) {
  exchange_pieces(own, whole);
  product(group_->rank(), own);
  for (int step = 1; step < size(); ++step) {
    const int rank = neighbour(step);
    join(*exchanged_[static_cast<std::size_t>(step)]);
    product(rank, whole.row_slice(rank * own.rows(), own.rows()));
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
  fork();
  open_landings();
  for (int step = 1; step < size(); ++step) {
    const Tensor piece = leaving->row_slice((step - 1) % slots * rows, rows);
    if (step > slots) join(*exchanged_[static_cast<std::size_t>(step - slots)]);
    product(neighbour(step), piece);
    fork();
    pass(piece, neighbour(step), neighbour(-step), part);
    mark(*exchanged_[static_cast<std::size_t>(step)]);
  }
  product(group_->rank(), part(group_->rank()));
  if (size() > 1) join(*exchanged_.back());
  sum_parts(SumParts{*parts, own, size()}, *compute_);
}

void Overlap::start_gather(const Tensor& own, const Tensor& whole) {
  if (has_window()) return exchange_pieces(own, whole);
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
