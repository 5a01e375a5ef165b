// ParamSync: the data-parallel traffic of a ParamStore. Backward reports each bucket as its gradients
// become complete; the reductions run on a communication stream behind the rest of the backward.
#pragma once

#include <memory>
#include <vector>

#include "parallel/param_store.h"

namespace tessera {

class ParamSync {
 public:
  // `communication` may be the compute stream itself: the same collectives, serialised.
  ParamSync(ParamStore& store, Stream& compute, Stream& communication);

  // Bucket b's gradients of this micro-batch are complete on the compute stream. On the last
  // micro-batch starts their sums over tp (partial sums, copies) and over data_context (all-reduce, or
  // reduce-scatter into the owned shard under ZeRO).
  void gradients_ready(int bucket, bool is_last_micro_batch);
  // The compute stream waits for all reductions started since the last call.
  void finish_gradients();
  // After the optimizer step: gathers the updated weight shards of every bucket (ZeRO 1 and up).
  void publish();

 private:
  void enter(int bucket);

  ParamStore* store_;
  Stream* compute_;
  Stream* communication_;
  std::unique_ptr<Communicator> copies_;  // ranks that hold copies of the same group
  std::vector<std::unique_ptr<Event>> ready_;
  std::unique_ptr<Event> done_;
};

}  // namespace tessera
