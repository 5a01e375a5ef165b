// ScratchStack: temporaries of the ops on one stream, freed in reverse order. Because work on a
// stream is ordered, memory may be reused as soon as the op that used it has been enqueued.
// Over the meta device it only measures: high_water() of a dry run is the size to allocate.
#pragma once

#include <algorithm>
#include <cstddef>

#include "engine/core/error.h"
#include "engine/core/tensor.h"
#include "engine/device/buffer.h"
#include "engine/device/stream.h"

namespace tessera {

class ScratchStack {
 public:
  // Attaches itself to `stream`, which must outlive it. `capacity` is ignored on meta.
  ScratchStack(Stream& stream, std::size_t capacity) : stream_(&stream), capacity_(capacity) {
    is_meta_ = stream.device().kind == DeviceKind::kMeta;
    if (!is_meta_ && capacity > 0) buffer_ = Buffer(stream.context(), capacity);
    stream.attach_scratch(this);
  }
  ~ScratchStack() { stream_->attach_scratch(nullptr); }
  ScratchStack(const ScratchStack&) = delete;
  ScratchStack& operator=(const ScratchStack&) = delete;

  // A piece of the stack, given back by its destructor; pieces nest. An empty one has no stack.
  class Piece {
   public:
    Piece(ScratchStack* stack, std::size_t begin, void* data, std::size_t bytes)
        : stack_(stack), begin_(begin), data_(data), bytes_(bytes) {}
    ~Piece() {
      if (stack_ != nullptr) stack_->used_ = begin_;
    }
    Piece(const Piece&) = delete;
    Piece& operator=(const Piece&) = delete;
    void* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }

   private:
    ScratchStack* stack_;
    std::size_t begin_;
    void* data_;
    std::size_t bytes_;
  };

  // `bytes` aligned to 256.
  [[nodiscard]] Piece take(std::size_t bytes) {
    const std::size_t begin = used_;
    used_ += (bytes + 255) / 256 * 256;
    high_water_ = std::max(high_water_, used_);
    if (!is_meta_ && used_ > capacity_) {
      const std::size_t wanted = used_;
      used_ = begin;
      TESSERA_FAIL(ErrorKind::kInternal, "[scratch] stream {} needs {} bytes, the plan gave {}",
                   stream_->name(), wanted, capacity_);
    }
    void* data = is_meta_ ? nullptr : static_cast<char*>(buffer_.data()) + begin;
    return Piece(this, begin, data, bytes);
  }

  // All of it, for windows on it; undefined on meta.
  Tensor memory() const {
    if (buffer_.data() == nullptr) return {};
    return Tensor(buffer_.data(), DType::kU8, Shape{static_cast<std::int64_t>(capacity_)},
                  stream_->device());
  }
  std::size_t high_water() const { return high_water_; }
  std::size_t capacity() const { return capacity_; }

 private:
  Stream* stream_;
  std::size_t capacity_;
  bool is_meta_ = false;
  Buffer buffer_;
  std::size_t used_ = 0;
  std::size_t high_water_ = 0;
};

// A tensor that lives in scratch until the end of the scope.
class ScratchTensor {
 public:
  ScratchTensor(Stream& stream, DType dtype, Shape shape)
      : piece_(stream.scratch().take(static_cast<std::size_t>(shape.numel()) * size_of(dtype))),
        tensor_(piece_.data(), dtype, shape, stream.device()) {}
  const Tensor& operator*() const { return tensor_; }
  const Tensor* operator->() const { return &tensor_; }

 private:
  ScratchStack::Piece piece_;
  Tensor tensor_;
};

}  // namespace tessera
