// PeerWindow among threads of one process: copies into the peer's memory, flags under a mutex.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "parallel/board/abort_tree.h"
#include "parallel/peer_window.h"

namespace tessera::threads {

// Shared by the windows of all ranks.
class WindowState : public board::Interruptible {
 public:
  WindowState(int size, std::string group, double timeout_seconds);

  void open(int rank, void* memory, std::size_t bytes, int num_flags);
  // Returns once no put into the memory of `rank` is under way; later ones throw.
  void close(int rank) noexcept;
  std::size_t bytes_of(int rank) const;
  int num_flags(int rank) const;

  void put(const void* src, std::size_t bytes, int peer, std::size_t offset);
  void signal(int peer, int flag, std::uint64_t value);
  void wait(int rank, int flag, std::uint64_t value);
  void poison(const std::string& reason) noexcept;
  void interrupt(const std::string& reason) noexcept override { poison(reason); }

 private:
  struct Side {
    unsigned char* memory = nullptr;
    std::size_t bytes = 0;
    bool is_open = false;
    int puts_under_way = 0;
    std::vector<std::uint64_t> flags;
    std::condition_variable changed;
  };

  const std::string group_;
  const double timeout_seconds_;
  mutable std::mutex mutex_;
  std::vector<Side> sides_;
  std::string poison_;  // empty: not poisoned
};

std::unique_ptr<PeerWindow> make_thread_window(std::shared_ptr<WindowState> state, int rank,
                                               int size);

// The window of a group of one. A wait that its own signal has not preceded would never end, so it
// is an error at once.
std::unique_ptr<PeerWindow> make_self_window(void* memory, std::size_t bytes, int num_flags);

}  // namespace tessera::threads
