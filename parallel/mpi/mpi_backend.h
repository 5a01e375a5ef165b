// Collectives of CPU ranks over MPI messages. MPI's own reductions may add in any order and its
// collectives cannot be interrupted, so everything is made of non-blocking sends and receives:
// pieces travel to the rank that owns them and are added there in rank order.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "parallel/host_communicator.h"
#include "parallel/mpi/mpi_state.h"

namespace tessera::mpi {

class MpiBackend final : public HostBackend {
 public:
  // `members` are the world's ranks of the group, `rank` the position of this one.
  MpiBackend(std::shared_ptr<MpiState> state, int group, std::vector<int> members, int rank,
             std::string name, double timeout_seconds);

  void run(const HostOp& op) override;
  void run_group(std::span<const HostOp> ops) override;
  std::shared_ptr<HostBackend> split(int color, int key, const std::string& name,
                                     std::uint64_t sequence, int* rank, int* size) override;
  void abort(const std::string& reason) noexcept override { state_->abort(reason); }

 private:
  // What every rank tells every other before a collective moves data.
  struct Call;
  // The messages of one step of an operation.
  class Batch;
  struct Transfer;

  int size() const { return static_cast<int>(members_.size()); }
  void meet(const HostOp& op);
  void run_inline(const HostOp& op);
  void all_reduce(const HostOp& op);
  void all_gather(const HostOp& op);
  void reduce_scatter(const HostOp& op);
  void all_to_all(const HostOp& op);
  void broadcast(const HostOp& op);
  // Advances the transfer as far as it goes now; returns whether anything has moved.
  bool progress(std::deque<Transfer>& transfers, std::size_t index);
  [[noreturn]] void fail(ErrorKind kind, const std::string& reason);
  // Of an operation under way, and of one that comes after the abort.
  [[noreturn]] void throw_aborted(const HostOp& op);
  [[noreturn]] void throw_ended(const HostOp& op);
  std::string describe(const std::vector<int>& ranks) const;

  std::shared_ptr<MpiState> state_;  // shared by all groups of the process
  int group_;
  std::vector<int> members_;
  int rank_;
  std::string name_;
  double timeout_seconds_;
  Call* calls_ = nullptr;  // of every rank, received
  std::vector<unsigned char> call_bytes_;
  std::vector<unsigned char> own_call_bytes_;
  std::vector<unsigned char> staging_;
  std::vector<const void*> inputs_;
};

}  // namespace tessera::mpi
