// Communicator: collectives among the ranks of one group, enqueued on a stream. Every rank of the
// group makes the same calls in the same order; a group of one is the identity. Backends are as
// strict as NCCL: a call whose operation, bytes or sequence number differ between ranks is an error
// on every rank, sends rendezvous, and reductions add in rank order so that results are
// reproducible.
//
// Operations of one communicator run in the order they were issued, whichever streams they were
// given. Tensors must stay valid until the stream has run the operation, the communicator only
// until the call returns. A maximum is NaN where any rank's element is.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/core/tensor.h"
#include "engine/device/stream.h"

namespace tessera {

class PeerWindow;  // parallel/peer_window.h

enum class ReduceOp : unsigned char { kSum, kMax };

// An operation that ended because another rank failed or the group was aborted: the consequence,
// not the cause. what() carries the first reason.
class AbortedError : public Error {
 public:
  explicit AbortedError(std::string message,
                        std::source_location where = std::source_location::current())
      : Error(ErrorKind::kTransient, std::move(message), where) {}
};

class Communicator {
 public:
  virtual ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // "tp", "dp", ...: appears in error messages and traces.
  const std::string& name() const { return name_; }

  // Ranks with the same color form a group, ordered by (key, rank). Collective over this group; a
  // negative color takes part and gets null. The meta device cannot know the others' colors: use
  // subgroup where a dry run must pass.
  virtual std::unique_ptr<Communicator> split(int color, int key, const std::string& name) = 0;

  // The group of `members`, ranks of this communicator in the order wanted; this rank is one of
  // them. Collective over this communicator: every rank names the members of its own group.
  virtual std::unique_ptr<Communicator> subgroup(const std::vector<int>& members,
                                                 const std::string& name);

  // In place over a dense tensor. fp64, fp32, bf16 (accumulated in fp32 and rounded once), int64,
  // int32.
  virtual void all_reduce(const Tensor& tensor, ReduceOp op, Stream& stream) = 0;
  // out = concatenation of every rank's `in` in rank order; in may be out's own piece.
  virtual void all_gather(const Tensor& in, const Tensor& out, Stream& stream) = 0;
  // out = this rank's 1/size piece of the element-wise reduction of `in`; out may be that piece of
  // in.
  virtual void reduce_scatter(const Tensor& in, const Tensor& out, ReduceOp op, Stream& stream) = 0;
  // Piece p of `in` goes to rank p; piece p of `out` comes from rank p. Equal pieces, in != out.
  virtual void all_to_all(const Tensor& in, const Tensor& out, Stream& stream) = 0;
  virtual void broadcast(const Tensor& tensor, int root, Stream& stream) = 0;
  virtual void send(const Tensor& tensor, int peer, Stream& stream) = 0;
  virtual void recv(const Tensor& tensor, int peer, Stream& stream) = 0;
  // Blocks the calling thread until every rank has called it.
  virtual void barrier() = 0;

  // A window on the peers' `memory`, allocated by `context`, with `num_flags` flags per rank, or
  // null on every rank where the backend has none. Collective; `memory` outlives the window.
  virtual std::unique_ptr<PeerWindow> make_window(const Tensor& memory, int num_flags,
                                                  BackendContext& context);

  // Ends every pending and later operation of all ranks with an AbortedError that carries `reason`,
  // in this group and in every group that was split from the same world; safe to call from any
  // thread, more than once; the first reason wins.
  void abort(const std::string& reason) noexcept { abort_handle()(reason); }
  // A copyable function that does the same and may outlive this communicator.
  virtual std::function<void(const std::string& reason)> abort_handle() = 0;

 protected:
  Communicator(int rank, int size, std::string name)
      : rank_(rank), size_(size), name_(std::move(name)) {}
  // Sends and receives between group_start and group_end run together (no order among them), so
  // that a pair may exchange; use GroupScope. They share one stream, and no collective stands among
  // them.
  virtual void group_start() = 0;
  // Runs the group's operations, or drops them when an exception is on its way out of the scope.
  virtual void group_end(bool is_launched) = 0;
  friend class GroupScope;

 private:
  int rank_;
  int size_;
  std::string name_;
};

class GroupScope {
 public:
  explicit GroupScope(Communicator& communicator) : communicator_(&communicator) {
    communicator_->group_start();
  }
  // Launches the grouped operations; an error of the launch surfaces here or at the stream.
  ~GroupScope() noexcept(false) {
    communicator_->group_end(std::uncaught_exceptions() == uncaught_exceptions_);
  }
  GroupScope(const GroupScope&) = delete;
  GroupScope& operator=(const GroupScope&) = delete;

 private:
  Communicator* communicator_;
  int uncaught_exceptions_ = std::uncaught_exceptions();
};

// A group of one: every collective is the identity (a copy where in and out differ).
std::unique_ptr<Communicator> make_self_communicator(const std::string& name = "self");

// A group of `size` for the meta device: checks arguments, moves nothing. `rank` as given.
std::unique_ptr<Communicator> make_meta_communicator(int rank, int size,
                                                     const std::string& name = "world");

// `size` communicators for threads of this process, entry r for the thread of rank r. Waiting ranks
// sleep on condition variables (no spinning). A wait longer than `timeout_seconds` aborts the group
// with the missing ranks' names.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size,
                                                                     double timeout_seconds = 600);

// Copies `in` to `out` on the stream (same dense element count and dtype); nothing when they are
// the same memory.
void copy_tensor(const Tensor& in, const Tensor& out, Stream& stream);

}  // namespace tessera
