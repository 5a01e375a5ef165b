#include "checkpoint/block_sources.h"

#include <algorithm>
#include <cstring>

#include "engine/core/error.h"

namespace tessera {
namespace {

// An event for every so many bytes: writing starts long before the last byte has been copied.
constexpr std::uint64_t kSegmentBytes = std::uint64_t{64} << 20;

char* align(void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  return reinterpret_cast<char*>((address + kDirectAlignment - 1) / kDirectAlignment *
                                 kDirectAlignment);
}

std::uint64_t aligned_size(std::uint64_t bytes) {
  return (bytes + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
}

// Bytes [begin, end) of the image to `destination`; the head at once, the parts by the stream.
void copy_range(const FileImage& image, std::uint64_t begin, std::uint64_t end, char* destination,
                Stream& stream) {
  if (begin < image.head().size()) {
    const std::uint64_t bytes = std::min<std::uint64_t>(end, image.head().size()) - begin;
    std::memcpy(destination, image.head().data() + begin, bytes);
  }
  const auto& parts = image.parts();
  auto part = std::upper_bound(
      parts.begin(), parts.end(), begin,
      [](std::uint64_t offset, const FileImage::Part& p) { return offset < p.offset + p.bytes; });
  for (; part != parts.end() && part->offset < end; ++part) {
    const std::uint64_t from = std::max(begin, part->offset);
    const std::uint64_t to = std::min(end, part->offset + part->bytes);
    stream.copy_bytes(destination + (from - begin), part->source + (from - part->offset), to - from);
  }
}

}  // namespace

StagingRing::StagingRing(const FileImage& image, std::uint64_t block_bytes, int slots,
                         Stream& stream)
    : image_(&image), block_bytes_(block_bytes), stream_(&stream) {
  const std::uint64_t blocks = (image.bytes() + block_bytes - 1) / block_bytes;
  const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(
      static_cast<std::uint64_t>(std::max(slots, 1)), std::max<std::uint64_t>(blocks, 1)));
  memory_ = Buffer(stream.context(), count * block_bytes + kDirectAlignment, MemoryKind::kPinnedHost);
  char* data = align(memory_.data());
  slots_.resize(count);
  for (Slot& slot : slots_) {
    slot.data = data;
    slot.copied = stream.context().make_event();
    data += block_bytes;
  }
}

void StagingRing::run() {
  const std::uint64_t blocks = (image_->bytes() + block_bytes_ - 1) / block_bytes_;
  for (std::uint64_t index = 0; index < blocks; ++index) {
    Slot& slot = slots_[index % slots_.size()];
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return slot.is_free || cancelled_; });
      if (cancelled_) break;
      slot.is_free = false;
    }
    const std::uint64_t begin = index * block_bytes_;
    const std::uint64_t end = std::min(begin + block_bytes_, image_->bytes());
    copy_range(*image_, begin, end, slot.data, *stream_);
    stream_->record(*slot.copied);
    {
      const std::lock_guard lock(mutex_);
      filled_ = index + 1;
    }
    changed_.notify_all();
  }
  // Also when cancelled: nothing may still be copying into the ring when it goes away.
  stream_->synchronize();
}

const char* StagingRing::acquire(std::uint64_t index) {
  Slot& slot = slots_[index % slots_.size()];
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return filled_ > index || cancelled_; });
    if (cancelled_) return nullptr;
  }
  slot.copied->synchronize();
  return slot.data;
}

void StagingRing::release(std::uint64_t index) {
  {
    const std::lock_guard lock(mutex_);
    slots_[index % slots_.size()].is_free = true;
  }
  changed_.notify_all();
}

void StagingRing::cancel() {
  {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
  }
  changed_.notify_all();
}

char* SnapshotMemory::reserve(BackendContext& context, std::uint64_t bytes) {
  const std::uint64_t needed = aligned_size(bytes) + kDirectAlignment;
  if (buffer_.bytes() < needed) {
    buffer_ = Buffer();  // first, so that the two never exist together
    buffer_ = Buffer(context, needed, MemoryKind::kPinnedHost);
  }
  return align(buffer_.data());
}

std::uint64_t SnapshotMemory::missing(std::uint64_t bytes) const {
  const std::uint64_t needed = aligned_size(bytes) + kDirectAlignment;
  return needed <= buffer_.bytes() ? 0 : needed - buffer_.bytes();
}

Snapshot::Snapshot(const FileImage& image, std::uint64_t block_bytes, char* memory, Stream& stream,
                   Stream& copy_stream)
    : image_bytes_(image.bytes()),
      block_bytes_(block_bytes),
      memory_(memory),
      copy_stream_(&copy_stream),
      edge_(stream.context().make_event()),
      all_copied_(stream.context().make_event()) {
  std::memcpy(memory, image.head().data(), image.head().size());
  for (const FileImage::Part& part : image.parts()) {
    if (!part.is_stable) stream.copy_bytes(memory + part.offset, part.source, part.bytes);
  }
  stream.record(*edge_);
  copy_stream.wait(*edge_);
  std::uint64_t copied = 0;  // since the last event
  const auto end_segment = [&](std::uint64_t end) {
    segments_.push_back({end, stream.context().make_event()});
    copy_stream.record(*segments_.back().copied);
    copied = 0;
  };
  for (const FileImage::Part& part : image.parts()) {
    if (!part.is_stable) continue;
    for (std::uint64_t done = 0; done < part.bytes;) {
      const std::uint64_t bytes = std::min(part.bytes - done, kSegmentBytes);
      copy_stream.copy_bytes(memory + part.offset + done, part.source + done, bytes);
      done += bytes;
      copied += bytes;
      if (copied >= kSegmentBytes) end_segment(part.offset + done);
    }
  }
  end_segment(image_bytes_);
  copy_stream.record(*all_copied_);
}

Snapshot::~Snapshot() {
  try {
    copy_stream_->synchronize();
  } catch (...) {  // run() has reported it, or nobody asks any more
  }
}

const char* Snapshot::acquire(std::uint64_t index) {
  const std::uint64_t end = std::min((index + 1) * block_bytes_, image_bytes_);
  const auto segment = std::lower_bound(
      segments_.begin(), segments_.end(), end,
      [](const Segment& s, std::uint64_t offset) { return s.end < offset; });
  CHECK(segment != segments_.end(), "[checkpoint] block {} is outside the snapshot", index);
  segment->copied->synchronize();
  const std::lock_guard lock(mutex_);
  return cancelled_ ? nullptr : memory_ + index * block_bytes_;
}

void Snapshot::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
}

}  // namespace tessera
