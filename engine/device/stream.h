// Stream and Event: ordered execution on one device. Work enqueued on a stream runs in order and
// asynchronously to the caller; two streams are ordered only by events.
#pragma once

#include <cstddef>
#include <string>

#include "engine/device/context.h"

namespace tessera {

class ScratchStack;  // engine/memory/scratch.h

// A point in a stream's work. Recording again moves it; waiting on a never recorded event is a no-op.
class Event {
 public:
  virtual ~Event() = default;
  // Blocks the calling thread until the last recorded point has been reached.
  virtual void synchronize() = 0;
  // Whether that point has been reached; does not block.
  virtual bool is_done() const = 0;
  // Milliseconds from `start` to this event; both must have been reached. 0 on meta.
  virtual double milliseconds_since(const Event& start) const = 0;
};

class Stream {
 public:
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  Device device() const { return context_->device(); }
  BackendContext& context() const { return *context_; }
  const std::string& name() const { return name_; }

  // Temporaries of the ops on this stream (attached by the owner of the memory; see ScratchStack).
  ScratchStack& scratch() const;
  void attach_scratch(ScratchStack* scratch) { scratch_ = scratch; }
  bool has_scratch() const { return scratch_ != nullptr; }

  virtual void record(Event& event) = 0;
  virtual void wait(const Event& event) = 0;
  // Blocks until all enqueued work is done; rethrows the first error of that work.
  virtual void synchronize() = 0;

  // Copies between any memory this device can reach (host memory included). Host memory must be
  // pinned for the copy to be asynchronous on cuda.
  virtual void copy_bytes(void* dst, const void* src, std::size_t bytes) = 0;
  virtual void set_zero(void* dst, std::size_t bytes) = 0;

 protected:
  Stream(BackendContext* context, std::string name)
      : context_(context), name_(std::move(name)) {}

 private:
  BackendContext* context_;
  std::string name_;
  ScratchStack* scratch_ = nullptr;
};

}  // namespace tessera
