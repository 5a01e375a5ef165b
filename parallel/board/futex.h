// Sleeping on a 32-bit word that another thread, or another process that maps the same memory,
// changes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

namespace tessera::board {

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t) &&
              std::atomic<std::uint32_t>::is_always_lock_free);

// Sleeps while `word` holds `seen`, at most `seconds`; may return early.
inline void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, double seconds,
                       bool is_private) {
  std::timespec limit;
  limit.tv_sec = static_cast<std::time_t>(seconds);
  limit.tv_nsec = static_cast<long>((seconds - static_cast<double>(limit.tv_sec)) * 1e9);
  syscall(SYS_futex, &word, is_private ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void futex_wake_all(std::atomic<std::uint32_t>& word, bool is_private) {
  syscall(SYS_futex, &word, is_private ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE, INT_MAX, nullptr, nullptr,
          0);
}

}  // namespace tessera::board
