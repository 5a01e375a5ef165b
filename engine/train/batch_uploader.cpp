#include "engine/train/batch_uploader.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

namespace tessera {

void BatchUploader::stage(const Tensor& to, const std::vector<std::int32_t>& from,
                          std::int32_t padding) const {
  auto* out = to.as<std::int32_t>();
  const auto end = static_cast<std::int64_t>(from.size());
  split_.for_each_piece(rank_, [&](std::int64_t place, std::int64_t own, std::int64_t count) {
    const std::int64_t there = std::clamp<std::int64_t>(end - place, 0, count);
    if (there > 0) {
      std::memcpy(out + own, from.data() + place,
                  static_cast<std::size_t>(there) * sizeof(std::int32_t));
    }
    std::fill(out + own + there, out + own + count, padding);
  });
}

void BatchUploader::stage_order(const Tensor& to, const MicroBatch& batch,
                                const Tensor& tokens) const {
  auto* out = to.as<std::int32_t>();
  if (split_.all_tokens() != static_cast<std::int64_t>(batch.order.size())) {
    std::vector<std::int32_t> order;
    sort_tokens(std::span(tokens.as<std::int32_t>(), static_cast<std::size_t>(tokens.numel())),
                order);
    std::copy(order.begin(), order.end(), out);
    return;
  }
  // Pieces keep the order of their tokens, so this rank's places stay sorted.
  std::int64_t shift[ContextSplit::kPieces] = {};
  TokenRange ranges[ContextSplit::kPieces];
  for (int i = 0; i < split_.pieces(); ++i) {
    ranges[i] = split_.piece(rank_, i);
    shift[i] = i * ranges[i].count() - ranges[i].begin;
  }
  for (const std::int32_t place : batch.order) {
    for (int i = 0; i < split_.pieces(); ++i) {
      if (place < ranges[i].begin || place >= ranges[i].end) continue;
      *out++ = static_cast<std::int32_t>(place + shift[i]);
    }
  }
}

BatchUploader::BatchUploader(ModelRuntime& runtime)
    : runtime_(&runtime),
      split_(runtime.options().geometry.tokens, runtime.mesh().context().size()),
      rank_(runtime.mesh().context().rank()) {
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

std::int64_t BatchUploader::upload(const MicroBatch& batch, const DeviceBatch& device) {
  Slot& slot = slots_[next_];
  next_ ^= 1;
  slot.read->synchronize();
  // The geometry may be longer than the batch, so that ranks have equal parts.
  stage(slot.host.tokens, batch.inputs, 0);
  stage(slot.host.targets, batch.targets, kIgnoredTarget);
  stage(slot.host.positions, batch.positions, 0);
  stage_order(slot.host.order, batch, slot.host.tokens);
  const auto bounds = [](const Tensor& t) {
    return std::span(t.as<std::int32_t>(), static_cast<std::size_t>(t.numel()));
  };
  const auto documents = bounds(slot.host.documents);
  const std::size_t given = std::min(documents.size(), batch.documents.size());
  std::copy_n(batch.documents.begin(), given, documents.begin());
  std::fill(documents.begin() + static_cast<std::ptrdiff_t>(given), documents.end(),
            batch.documents.back());
  for (int i = 0; slot.host.piece_bounds.defined() && i < split_.pieces(); ++i) {
    piece_bounds(split_.piece(rank_, i), documents,
                 bounds(slot.host.piece_bounds.row_slice(2 * i, 1)),
                 bounds(slot.host.piece_bounds.row_slice(2 * i + 1, 1)));
  }
  Stream& stream = runtime_->compute();
  const auto copy = [&](const Tensor& to, const Tensor& from) {
    stream.copy_bytes(to.data, from.data, to.bytes());
  };
  copy(device.tokens, slot.host.tokens);
  copy(device.targets, slot.host.targets);
  copy(device.positions, slot.host.positions);
  copy(device.order, slot.host.order);
  copy(device.documents, slot.host.documents);
  if (device.piece_bounds.defined()) copy(device.piece_bounds, slot.host.piece_bounds);
  stream.record(*slot.read);
  const auto* targets = slot.host.targets.as<std::int32_t>();
  return std::count_if(targets, targets + slot.host.targets.numel(),
                       [](std::int32_t target) { return target >= 0; });
}

}  // namespace tessera
