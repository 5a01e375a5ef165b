#include "engine/train/batch_uploader.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

namespace tessera {
namespace {

void stage(const Tensor& to, const std::vector<std::int32_t>& from, std::int32_t padding) {
  const auto count = std::min(static_cast<std::size_t>(to.numel()), from.size());
  auto* out = to.as<std::int32_t>();
  std::memcpy(out, from.data(), count * sizeof(std::int32_t));
  std::fill(out + count, out + to.numel(), padding);
}

}  // namespace

BatchUploader::BatchUploader(ModelRuntime& runtime) : runtime_(&runtime) {
  const BatchGeometry& geometry = runtime.options().geometry;
  const auto meta = make_context(Device{DeviceKind::kMeta, 0});
  Arena measure(*meta, 0, MemoryKind::kPinnedHost);
  for (int i = 0; i < 2; ++i) plan_batch(geometry, measure);
  arena_ = std::make_unique<Arena>(runtime.context(), measure.used(), MemoryKind::kPinnedHost);
  for (Slot& slot : slots_) {
    slot.host = plan_batch(geometry, *arena_);
    slot.read = runtime.context().make_event();
  }
}

void BatchUploader::upload(const MicroBatch& batch, const DeviceBatch& device) {
  Slot& slot = slots_[next_];
  next_ ^= 1;
  slot.read->synchronize();
  // The geometry may be longer than the batch: a multiple of tp.
  stage(slot.host.tokens, batch.inputs, 0);
  stage(slot.host.targets, batch.targets, kIgnoredTarget);
  stage(slot.host.positions, batch.positions, 0);
  if (slot.host.order.numel() == static_cast<std::int64_t>(batch.order.size())) {
    stage(slot.host.order, batch.order, 0);
  } else {
    std::vector<std::int32_t> order;
    sort_tokens(std::span(slot.host.tokens.as<std::int32_t>(), static_cast<std::size_t>(slot.host.tokens.numel())),
                order);
    stage(slot.host.order, order, 0);
  }
  stage(slot.host.documents, batch.documents, batch.documents.back());
  Stream& stream = runtime_->compute();
  const auto copy = [&](const Tensor& to, const Tensor& from) { stream.copy_bytes(to.data, from.data, to.bytes()); };
  copy(device.tokens, slot.host.tokens);
  copy(device.targets, slot.host.targets);
  copy(device.positions, slot.host.positions);
  copy(device.order, slot.host.order);
  copy(device.documents, slot.host.documents);
  stream.record(*slot.read);
}

}  // namespace tessera
