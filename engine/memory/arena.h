// Arena and MemoryPlan. Memory of a run is planned as data first and allocated once: components take
// their tensors from an Arena in a fixed order; built over the meta device the same construction
// yields the plan, built over a real device it yields memory. A training step allocates nothing.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "engine/core/tensor.h"
#include "engine/device/buffer.h"

namespace tessera {

// What memory is for; the classes printed by `tessera plan`.
enum class MemoryClass : unsigned char {
  kWeights,
  kGradients,
  kMasters,
  kOptimizer,
  kActivations,
  kCommunication,
  kScratch,
  kInput,
};
inline constexpr int kMemoryClasses = 8;
const char* name_of(MemoryClass memory_class);

struct MemoryPlan {
  struct Entry {
    std::string name;
    std::size_t bytes = 0;  // including alignment
    std::size_t offset = 0;
    MemoryClass memory_class = MemoryClass::kActivations;
    MemoryKind kind = MemoryKind::kDevice;
  };
  std::vector<Entry> entries;

  std::size_t total(MemoryKind kind) const;
  std::size_t total(MemoryClass memory_class) const;
};

// A bump allocator over one Buffer of exactly `capacity` bytes. Owns the memory; tensors handed out
// are views that live as long as the arena. Every tensor starts at a multiple of 256 bytes.
class Arena {
 public:
  // On the meta device `capacity` is ignored and tensors have no address.
  Arena(BackendContext& context, std::size_t capacity, MemoryKind kind = MemoryKind::kDevice);

  Tensor allocate(const std::string& name, DType dtype, Shape shape, MemoryClass memory_class);

  std::size_t used() const { return used_; }
  const MemoryPlan& plan() const { return plan_; }
  BackendContext& context() const { return *context_; }
  MemoryKind kind() const { return kind_; }

 private:
  BackendContext* context_;
  MemoryKind kind_;
  std::size_t capacity_;
  Buffer buffer_;
  std::size_t used_ = 0;
  MemoryPlan plan_;
};

}  // namespace tessera
