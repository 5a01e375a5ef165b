// BatchUploader: micro-batches from host memory to the device through two page-locked slots, so
// that the host may fill one while the device still reads the other. Of each micro-batch it takes
// the tokens that this rank of the context-parallel group holds.
#pragma once

#include <memory>

#include "data/batch.h"
#include "models/model_runtime.h"
#include "parallel/context_split.h"

namespace tessera {

class BatchUploader {
 public:
  explicit BatchUploader(ModelRuntime& runtime);

  // Enqueues the copy of `batch` into `target`, one of the runtime's device batches, padded to its
  // geometry. Blocks only until the device has read the slot's last content. Returns how many
  // target tokens this rank holds.
  std::int64_t upload(const MicroBatch& batch, const DeviceBatch& target);

 private:
  struct Slot {
    DeviceBatch host;
    std::unique_ptr<Event> read;
  };

  // This rank's part of `from`, a number for each token, with `padding` behind its end.
  void stage(const Tensor& to, const std::vector<std::int32_t>& from, std::int32_t padding) const;
  void stage_order(const Tensor& to, const MicroBatch& batch, const Tensor& tokens) const;

  ModelRuntime* runtime_;
  ContextSplit split_;
  int rank_;  // in the context-parallel group
  std::unique_ptr<Arena> arena_;
  Slot slots_[2];
  int next_ = 0;
};

}  // namespace tessera
