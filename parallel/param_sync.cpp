#include "parallel/param_sync.h"

#include <algorithm>
#include <numeric>

#include "engine/core/error.h"

namespace tessera {

ParamSync::ParamSync(ParamStore& store, Stream& compute, Stream& communication)
    : store_(&store), compute_(&compute), communication_(&communication) {
  int copies = 1;
  for (int b = 0; b < store.num_buckets(); ++b) {
    copies = std::max(copies, store.layout(b).copies);
    ready_.push_back(compute.context().make_event());
  }
  done_ = compute.context().make_event();
  if (copies > 1) {
    Communicator& tensor = store.mesh().tensor();
    std::vector<int> members(static_cast<std::size_t>(copies));
    std::iota(members.begin(), members.end(), tensor.rank() / copies * copies);
    copies_ = tensor.subgroup(members, "tp copies");
  }
}

void ParamSync::enter(int bucket) {
  if (communication_ == compute_) return;
  Event& event = *ready_[static_cast<std::size_t>(bucket)];
  compute_->record(event);
  communication_->wait(event);
}

void ParamSync::gradients_ready(int bucket, bool is_last_micro_batch) {
  if (!is_last_micro_batch) return;
  CHECK(store_->is_written(bucket), "[param_sync] bucket {} has gradients that backward did not write",
        store_->bucket(bucket).name);
  enter(bucket);
  const BucketLayout& layout = store_->layout(bucket);
  const Tensor& gradients = store_->bucket_gradients(bucket);
  const ProcessMesh& mesh = store_->mesh();
  if (layout.tensor_sum_end > layout.tensor_sum_begin) {
    mesh.tensor().all_reduce(gradients.flat_slice(layout.tensor_sum_begin,
                                                  layout.tensor_sum_end - layout.tensor_sum_begin),
                             ReduceOp::kSum, *communication_);
  }
  for (const BucketLayout::Range& range : layout.copies_sums) {
    copies_->all_reduce(gradients.flat_slice(range.begin, range.end - range.begin), ReduceOp::kSum,
                        *communication_);
  }
  if (mesh.data_context().size() == 1) return;
  if (store_->options().zero == 0) {
    mesh.data_context().all_reduce(gradients, ReduceOp::kSum, *communication_);
  } else {
    mesh.data_context().reduce_scatter(gradients, store_->shard(bucket).gradient, ReduceOp::kSum,
                                       *communication_);
  }
}

void ParamSync::finish_gradients() {
  if (communication_ == compute_) return;
  communication_->record(*done_);
  compute_->wait(*done_);
}

void ParamSync::publish() {
  for (int b = 0; b < store_->num_buckets(); ++b) store_->weights_changed(b);
  if (store_->options().zero == 0) return;
  Communicator& group = store_->mesh().data_context();
  for (int b = 0; b < store_->num_buckets(); ++b) {
    group.all_gather(store_->shard(b).weight, store_->bucket_weights(b), *compute_);
  }
}

}  // namespace tessera
