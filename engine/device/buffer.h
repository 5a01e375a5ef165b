// Buffer: the owner of one allocation of a BackendContext.
#pragma once

#include <cstddef>
#include <utility>

#include "engine/device/context.h"

namespace tessera {

class Buffer {
 public:
  Buffer() = default;
  Buffer(BackendContext& context, std::size_t bytes, MemoryKind kind = MemoryKind::kDevice)
      : context_(&context), data_(context.allocate(bytes, kind)), bytes_(bytes), kind_(kind) {}
  ~Buffer() { reset(); }

  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    reset();
    swap(other);
    return *this;
  }

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // The device a Tensor over this memory belongs to: pinned host memory is the cpu's.
  Device device() const {
    return context_ != nullptr && kind_ != MemoryKind::kPinnedHost ? context_->device() : Device{};
  }

 private:
  void reset() noexcept {
    if (data_ != nullptr) context_->release(data_, bytes_, kind_);
    data_ = nullptr;
    bytes_ = 0;
  }
  void swap(Buffer& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(kind_, other.kind_);
  }

  BackendContext* context_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  MemoryKind kind_ = MemoryKind::kDevice;
};

}  // namespace tessera
