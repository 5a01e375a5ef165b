#include "engine/memory/arena.h"

#include "engine/core/error.h"

namespace tessera {
namespace {
constexpr std::size_t kAlignment = 256;
}

const char* name_of(MemoryClass memory_class) {
  switch (memory_class) {
    case MemoryClass::kWeights:
      return "weights";
    case MemoryClass::kGradients:
      return "gradients";
    case MemoryClass::kMasters:
      return "masters";
    case MemoryClass::kOptimizer:
      return "optimizer";
    case MemoryClass::kActivations:
      return "activations";
    case MemoryClass::kCommunication:
      return "communication";
    case MemoryClass::kScratch:
      return "scratch";
    case MemoryClass::kInput:
      return "input";
  }
  return "?";
}

std::size_t MemoryPlan::total(MemoryKind kind) const {
  std::size_t sum = 0;
  for (const Entry& entry : entries) sum += entry.kind == kind ? entry.bytes : 0;
  return sum;
}

std::size_t MemoryPlan::total(MemoryClass memory_class) const {
  std::size_t sum = 0;
  for (const Entry& entry : entries) sum += entry.memory_class == memory_class ? entry.bytes : 0;
  return sum;
}

Arena::Arena(BackendContext& context, std::size_t capacity, MemoryKind kind)
    : context_(&context), kind_(kind), capacity_(capacity) {
  if (context.device().kind != DeviceKind::kMeta && capacity > 0) buffer_ = Buffer(context, capacity, kind);
}

Tensor Arena::allocate(const std::string& name, DType dtype, Shape shape, MemoryClass memory_class) {
  const std::size_t wanted = static_cast<std::size_t>(shape.numel()) * size_of(dtype);
  const std::size_t bytes = (wanted + kAlignment - 1) / kAlignment * kAlignment;
  const bool is_meta = context_->device().kind == DeviceKind::kMeta;
  CHECK(is_meta || used_ + bytes <= capacity_,
        "[arena] {} wants {} bytes at {} of {}; the plan did not foresee it", name, bytes, used_, capacity_);
  void* data = is_meta ? nullptr : static_cast<char*>(buffer_.data()) + used_;
  plan_.entries.push_back({name, bytes, used_, memory_class, kind_});
  used_ += bytes;
  const Device device = kind_ == MemoryKind::kPinnedHost ? Device{} : context_->device();
  return Tensor(data, dtype, shape, is_meta ? context_->device() : device);
}

}  // namespace tessera
