// CPU streams: a FIFO of closures run by a worker thread, or at once in the caller's thread (inline
// mode). A closure that throws poisons its stream: later closures are skipped and the error is
// rethrown at synchronize() (inline mode throws at the call).
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "engine/device/stream.h"

namespace tessera::cpu {

// A fixed team of threads for the loops inside one op. Reductions must not depend on the split:
// parallel_for hands out contiguous ranges whose boundaries depend on the thread count only.
class ThreadTeam {
 public:
  explicit ThreadTeam(int threads);
  ~ThreadTeam();
  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(begin, end) over a split of [0, count) into at most threads() ranges of at least
  // `grain` items; returns when all are done. A second caller at the same time runs its loop alone.
  void parallel_for(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& body);

 private:
  void work(int index);

  std::vector<std::thread> workers_;
  std::mutex caller_mutex_;  // held by the one caller that uses the team
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  std::uint64_t generation_ = 0;
  int pending_ = 0;
  bool stop_ = false;
  const std::function<void(std::int64_t, std::int64_t)>* body_ = nullptr;
  std::int64_t count_ = 0;
  std::int64_t parts_ = 0;
  std::exception_ptr error_;
};

class CpuContext : public BackendContext {
 public:
  explicit CpuContext(const ContextOptions& options);

  void* allocate(std::size_t bytes, MemoryKind kind) override;
  void release(void* data, std::size_t bytes, MemoryKind kind) noexcept override;
  std::unique_ptr<Stream> make_stream(const std::string& name) override;
  std::unique_ptr<Event> make_event() override;

  ThreadTeam& team() { return team_; }

 private:
  bool inline_streams_;
  ThreadTeam team_;
};

class CpuStream : public Stream {
 public:
  CpuStream(CpuContext* context, std::string name, bool is_inline);
  ~CpuStream() override;

  // `even_if_poisoned` is for events: a waiter must not hang because an earlier closure threw.
  void enqueue(std::function<void()> closure, bool even_if_poisoned = false);
  ThreadTeam& team() const { return static_cast<CpuContext&>(context()).team(); }

  void record(Event& event) override;
  void wait(const Event& event) override;
  void synchronize() override;
  void copy_bytes(void* dst, const void* src, std::size_t bytes) override;
  void set_zero(void* dst, std::size_t bytes) override;

 private:
  void work();

  bool is_inline_;
  std::mutex mutex_;
  std::condition_variable changed_;
  struct Item {
    std::function<void()> closure;
    bool even_if_poisoned = false;
  };
  std::deque<Item> queue_;
  bool busy_ = false;
  bool stop_ = false;
  std::exception_ptr error_;
  std::thread worker_;
};

// The CpuStream behind a stream of the cpu device.
inline CpuStream& as_cpu(Stream& stream) { return static_cast<CpuStream&>(stream); }

// Tells ThreadSanitizer that the closure reads or writes this range: OpenBLAS and MPI are not
// instrumented, so a missing event wait before them would go unseen. No-ops in other builds.
void announce_read(const void* data, std::size_t bytes);
void announce_write(void* data, std::size_t bytes);

}  // namespace tessera::cpu
