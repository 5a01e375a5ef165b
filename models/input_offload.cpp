#include "models/input_offload.h"

#include "engine/core/error.h"

namespace tessera {

InputOffload::InputOffload(Stream& compute, Stream& copies) : compute_(&compute), copies_(&copies) {
  for (Slot& slot : slots_) {
    slot.used = compute.context().make_event();
    slot.moved = compute.context().make_event();
  }
}

void InputOffload::plan(int count, DType dtype, Shape shape, Arena& device, Arena& host) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].tensor = device.allocate(fmt::format("block input buffer {}", i), dtype, shape,
                                       MemoryClass::kActivations);
  }
  host_.clear();
  for (int i = 0; i < count; ++i) {
    host_.push_back(host.allocate(fmt::format("block input {}", i), dtype, shape,
                                  MemoryClass::kActivations));
  }
}

void InputOffload::copy(Slot& slot, void* to, const void* from) {
  if (copies_ != compute_) {
    compute_->record(*slot.used);
    copies_->wait(*slot.used);
  }
  copies_->copy_bytes(to, from, slot.tensor.bytes());
  if (copies_ != compute_) copies_->record(*slot.moved);
}

void InputOffload::await(const Slot& slot) {
  if (copies_ != compute_) compute_->wait(*slot.moved);
}

Tensor InputOffload::write(int id) {
  Slot& slot = this->slot(id);
  await(slot);
  slot.id = -1;
  return slot.tensor;
}

void InputOffload::keep(int id) {
  Slot& slot = this->slot(id);
  copy(slot, host_.at(static_cast<std::size_t>(id)).data, slot.tensor.data);
  slot.id = id;
}

void InputOffload::fetch(int id) {
  if (id < 0) return;
  Slot& slot = this->slot(id);
  if (slot.id == id) return;
  copy(slot, slot.tensor.data, host_.at(static_cast<std::size_t>(id)).data);
  slot.id = id;
}

Tensor InputOffload::read(int id) {
  fetch(id);
  Slot& slot = this->slot(id);
  await(slot);
  return slot.tensor;
}

}  // namespace tessera
