#include "parallel/threads/thread_window.h"

#include <chrono>
#include <cstring>

#include "engine/core/error.h"
#include "engine/device/cpu/cpu_stream.h"
#include "parallel/communicator.h"

namespace tessera::threads {
namespace {

// A signal on a stream. If the stream drops it (an earlier closure threw), the peer would wait in
// vain.
class PendingSignal {
 public:
  PendingSignal(std::shared_ptr<WindowState> state, int peer, int flag, std::uint64_t value)
      : state_(std::move(state)), peer_(peer), flag_(flag), value_(value) {}
  PendingSignal(const PendingSignal&) = delete;
  PendingSignal& operator=(const PendingSignal&) = delete;
  ~PendingSignal() {
    if (!has_run_) state_->poison("the stream of a peer failed before its signal");
  }
  void run() {
    has_run_ = true;
    state_->signal(peer_, flag_, value_);
  }

 private:
  std::shared_ptr<WindowState> state_;
  int peer_;
  int flag_;
  std::uint64_t value_;
  bool has_run_ = false;
};

class ThreadWindow final : public PeerWindow {
 public:
  ThreadWindow(std::shared_ptr<WindowState> state, int rank, int size)
      : PeerWindow(rank, size), state_(std::move(state)) {}
  ~ThreadWindow() override { state_->close(rank()); }

  std::size_t bytes_of(int peer) const override {
    check_peer(peer);
    return state_->bytes_of(peer);
  }
  void put(const void* src, std::size_t bytes, int peer, std::size_t offset,
           Stream& stream) override {
    check_peer(peer);
    const std::size_t room = state_->bytes_of(peer);
    CHECK(offset <= room && bytes <= room - offset,
          "[window put] {} bytes at {} do not fit the {} bytes of rank {}", bytes, offset, room,
          peer);
    cpu_stream(stream).enqueue(
        [state = state_, src, bytes, peer, offset] { state->put(src, bytes, peer, offset); });
  }
  void signal(int peer, int flag, std::uint64_t value, Stream& stream) override {
    check_peer(peer);
    check_flag(peer, flag);
    auto pending = std::make_shared<PendingSignal>(state_, peer, flag, value);
    cpu_stream(stream).enqueue([pending = std::move(pending)] { pending->run(); });
  }
  void wait(int flag, std::uint64_t value, Stream& stream) override {
    check_flag(rank(), flag);
    cpu_stream(stream).enqueue(
        [state = state_, rank = rank(), flag, value] { state->wait(rank, flag, value); });
  }
  void poison(const std::string& reason) noexcept override { state_->poison(reason); }

 private:
  static cpu::CpuStream& cpu_stream(Stream& stream) {
    CHECK(stream.device().kind == DeviceKind::kCpu, "[window] a host window cannot run on {}",
          to_string(stream.device()));
    return cpu::as_cpu(stream);
  }
  void check_peer(int peer) const {
    CHECK(peer >= 0 && peer < size(), "[window] peer is {}, expected 0 to {}", peer, size() - 1);
  }
  void check_flag(int peer, int flag) const {
    const int flags = state_->num_flags(peer);
    CHECK(flag >= 0 && flag < flags, "[window] flag is {}, the window has {}", flag, flags);
  }

  std::shared_ptr<WindowState> state_;  // shared by all ranks and the enqueued operations
};

}  // namespace

WindowState::WindowState(int size, std::string group, double timeout_seconds)
    : group_(std::move(group)),
      timeout_seconds_(timeout_seconds),
      sides_(static_cast<std::size_t>(size)) {}

void WindowState::open(int rank, void* memory, std::size_t bytes, int num_flags) {
  const std::lock_guard lock(mutex_);
  Side& side = sides_[static_cast<std::size_t>(rank)];
  side.memory = static_cast<unsigned char*>(memory);
  side.bytes = bytes;
  side.flags.assign(static_cast<std::size_t>(num_flags), 0);
  side.is_open = true;
}

void WindowState::close(int rank) noexcept {
  std::unique_lock lock(mutex_);
  Side& side = sides_[static_cast<std::size_t>(rank)];
  side.is_open = false;
  side.changed.wait(lock, [&] { return side.puts_under_way == 0; });
}

std::size_t WindowState::bytes_of(int rank) const {
  const std::lock_guard lock(mutex_);
  return sides_[static_cast<std::size_t>(rank)].bytes;
}

int WindowState::num_flags(int rank) const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(sides_[static_cast<std::size_t>(rank)].flags.size());
}

void WindowState::put(const void* src, std::size_t bytes, int peer, std::size_t offset) {
  Side& side = sides_[static_cast<std::size_t>(peer)];
  {
    const std::lock_guard lock(mutex_);
    if (!poison_.empty()) throw AbortedError(fmt::format("[{} window] put: {}", group_, poison_));
    CHECK(side.is_open, "[{} window] put: rank {} has closed its window", group_, peer);
    ++side.puts_under_way;
  }
  if (bytes != 0) std::memmove(side.memory + offset, src, bytes);
  {
    const std::lock_guard lock(mutex_);
    --side.puts_under_way;
  }
  side.changed.notify_all();
}

void WindowState::signal(int peer, int flag, std::uint64_t value) {
  Side& side = sides_[static_cast<std::size_t>(peer)];
  {
    const std::lock_guard lock(mutex_);
    if (!poison_.empty())
      throw AbortedError(fmt::format("[{} window] signal: {}", group_, poison_));
    std::uint64_t& current = side.flags[static_cast<std::size_t>(flag)];
    if (current < value) current = value;
  }
  side.changed.notify_all();
}

void WindowState::wait(int rank, int flag, std::uint64_t value) {
  Side& side = sides_[static_cast<std::size_t>(rank)];
  const std::uint64_t& current = side.flags[static_cast<std::size_t>(flag)];
  std::unique_lock lock(mutex_);
  const bool is_over = side.changed.wait_for(lock, std::chrono::duration<double>(timeout_seconds_),
                                             [&] { return current >= value || !poison_.empty(); });
  if (current >= value) return;
  if (!is_over) {
    const std::string reason =
        fmt::format("[{} window] rank {} waited {:g} s for flag {} to reach {}; it is {}", group_,
                    rank, timeout_seconds_, flag, value, current);
    lock.unlock();
    poison(reason);
    throw Error(ErrorKind::kTransient, reason);
  }
  throw AbortedError(fmt::format("[{} window] the wait of rank {} for flag {} was ended: {}",
                                 group_, rank, flag, poison_));
}

void WindowState::poison(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!poison_.empty()) return;
    poison_ = reason.empty() ? "no reason was given" : reason;
  }
  for (Side& side : sides_) side.changed.notify_all();
}

std::unique_ptr<PeerWindow> make_self_window(void* memory, std::size_t bytes, int num_flags) {
  auto state = std::make_shared<WindowState>(1, "self", 0);
  state->open(0, memory, bytes, num_flags);
  return make_thread_window(std::move(state), 0, 1);
}

std::unique_ptr<PeerWindow> make_thread_window(std::shared_ptr<WindowState> state, int rank,
                                               int size) {
  return std::make_unique<ThreadWindow>(std::move(state), rank, size);
}

}  // namespace tessera::threads
