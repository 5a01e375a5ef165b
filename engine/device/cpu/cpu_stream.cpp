#include "engine/device/cpu/cpu_stream.h"

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "engine/core/error.h"

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_read_range(void* address, unsigned long bytes);
extern "C" void __tsan_write_range(void* address, unsigned long bytes);
#endif

namespace tessera::cpu {
namespace {

constexpr std::size_t kAlignment = 256;

class CpuEvent : public Event {
 public:
  // Begins a new recording and returns its number.
  std::uint64_t begin() {
    const std::lock_guard lock(mutex_);
    return ++recorded_;
  }
  std::uint64_t recorded() const {
    const std::lock_guard lock(mutex_);
    return recorded_;
  }
  void reach(std::uint64_t number) {
    // Notified under the lock: a waiter may destroy the event as soon as it sees the number.
    const std::lock_guard lock(mutex_);
    reached_ = std::max(reached_, number);
    when_ = std::chrono::steady_clock::now();
    changed_.notify_all();
  }
  void wait_for(std::uint64_t number) const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_ >= number; });
  }

  void synchronize() override { wait_for(recorded()); }
  bool is_done() const override {
    const std::lock_guard lock(mutex_);
    return reached_ >= recorded_;
  }
  double milliseconds_since(const Event& start) const override {
    const auto& other = static_cast<const CpuEvent&>(start);
    return std::chrono::duration<double, std::milli>(when_ - other.when_).count();
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::uint64_t recorded_ = 0;
  std::uint64_t reached_ = 0;
  std::chrono::steady_clock::time_point when_;
};

}  // namespace

ThreadTeam::ThreadTeam(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

ThreadTeam::~ThreadTeam() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadTeam::parallel_for(std::int64_t count, std::int64_t grain,
                              const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= 0) return;
  const std::int64_t parts =
      std::min<std::int64_t>(threads(), std::max<std::int64_t>(1, count / std::max<std::int64_t>(1, grain)));
  std::unique_lock caller(caller_mutex_, std::defer_lock);
  if (parts == 1 || !caller.try_lock()) {
    body(0, count);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    body_ = &body;
    count_ = count;
    parts_ = parts;
    pending_ = static_cast<int>(parts) - 1;
    error_ = nullptr;
    ++generation_;
  }
  start_.notify_all();
  std::exception_ptr own;
  try {
    body(0, count / parts);
  } catch (...) {
    own = std::current_exception();
  }
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return pending_ == 0; });
  body_ = nullptr;
  if (own) std::rethrow_exception(own);
  if (error_) std::rethrow_exception(error_);
}

void ThreadTeam::work(int index) {
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    start_.wait(lock, [&] { return stop_ || generation_ != seen; });
    if (stop_) return;
    seen = generation_;
    if (index >= parts_ || body_ == nullptr) continue;
    const auto* body = body_;
    const std::int64_t begin = count_ * index / parts_;
    const std::int64_t end = count_ * (index + 1) / parts_;
    lock.unlock();
    std::exception_ptr error;
    try {
      (*body)(begin, end);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error && !error_) error_ = error;
    if (--pending_ == 0) done_.notify_one();
  }
}

CpuContext::CpuContext(const ContextOptions& options)
    : BackendContext(Device{DeviceKind::kCpu, 0},
                     Capabilities{DeviceKind::kCpu, std::max(1, options.cpu_threads)}),
      inline_streams_(options.inline_streams),
      team_(std::max(1, options.cpu_threads)) {}

void* CpuContext::allocate(std::size_t bytes, MemoryKind) {
  if (bytes == 0) return nullptr;
  void* data = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (data == nullptr) {
    TESSERA_FAIL(ErrorKind::kAnswerNo, "[memory] {} bytes of host memory could not be allocated", bytes);
  }
  return data;
}

void CpuContext::release(void* data, std::size_t, MemoryKind) noexcept { std::free(data); }

std::unique_ptr<Stream> CpuContext::make_stream(const std::string& name) {
  return std::make_unique<CpuStream>(this, name, inline_streams_);
}

std::unique_ptr<Event> CpuContext::make_event() { return std::make_unique<CpuEvent>(); }

CpuStream::CpuStream(CpuContext* context, std::string name, bool is_inline)
    : Stream(context, std::move(name)), is_inline_(is_inline) {
  if (!is_inline_) worker_ = std::thread([this] { work(); });
}

CpuStream::~CpuStream() {
  if (is_inline_) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  worker_.join();
}

void CpuStream::enqueue(std::function<void()> closure, bool even_if_poisoned) {
  if (is_inline_) {
    closure();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back({std::move(closure), even_if_poisoned});
  }
  changed_.notify_all();
}

void CpuStream::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Item item = std::move(queue_.front());
    queue_.pop_front();
    const bool skip = error_ != nullptr && !item.even_if_poisoned;
    busy_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      if (!skip) item.closure();
    } catch (...) {
      error = std::current_exception();
    }
    item.closure = nullptr;
    lock.lock();
    busy_ = false;
    if (error && !error_) error_ = error;
    if (queue_.empty()) changed_.notify_all();
  }
}

void CpuStream::synchronize() {
  if (is_inline_) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void CpuStream::record(Event& event) {
  auto& cpu_event = static_cast<CpuEvent&>(event);
  const std::uint64_t number = cpu_event.begin();
  enqueue([&cpu_event, number] { cpu_event.reach(number); }, true);
}

void CpuStream::wait(const Event& event) {
  const auto& cpu_event = static_cast<const CpuEvent&>(event);
  const std::uint64_t number = cpu_event.recorded();
  enqueue([&cpu_event, number] { cpu_event.wait_for(number); }, true);
}

void CpuStream::copy_bytes(void* dst, const void* src, std::size_t bytes) {
  if (bytes == 0) return;
  enqueue([=] { std::memmove(dst, src, bytes); });
}

void CpuStream::set_zero(void* dst, std::size_t bytes) {
  if (bytes == 0) return;
  enqueue([=] { std::memset(dst, 0, bytes); });
}

void announce_read([[maybe_unused]] const void* data, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_THREAD__)
  __tsan_read_range(const_cast<void*>(data), bytes);
#endif
}

void announce_write([[maybe_unused]] void* data, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_THREAD__)
  __tsan_write_range(data, bytes);
#endif
}

std::unique_ptr<BackendContext> make_context(const ContextOptions& options) {
  return std::make_unique<CpuContext>(options);
}

}  // namespace tessera::cpu
