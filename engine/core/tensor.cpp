#include "engine/core/tensor.h"

namespace tessera {
namespace {

// Meta tensors have no address; arithmetic on it must stay null.
void* offset(const Tensor& t, std::int64_t elements) {
  if (t.data == nullptr) return nullptr;
  return static_cast<char*>(t.data) + elements * static_cast<std::int64_t>(size_of(t.dtype));
}

}  // namespace

std::string to_string(Device device) {
  switch (device.kind) {
    case DeviceKind::kCpu:
      return "cpu";
    case DeviceKind::kCuda:
      return fmt::format("cuda:{}", device.index);
    case DeviceKind::kMeta:
      return "meta";
  }
  return "?";
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (int i = 0; i < shape.rank; ++i) text += fmt::format("{}{}", i ? ", " : "", shape.dims[i]);
  return text + "]";
}

std::string to_string(const Tensor& tensor) {
  return fmt::format("{} {} on {}", name_of(tensor.dtype), to_string(tensor.shape),
                     to_string(tensor.device));
}

Tensor Tensor::row_slice(std::int64_t begin, std::int64_t count) const {
  CHECK(begin >= 0 && count >= 0 && begin + count <= rows(),
        "[tensor] rows [{}, {}) of {}", begin, begin + count, to_string(*this));
  Tensor view = *this;
  view.data = offset(*this, begin * row_stride);
  view.shape = Shape{count, cols()};
  return view;
}

Tensor Tensor::col_slice(std::int64_t begin, std::int64_t count) const {
  CHECK(begin >= 0 && count >= 0 && begin + count <= cols(),
        "[tensor] columns [{}, {}) of {}", begin, begin + count, to_string(*this));
  Tensor view = *this;
  view.data = offset(*this, begin);
  view.shape = Shape{rows(), count};
  return view;
}

Tensor Tensor::flat_slice(std::int64_t begin, std::int64_t count) const {
  CHECK(is_dense() && begin >= 0 && count >= 0 && begin + count <= numel(),
        "[tensor] elements [{}, {}) of {}", begin, begin + count, to_string(*this));
  return Tensor(offset(*this, begin), dtype, Shape{count}, device);
}

Tensor Tensor::reshape(Shape new_shape) const {
  CHECK(is_dense() && new_shape.numel() == numel(), "[tensor] {} cannot be seen as {}",
        to_string(*this), to_string(new_shape));
  return Tensor(data, dtype, new_shape, device);
}

}  // namespace tessera
