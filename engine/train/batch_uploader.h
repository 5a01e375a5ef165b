// BatchUploader: micro-batches from host memory to the device through two page-locked slots, so that the
// host may fill one while the device still reads the other.
#pragma once

#include <memory>

#include "data/batch.h"
#include "models/model_runtime.h"

namespace tessera {

class BatchUploader {
 public:
  explicit BatchUploader(ModelRuntime& runtime);

  // Enqueues the copy of `batch` into `target`, one of the runtime's device batches, padded to its
  // geometry. Blocks only until the device has read the slot's last content.
  void upload(const MicroBatch& batch, const DeviceBatch& target);

 private:
  struct Slot {
    DeviceBatch host;
    std::unique_ptr<Event> read;
  };

  ModelRuntime* runtime_;
  std::unique_ptr<Arena> arena_;
  Slot slots_[2];
  int next_ = 0;
};

}  // namespace tessera
