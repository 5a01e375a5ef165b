// Board: what the ranks of one group share to meet — one flat piece of memory with a slot per rank,
// a mailbox per ordered pair and, where ranks cannot read each other's memory, a staging area per
// rank. It works alike on the heap (threads) and in a file that several processes map. Waiting
// ranks sleep on futexes; robust condition variables would hang their wakers when a waiting process
// is killed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "parallel/board/abort_tree.h"
#include "parallel/host_communicator.h"

namespace tessera::board {

// Collectives whose operands are at most this large travel inside the slots, with one meeting.
inline constexpr std::size_t kInlineBytes = 1024;

struct alignas(64) RankSlot {
  std::atomic<std::uint32_t> attached;  // 1 while the rank has the board open, 2 once it closed it
  std::atomic<std::uint32_t> doorbell;  // changes when a mailbox of this rank did
  std::atomic<std::uint64_t> meetings;  // that this rank has entered
  HostOp posted[2];                     // what it is doing, by parity of the sequence number
  std::atomic<std::uint64_t> latest;    // what it entered last, for messages: number * 16 + kind
  alignas(64) unsigned char payload[2][kInlineBytes];
};

// One message in flight from one rank to another.
struct alignas(64) Mailbox {
  enum State : std::uint32_t { kEmpty, kFull, kTaken };
  std::atomic<std::uint32_t> state;
  DType dtype;
  std::uint64_t message_bytes;  // of the whole message
  std::uint64_t chunk_bytes;    // of what is here now
  const void* address;          // of the sender's tensor, where ranks share an address space
};

class Board : public Interruptible {
 public:
  // Ranks that are threads of this process read each other's tensors.
  static std::shared_ptr<Board> make_for_threads(int size);
  // Bytes of a board for processes; a fresh file of zeros is an unused board.
  static std::size_t bytes_for_processes(int size);
  // Over shared memory of bytes_for_processes(size); `release` unmaps it.
  static std::shared_ptr<Board> map_for_processes(void* memory, int size,
                                                  std::function<void()> release);
  ~Board() override;

  int size() const { return size_; }
  bool is_shared_address_space() const { return is_private_; }
  RankSlot& slot(int rank) const { return slots_[rank]; }
  Mailbox& mailbox(int from, int to) const { return mailboxes_[from * size_ + to]; }
  // Staging areas are double: `half` is 0 or 1.
  unsigned char* stage(int rank, int half) const;
  std::size_t stage_bytes() const { return stage_bytes_; }
  unsigned char* mailbox_bytes(int from, int to) const;
  std::size_t mailbox_capacity() const { return mailbox_capacity_; }

  // Joins the next meeting and returns its number, or 0 if the board was interrupted: then no rank
  // ever leaves that meeting by the front door, so what it announced will not be read.
  std::uint64_t arrive(int rank);
  bool is_met(std::uint64_t meeting) const;
  bool is_interrupted() const;
  // Joins and sits through a meeting that an interrupt does not end; for ranks that all came out of
  // arrive() and only have bounded work between.
  void leave_together();

  // Wakes a rank that waits for its mailboxes.
  void ring(int rank);

  // Sleeps until `is_ready()` or `seconds` have passed, whichever is first; returns is_ready().
  // Meetings wake `met_word`, mailboxes the rank's doorbell.
  template <typename Ready>
  bool wait(std::atomic<std::uint32_t>& word, double seconds, Ready&& is_ready);
  std::atomic<std::uint32_t>& met_word() const;

  void interrupt(const std::string& reason) noexcept override;

  // Whether a process still holds the rank; empty for threads.
  std::function<bool(int rank)> is_alive;

  // The first reason of an abort, kept in the board of a world of processes.
  void publish_reason(const std::string& reason) noexcept;
  std::optional<std::string> read_reason() const;

 private:
  struct Header;
  Board(void* memory, int size, bool is_private, std::function<void()> release);

  int size_;
  bool is_private_;
  std::size_t stage_bytes_ = 0;
  std::size_t mailbox_capacity_ = 0;
  Header* header_ = nullptr;
  RankSlot* slots_ = nullptr;
  Mailbox* mailboxes_ = nullptr;
  unsigned char* stages_ = nullptr;
  unsigned char* mailbox_bytes_ = nullptr;
  std::function<void()> release_;
};

double seconds_now();  // of the monotonic clock
void sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t seen, double seconds,
              bool is_private);

template <typename Ready>
bool Board::wait(std::atomic<std::uint32_t>& word, double seconds, Ready&& is_ready) {
  const double end = seconds_now() + seconds;
  for (;;) {
    const std::uint32_t seen = word.load(std::memory_order_acquire);
    if (is_ready()) return true;
    const double left = end - seconds_now();
    if (left <= 0) return false;
    sleep_on(word, seen, left, is_private_);
  }
}

}  // namespace tessera::board
