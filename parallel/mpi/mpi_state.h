// What the MPI groups of one process share: the lock around every MPI call, the abort, and the
// numbers of the groups.
#pragma once

// The C++ bindings of old MPI headers are not wanted.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <array>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace tessera::mpi {

// Kinds of messages; each group has its own tags (see MpiState::tag).
enum class Tag : int { kCall, kData, kSendHeader, kRecvHeader };

class MpiState {
 public:
  // `world` is a communicator of our own over all ranks.
  explicit MpiState(MPI_Comm world);

  MPI_Comm world() const { return world_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Every MPI call is made under this lock, so that the library need not be thread-safe; no call
  // that is made under it blocks.
  std::mutex& lock() { return mpi_mutex_; }

  // Group `number` has tags of its own: groups need no MPI communicator, whose making would block.
  int tag(int group, Tag kind) const;
  int next_group() const { return next_group_; }
  void use_group(int number);

  // Returns whether `reason` is the one that counts; tells the other processes.
  bool abort(const std::string& reason) noexcept;
  std::optional<std::string> reason() const;
  // Takes over an abort that another process told. Call it with the lock held.
  void poll_abort();
  // With operations left behind MPI cannot be finalised.
  bool can_finish() const { return !reason(); }
  void finish();

 private:
  void listen();
  bool keep_first(const std::string& reason);

  static constexpr int kAbortTag = 0;
  static constexpr std::size_t kReasonBytes = 1024;

  MPI_Comm world_;
  int rank_ = 0;
  int size_ = 1;
  int largest_tag_ = 32767;
  int next_group_ = 1;
  std::mutex mpi_mutex_;
  mutable std::mutex reason_mutex_;
  std::optional<std::string> reason_;
  MPI_Request listening_ = MPI_REQUEST_NULL;
  std::array<char, kReasonBytes> heard_{};
  std::array<char, kReasonBytes> told_{};
};

// "MPI_ERR_TRUNCATE: message truncated" of a return code.
std::string words_of(int code);

}  // namespace tessera::mpi
