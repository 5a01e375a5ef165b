// A group of one that was split from a larger world: its collectives are the identity, and aborts pass both
// ways between it and the world.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "parallel/board/abort_tree.h"
#include "parallel/communicator.h"

namespace tessera::nccl {

class LoneRank final : public Communicator {
 public:
  LoneRank(const std::string& name, std::shared_ptr<board::AbortTree> tree)
      : Communicator(0, 1, name), self_(make_self_communicator(name)), tree_(std::move(tree)) {}

  std::unique_ptr<Communicator> split(int color, int, const std::string& name) override {
    check_not_aborted();
    return color < 0 ? nullptr : std::make_unique<LoneRank>(name, tree_);
  }
  void all_reduce(const Tensor& tensor, ReduceOp op, Stream& stream) override {
    check_not_aborted();
    self_->all_reduce(tensor, op, stream);
  }
  void all_gather(const Tensor& in, const Tensor& out, Stream& stream) override {
    check_not_aborted();
    self_->all_gather(in, out, stream);
  }
  void reduce_scatter(const Tensor& in, const Tensor& out, ReduceOp op, Stream& stream) override {
    check_not_aborted();
    self_->reduce_scatter(in, out, op, stream);
  }
  void all_to_all(const Tensor& in, const Tensor& out, Stream& stream) override {
    check_not_aborted();
    self_->all_to_all(in, out, stream);
  }
  void broadcast(const Tensor& tensor, int root, Stream& stream) override {
    check_not_aborted();
    self_->broadcast(tensor, root, stream);
  }
  void send(const Tensor& tensor, int peer, Stream& stream) override {
    check_not_aborted();
    self_->send(tensor, peer, stream);
  }
  void recv(const Tensor& tensor, int peer, Stream& stream) override {
    check_not_aborted();
    self_->recv(tensor, peer, stream);
  }
  void barrier() override { check_not_aborted(); }
  std::function<void(const std::string&)> abort_handle() override {
    return [tree = tree_](const std::string& reason) { tree->abort(reason); };
  }

 protected:
  void group_start() override { scope_.emplace(*self_); }
  // A scope that ends while an exception is on its way drops its operations, as this one does then.
  void group_end(bool) override { scope_.reset(); }

 private:
  void check_not_aborted() const {
    if (const auto reason = tree_->reason()) throw AbortedError(fmt::format("[{}] ended: {}", name(), *reason));
  }

  std::unique_ptr<Communicator> self_;
  std::shared_ptr<board::AbortTree> tree_;
  std::optional<GroupScope> scope_;
};

}  // namespace tessera::nccl
