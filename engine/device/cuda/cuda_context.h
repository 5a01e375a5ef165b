// CudaContext: one rank's view of one GPU, with its streams and events. Several ranks of a process may
// hold contexts, on one GPU or on different ones, from different threads: every call makes its own
// device current. Library handles and plan caches are extensions that the kernels which need them add.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <typeindex>
#include <vector>

#include "engine/device/context.h"
#include "engine/device/stream.h"

namespace tessera::cuda {

// State that a kernel family keeps with a context or a stream (handles, plans): destroyed with it.
class Extension {
 public:
  virtual ~Extension() = default;
};

class ExtensionMap {
 public:
  // The extension of type T, made by T(owner) at the first call. Safe from several threads.
  template <typename T, typename Owner>
  T& get(Owner& owner) {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<Extension>& slot = map_[std::type_index(typeid(T))];
    if (!slot) slot = std::make_unique<T>(owner);
    return static_cast<T&>(*slot);
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    map_.clear();
  }

 private:
  std::mutex mutex_;
  std::map<std::type_index, std::unique_ptr<Extension>> map_;
};

// Looked at while a thread waits for the GPU: a collective whose peers are gone never ends by itself.
class WaitWatch {
 public:
  virtual ~WaitWatch() = default;
  // Called every few milliseconds of a wait and once after it; throws to end the wait with an error.
  virtual void check_wait(double waited_seconds) = 0;
};

class CudaContext : public BackendContext {
 public:
  // Throws kUser when GPU `index` does not exist.
  CudaContext(int index, const ContextOptions& options);
  ~CudaContext() override;

  // kRegistered memory is plain device memory unless a communication library provides it.
  void* allocate(std::size_t bytes, MemoryKind kind) override;
  void release(void* data, std::size_t bytes, MemoryKind kind) noexcept override;
  std::size_t available_bytes() const override;
  std::unique_ptr<Stream> make_stream(const std::string& name) override;
  std::unique_ptr<Event> make_event() override;

  // Makes this GPU the calling thread's current device.
  void make_current() const;

  // `watch` is asked in every later wait for a stream or event of this context, as long as it lives.
  void add_watch(std::weak_ptr<WaitWatch> watch);
  bool is_watched() { return !live_watches().empty(); }
  // A watched wait: blocks until `query` no longer returns cudaErrorNotReady; `call` names it in errors.
  template <typename Query>
  void wait(Query&& query, const char* call);

  const ContextOptions& options() const { return options_; }
  const std::string& gpu_name() const { return gpu_name_; }
  // Shared memory that one block may have.
  std::size_t shared_memory_limit() const { return shared_memory_limit_; }

  template <typename T>
  T& extension() {
    return extensions_.get<T>(*this);
  }

 private:
  ContextOptions options_;
  std::string gpu_name_;
  std::size_t shared_memory_limit_ = 0;
  ExtensionMap extensions_;
  std::mutex watch_mutex_;
  std::vector<std::weak_ptr<WaitWatch>> watches_;

  std::vector<std::shared_ptr<WaitWatch>> live_watches();
};

class CudaEvent : public Event {
 public:
  explicit CudaEvent(CudaContext& context);
  ~CudaEvent() override;
  void synchronize() override;
  bool is_done() const override;
  double milliseconds_since(const Event& start) const override;
  cudaEvent_t native() const { return event_; }

 private:
  CudaContext* context_;
  cudaEvent_t event_ = nullptr;
};

class CudaStream : public Stream {
 public:
  CudaStream(CudaContext& context, std::string name);
  ~CudaStream() override;
  void record(Event& event) override;
  void wait(const Event& event) override;
  void synchronize() override;
  void copy_bytes(void* dst, const void* src, std::size_t bytes) override;
  void set_zero(void* dst, std::size_t bytes) override;

  CudaContext& cuda_context() const { return *cuda_context_; }
  cudaStream_t native() const { return stream_; }

  template <typename T>
  T& extension() {
    return extensions_.get<T>(*this);
  }

 private:
  CudaContext* cuda_context_;
  cudaStream_t stream_ = nullptr;
  ExtensionMap extensions_;
};

inline CudaStream& as_cuda(Stream& stream) { return static_cast<CudaStream&>(stream); }
inline CudaContext& as_cuda(BackendContext& context) { return static_cast<CudaContext&>(context); }

// Makes the stream's GPU current and returns the stream to launch on.
cudaStream_t native(Stream& stream);

}  // namespace tessera::cuda
