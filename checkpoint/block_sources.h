// Where a save's blocks come from: a ring of staging blocks that the calling thread fills while others
// write (synchronous), or a snapshot of the whole image in host memory (asynchronous).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "checkpoint/block_writer.h"
#include "checkpoint/file_image.h"
#include "engine/device/buffer.h"
#include "engine/device/stream.h"

namespace tessera {

class StagingRing : public BlockSource {
 public:
  // `slots` blocks of pinned host memory of the stream's context; the image outlives this.
  StagingRing(const FileImage& image, std::uint64_t block_bytes, int slots, Stream& stream);

  const char* acquire(std::uint64_t index) override;
  void release(std::uint64_t index) override;
  void cancel() override;
  // Copies block after block into the ring by the stream.
  void run() override;

 private:
  struct Slot {
    char* data = nullptr;
    std::unique_ptr<Event> copied;
    bool is_free = true;
  };

  const FileImage* image_;
  std::uint64_t block_bytes_;
  Stream* stream_;
  Buffer memory_;
  std::vector<Slot> slots_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t filled_ = 0;  // blocks handed to the stream so far
  bool cancelled_ = false;
};

// Host memory for snapshots, kept from save to save. One save uses it at a time.
class SnapshotMemory {
 public:
  // Makes room for `bytes`; throws kAnswerNo if the host has not enough.
  char* reserve(BackendContext& context, std::uint64_t bytes);
  // Bytes that reserve(bytes) would add to what is held now.
  std::uint64_t missing(std::uint64_t bytes) const;

 private:
  Buffer buffer_;
};

class Snapshot : public BlockSource {
 public:
  // Enqueues the copies: of state that a forward may change on `stream`, so that they precede what is
  // enqueued there next; of the rest on `copy_stream`, behind the work `stream` holds now. `memory`
  // has room for the image. Does not wait.
  Snapshot(const FileImage& image, std::uint64_t block_bytes, char* memory, Stream& stream,
           Stream& copy_stream);
  ~Snapshot() override;  // waits for the copies: they go to memory that may be released next

  // Makes `stream` wait until everything has been copied.
  void order_before(Stream& stream) { stream.wait(*all_copied_); }

  const char* acquire(std::uint64_t index) override;
  void release(std::uint64_t) override {}
  void cancel() override;
  void run() override { copy_stream_->synchronize(); }

 private:
  struct Segment {
    std::uint64_t end = 0;  // image bytes below this are copied when the event is reached
    std::unique_ptr<Event> copied;
  };

  std::uint64_t image_bytes_;
  std::uint64_t block_bytes_;
  char* memory_;
  Stream* copy_stream_;
  std::unique_ptr<Event> edge_;
  std::vector<Segment> segments_;
  std::unique_ptr<Event> all_copied_;
  std::mutex mutex_;
  bool cancelled_ = false;
};

}  // namespace tessera
