// ParamSync: the data-parallel traffic of a ParamStore. Before a bucket's weights are read they are
// acquired; as its gradients become complete backward reports them. What that moves depends on the
// ZeRO stage, which callers need not know:
//
//            weights                                 gradients
//   ZeRO 0   stay                                    summed, all of them, on the last micro-batch
//   ZeRO 1   stay, gathered after an update          each rank gets its shard, on the last
//   ZeRO 2   as ZeRO 1                               each rank adds its shard, on every micro-batch
//   ZeRO 3   gathered when acquired or prefetched    as ZeRO 2
//
// ZeRO 3 gathers matrices that products read as FP8 codes in this form (ParamStore::gathers_codes):
// shards are cast once, when they have changed, under the scale of the whole.
//
// Shards are cut over ProcessMesh::shard(). Where that is a part of the data-parallel ranks (a
// node), the parts add up their shards of gradients on the last micro-batch and make the same
// update.
//
// Gathers and reductions run on the communication stream; the streams are ordered by events only
// and the host never waits.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "parallel/param_store.h"

namespace tessera {

class ParamSync;

// The weights of a bucket are whole on the compute stream while it lives.
class WeightLease {
 public:
  WeightLease() = default;
  WeightLease(ParamSync& sync, int bucket) : sync_(&sync), bucket_(bucket) {}
  ~WeightLease() { release(); }
  WeightLease(WeightLease&& other) noexcept
      : sync_(std::exchange(other.sync_, nullptr)), bucket_(other.bucket_) {}
  WeightLease& operator=(WeightLease&& other) noexcept {
    if (this != &other) {
      release();
      sync_ = std::exchange(other.sync_, nullptr);
      bucket_ = other.bucket_;
    }
    return *this;
  }

 private:
  void release() noexcept;

  ParamSync* sync_ = nullptr;
  int bucket_ = -1;
};

class ParamSync {
 public:
  // `communication` may be the compute stream itself: the same collectives, serialised. Collective
  // over the tensor-parallel group where key/value heads are held in copies.
  ParamSync(ParamStore& store, Stream& compute, Stream& communication);

  // Starts to gather bucket b for the next acquire, if its buffer is free; nothing where weights
  // stay, or for a bucket below 0 or past the last. Ranks of a group make the same calls in the
  // same order.
  void prefetch(int bucket);
  [[nodiscard]] WeightLease acquire(int bucket);

  // Before the first gradient of bucket b of a micro-batch is written: where buffers are shared the
  // compute stream waits until the last reduction from this one has read it. Does nothing while
  // open.
  void open_gradients(int bucket);
  // Bucket b's gradients of this micro-batch are complete on the compute stream. Starts their
  // reduction over data_context as above and, on the last micro-batch, the sums over tp.
  void gradients_ready(int bucket, bool is_last_micro_batch);
  // Adds up what the ends of a pipeline share; the compute stream then waits for all reductions
  // started since the last call.
  void finish_gradients();
  // The whole bucket in the compute format under ZeRO 3, whatever acquire() gathers, for export: in
  // the memory of its gradients, until these are opened. On the compute stream; collective.
  Tensor gather_exact(int bucket);
  // The shards have new values on the compute stream (an optimizer step, a checkpoint): gathers
  // them where weights stay, else makes gathered copies invalid.
  void publish();

 private:
  friend class WeightLease;
  // Memory that whole buckets of weights share under ZeRO 3.
  struct WeightBuffer {
    int bucket = -1;            // gathered, or being gathered
    std::uint64_t version = 0;  // of its weights
    int leases = 0;
    std::unique_ptr<Event> gathered;  // on the communication stream
    std::unique_ptr<Event> released;  // on the compute stream
  };
  // Memory that whole buckets of gradients share under ZeRO 2 and 3.
  struct GradientBuffer {
    int bucket = -1;                 // being written by a backward
    std::unique_ptr<Event> reduced;  // on the communication stream
  };

  bool has_two_streams() const { return communication_ != compute_; }
  void release(int bucket);
  bool holds(const WeightBuffer& buffer, int bucket) const;
  void gather(WeightBuffer& buffer, int bucket);
  void gather_plain(int bucket);
  void cast_codes();
  void reduce_over_data(int bucket);
  void sum_over_tensor(int bucket);

  ParamStore* store_;
  Stream* compute_;
  Stream* communication_;
  std::unique_ptr<Communicator> copies_;  // ranks that hold copies of the same group
  std::vector<WeightBuffer> weight_buffers_;
  std::vector<GradientBuffer> gradient_buffers_;
  std::vector<bool> has_gradient_;  // whether the shard holds gradients of this step
  std::vector<std::unique_ptr<Event>> ready_;
  std::unique_ptr<Event> published_;
  std::unique_ptr<Event> done_;
};

}  // namespace tessera
