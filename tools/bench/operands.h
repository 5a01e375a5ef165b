// Operands: tensors for a measurement, filled with numbers as they occur in training; a product of
// zeros draws less power and runs faster than one of data.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "engine/device/buffer.h"
#include "engine/device/stream.h"
#include "kernels/ops.h"

namespace tessera {

class Operands {
 public:
  explicit Operands(Stream& stream) : stream_(&stream) {}

  // A tensor of normal numbers (of zeros, for integer types); lives until clear().
  Tensor tensor(DType dtype, Shape shape, float std = 1.0f) {
    const std::size_t bytes = static_cast<std::size_t>(shape.numel()) * size_of(dtype);
    buffers_.emplace_back(stream_->context(), bytes);
    const Tensor t(buffers_.back().data(), dtype, shape, stream_->device());
    if (is_fp8(dtype)) {
      // Magnitudes that use the format's range, as scaled tensors do.
      const Tensor wide = tensor(DType::kBF16, shape);
      scale(Scale{wide, t, 100.0}, *stream_);
      stream_->synchronize();
      buffers_.pop_back();
    } else if (dtype == DType::kF32 || dtype == DType::kBF16) {
      FillNormal fill;
      fill.out = t.reshape(Shape{t.numel()});
      fill.key = derive_key(++seed_, RandomPurpose::kSynthetic);
      fill.global_cols = t.numel();
      fill.std = std;
      fill_normal(fill, *stream_);
    } else {
      stream_->set_zero(t.data, bytes);
    }
    return t;
  }

  template <typename T>
  Tensor upload(DType dtype, const std::vector<T>& values) {
    const auto count = static_cast<std::int64_t>(values.size() * sizeof(T) / size_of(dtype));
    const Tensor t = tensor(dtype, Shape{count});
    stream_->copy_bytes(t.data, values.data(), values.size() * sizeof(T));
    stream_->synchronize();
    return t;
  }

  void clear() {
    stream_->synchronize();
    buffers_.clear();
  }

 private:
  Stream* stream_;
  std::deque<Buffer> buffers_;
  std::uint64_t seed_ = 0;
};

}  // namespace tessera
