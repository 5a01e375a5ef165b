// BoardBackend: the collectives of ranks that meet at a Board. One algorithm for threads, which
// read and write each other's tensors, and for processes, which copy through the staging areas;
// work is shared: every rank reduces its own slice, always in rank order.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parallel/board/abort_tree.h"
#include "parallel/board/board.h"
#include "parallel/host_communicator.h"

namespace tessera::board {

class BoardBackend : public HostBackend {
 public:
  BoardBackend(std::shared_ptr<Board> board, std::shared_ptr<AbortTree> tree, int rank,
               std::string name, double timeout_seconds);

  void run(const HostOp& op) override;
  void run_group(std::span<const HostOp> ops) override;
  std::shared_ptr<HostBackend> split(int color, int key, const std::string& name,
                                     std::uint64_t sequence, int* rank, int* size) override;
  void abort(const std::string& reason) noexcept override { tree_->abort(reason); }

 protected:
  // Makes a board for a new group in its first rank; the text reaches the others' open_board, and
  // close_offer follows in the first rank when all have it.
  virtual std::string offer_board(int size) = 0;
  virtual std::shared_ptr<Board> open_board(const std::string& offer, int rank, int size) = 0;
  virtual void close_offer(const std::string& offer) noexcept = 0;
  virtual std::shared_ptr<HostBackend> make_child(std::shared_ptr<Board> board, int rank,
                                                  const std::string& name) = 0;

  Board& board() const { return *board_; }
  const std::shared_ptr<AbortTree>& tree() const { return tree_; }
  int rank() const { return rank_; }
  int size() const { return board_->size(); }
  const std::string& name() const { return name_; }
  double timeout_seconds() const { return timeout_seconds_; }

  // Gathers `bytes` (at most kInlineBytes) of every rank into `out`.
  void exchange(HostOpKind kind, std::uint64_t sequence, const void* in, void* out,
                std::size_t bytes);
  // The same in the name of `op`, a collective whose data moves elsewhere: `op` is what must agree
  // and what errors speak of.
  void exchange(const HostOp& op, const void* in, void* out, std::size_t bytes);

 private:
  struct Transfer;

  void post(const HostOp& op);
  // Sits through one meeting; throws if it is interrupted, late, or a rank is gone.
  void meet(const HostOp& op);
  // Throws on every rank if two ranks came with different operations.
  void check_posted();

  void run_inline(const HostOp& op);
  void run_shared(const HostOp& op);
  void run_staged(const HostOp& op);

  // Moves what can be moved now; returns whether anything was.
  bool progress(std::span<Transfer> transfers);
  bool progress_send(Transfer& transfer);
  bool progress_recv(Transfer& transfer);
  // Takes back what was posted and not yet taken, after an interrupt.
  void withdraw(std::span<Transfer> transfers);

  const HostOp& posted_by(int rank) const { return board_->slot(rank).posted[parity_]; }
  unsigned char* payload_of(int rank) const { return board_->slot(rank).payload[parity_]; }
  [[noreturn]] void throw_aborted(const HostOp& op);
  // Aborts and throws if the process of an awaited rank is gone.
  void check_alive(const HostOp& op, const std::vector<int>& awaited);
  // "rank 1 (last in all_gather #6) and rank 3 (not there yet)".
  std::string describe(const std::vector<int>& ranks) const;

  std::shared_ptr<Board> board_;
  std::shared_ptr<AbortTree> tree_;  // shared by all groups of the world in this process
  int rank_;
  std::string name_;
  double timeout_seconds_;
  int parity_ = 0;  // which half of the slots the current collective uses; equal on all ranks
  int half_ = 0;    // staging half of the next chunk; equal on all ranks
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
};

}  // namespace tessera::board
