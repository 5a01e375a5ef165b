#include "parallel/param_sync.h"

#include <algorithm>
#include <numeric>

#include "engine/core/error.h"
#include "kernels/ops.h"

namespace tessera {

void WeightLease::release() noexcept {
  // Recording an event fails only where the device itself has failed, which the next call reports.
  try {
    if (sync_ != nullptr) sync_->release(bucket_);
  } catch (...) {
  }
  sync_ = nullptr;
}

ParamSync::ParamSync(ParamStore& store, Stream& compute, Stream& communication)
    : store_(&store), compute_(&compute), communication_(&communication) {
  BackendContext& context = compute.context();
  int copies = 1;
  for (int b = 0; b < store.num_buckets(); ++b) {
    copies = std::max(copies, store.layout(b).copies);
    ready_.push_back(context.make_event());
  }
  has_gradient_.resize(static_cast<std::size_t>(store.num_buckets()), false);
  for (int i = 0; i < store.num_buffers(); ++i) {
    weight_buffers_.push_back({-1, 0, 0, context.make_event(), context.make_event()});
    gradient_buffers_.push_back({-1, context.make_event()});
  }
  published_ = context.make_event();
  done_ = context.make_event();
  if (copies > 1) {
    Communicator& tensor = store.mesh().tensor();
    std::vector<int> members(static_cast<std::size_t>(copies));
    std::iota(members.begin(), members.end(), tensor.rank() / copies * copies);
    copies_ = tensor.subgroup(members, "tp copies");
  }
}

bool ParamSync::holds(const WeightBuffer& buffer, int bucket) const {
  return buffer.bucket == bucket && buffer.version == store_->weight_version(bucket);
}

void ParamSync::gather(WeightBuffer& buffer, int bucket) {
  if (has_two_streams()) {
    communication_->wait(*published_);
    communication_->wait(*buffer.released);
  }
  const bool gathers_codes = store_->gathers_codes(bucket);
  const Tensor& whole =
      gathers_codes ? store_->code_bucket(bucket).whole : store_->bucket_weights(bucket);
  const Tensor& shard =
      gathers_codes ? store_->code_bucket(bucket).shard : store_->shard(bucket).weight;
  for (const BucketLayout::Part& part : store_->layout(bucket).parts) {
    store_->mesh().shard().all_gather(shard.flat_slice(part.shard_begin, part.shard_size),
                                      whole.flat_slice(part.begin, part.size), *communication_);
  }
  if (gathers_codes) gather_plain(bucket);
  if (has_two_streams()) communication_->record(*buffer.gathered);
  buffer.bucket = bucket;
  buffer.version = store_->weight_version(bucket);
}

// Every rank writes what it holds of the few plain parameters between zeros; the sum is all of them.
void ParamSync::gather_plain(int bucket) {
  const ParamStore::CodeBucket& codes = store_->code_bucket(bucket);
  if (!codes.plain.defined()) return;
  communication_->set_zero(codes.plain.data, codes.plain.bytes());
  const ParamStore::Shard& shard = store_->shard(bucket);
  for (const ShardPiece& piece : shard.pieces) {
    const std::int64_t begin = codes.plain_begin[static_cast<std::size_t>(piece.param)];
    if (begin < 0) continue;
    const Tensor from = shard.weight.flat_slice(piece.shard_begin, piece.length);
    const Tensor to = codes.plain.flat_slice(begin + piece.local_begin, piece.length);
    communication_->copy_bytes(to.data, from.data, to.bytes());
  }
  store_->mesh().shard().all_reduce(codes.plain, ReduceOp::kSum, *communication_);
}

// Casts the shards of code matrices under the scales of the whole matrices.
void ParamSync::cast_codes() {
  const Tensor& amaxes = store_->code_amaxes();
  if (!amaxes.defined()) return;
  using Ranges = std::vector<BucketLayout::Range>;
  const auto for_matrices = [&](const auto& visit) {
    for (int b = 0; b < store_->num_buckets(); ++b) {
      for (const ParamStore::CodeMatrix& matrix : store_->code_bucket(b).matrices) {
        visit(b, matrix, shard_ranges(store_->layout(b), store_->shard_rank(), matrix.begin, matrix.end));
      }
    }
  };
  // As rows of some length: casts work on tiles.
  const auto cut = [](const Tensor& shard, const BucketLayout::Range& range) {
    const std::int64_t count = range.end - range.begin;
    std::int64_t cols = 4096;
    while (count % cols != 0) cols /= 2;
    return shard.flat_slice(range.begin, count).reshape(Shape{count / cols, cols});
  };
  compute_->set_zero(amaxes.data, amaxes.bytes());
  for_matrices([&](int b, const ParamStore::CodeMatrix& matrix, const Ranges& ranges) {
    for (const BucketLayout::Range& range : ranges) {
      amax(Amax{cut(store_->shard(b).weight, range), matrix.amax}, *compute_);
    }
  });
  store_->mesh().shard().all_reduce(amaxes, ReduceOp::kMax, *compute_);
  for_matrices([&](int b, const ParamStore::CodeMatrix& matrix, Ranges ranges) {
    // A rank without a piece of the matrix needs its scale all the same.
    if (ranges.empty()) ranges.push_back({0, 0});
    for (const BucketLayout::Range& range : ranges) {
      quantize(Quantize{cut(store_->shard(b).weight, range), matrix.amax,
                        cut(store_->code_bucket(b).shard, range), Tensor{}, matrix.scale},
               *compute_);
    }
  });
}

Tensor ParamSync::gather_exact(int bucket) {
  CHECK(store_->shards_weights() && store_->options().trains,
        "[param_sync] {} is whole, or has no gradients to lie in", store_->bucket(bucket).name);
  open_gradients(bucket);
  const Tensor& gradients = store_->bucket_gradients(bucket);
  const Tensor whole(gradients.data, store_->options().compute, gradients.shape, gradients.device);
  const Tensor& shard = store_->shard(bucket).weight;
  for (const BucketLayout::Part& part : store_->layout(bucket).parts) {
    store_->mesh().shard().all_gather(shard.flat_slice(part.shard_begin, part.shard_size),
                                      whole.flat_slice(part.begin, part.size), *compute_);
  }
  gradient_buffers_[static_cast<std::size_t>(store_->buffer(bucket))].bucket = -1;
  return whole;
}

void ParamSync::prefetch(int bucket) {
  if (!store_->shards_weights() || bucket < 0 || bucket >= store_->num_buckets()) return;
  WeightBuffer& buffer = weight_buffers_[static_cast<std::size_t>(store_->buffer(bucket))];
  if (holds(buffer, bucket) || buffer.leases > 0) return;
  gather(buffer, bucket);
}

WeightLease ParamSync::acquire(int bucket) {
  if (!store_->shards_weights()) return {};
  WeightBuffer& buffer = weight_buffers_[static_cast<std::size_t>(store_->buffer(bucket))];
  if (!holds(buffer, bucket)) {
    CHECK(buffer.leases == 0, "[param_sync] {} is acquired while {} holds its buffer",
          store_->bucket(bucket).name, store_->bucket(buffer.bucket).name);
    gather(buffer, bucket);
  }
  if (has_two_streams()) compute_->wait(*buffer.gathered);
  ++buffer.leases;
  store_->set_leased(bucket, true);
  return {*this, bucket};
}

void ParamSync::release(int bucket) {
  WeightBuffer& buffer = weight_buffers_[static_cast<std::size_t>(store_->buffer(bucket))];
  if (--buffer.leases > 0) return;
  store_->set_leased(bucket, false);
  if (has_two_streams()) compute_->record(*buffer.released);
}

void ParamSync::open_gradients(int bucket) {
  if (!store_->shards_gradients()) return;
  GradientBuffer& buffer = gradient_buffers_[static_cast<std::size_t>(store_->buffer(bucket))];
  if (buffer.bucket == bucket) return;
  CHECK(buffer.bucket < 0, "[param_sync] gradients of {} would overwrite those of {}",
        store_->bucket(bucket).name, store_->bucket(buffer.bucket).name);
  buffer.bucket = bucket;
  store_->begin_bucket(bucket);
  if (has_two_streams()) compute_->wait(*buffer.reduced);
}

void ParamSync::reduce_over_data(int bucket) {
  const Tensor& whole = store_->bucket_gradients(bucket);
  const Tensor& shard = store_->shard(bucket).gradient;
  if (store_->options().zero == 0) {
    Communicator& all = store_->mesh().data_context();
    if (all.size() > 1) all.all_reduce(whole, ReduceOp::kSum, *communication_);
    return;
  }
  Communicator& group = store_->mesh().shard();
  const auto index = static_cast<std::size_t>(bucket);
  const bool adds = store_->shards_gradients() && has_gradient_[index];
  has_gradient_[index] = true;
  for (const BucketLayout::Part& part : store_->layout(bucket).parts) {
    const Tensor in = whole.flat_slice(part.begin, part.size);
    const Tensor own = shard.flat_slice(part.shard_begin, part.shard_size);
    if (!adds) {
      group.reduce_scatter(in, own, ReduceOp::kSum, *communication_);
      continue;
    }
    const Tensor sum = in.flat_slice(part.shard_size * group.rank(), part.shard_size);
    group.reduce_scatter(in, sum, ReduceOp::kSum, *communication_);
    add(Add{own, sum, own}, *communication_);
  }
}

void ParamSync::sum_over_tensor(int bucket) {
  const BucketLayout& layout = store_->layout(bucket);
  const Tensor& shard = store_->shard(bucket).gradient;
  const auto sum = [&](Communicator& group, std::int64_t begin, std::int64_t end) {
    for (const BucketLayout::Range& range :
         shard_ranges(layout, store_->shard_rank(), begin, end)) {
      group.all_reduce(shard.flat_slice(range.begin, range.end - range.begin), ReduceOp::kSum,
                       *communication_);
    }
  };
  sum(store_->mesh().tensor(), layout.tensor_sum_begin, layout.tensor_sum_end);
  for (const BucketLayout::Range& range : layout.copies_sums) sum(*copies_, range.begin, range.end);
}

void ParamSync::gradients_ready(int bucket, bool is_last_micro_batch) {
  if (!store_->shards_gradients() && !is_last_micro_batch) return;
  CHECK(store_->is_written(bucket), "[param_sync] {} has gradients that backward did not write",
        store_->bucket(bucket).name);
  if (has_two_streams()) {
    Event& event = *ready_[static_cast<std::size_t>(bucket)];
    compute_->record(event);
    communication_->wait(event);
  }
  reduce_over_data(bucket);
  if (store_->shards_gradients()) {
    GradientBuffer& buffer = gradient_buffers_[static_cast<std::size_t>(store_->buffer(bucket))];
    buffer.bucket = -1;
    if (has_two_streams()) communication_->record(*buffer.reduced);
  }
  if (!is_last_micro_batch) return;
  if (store_->options().zero > 0 && store_->mesh().has_replicas()) {
    store_->mesh().replicas().all_reduce(store_->shard(bucket).gradient, ReduceOp::kSum,
                                         *communication_);
  }
  sum_over_tensor(bucket);
}

void ParamSync::finish_gradients() {
  for (int b = 0; b < store_->num_buckets(); ++b) {
    // Here and not as they become ready: the first stage has its own only at the end, and what the
    // last one still has to send must not stand behind it.
    if (!store_->bucket(b).is_on_both_ends) continue;
    store_->mesh().pipeline_ends().all_reduce(store_->shard(b).gradient, ReduceOp::kSum,
                                              *communication_);
  }
  std::fill(has_gradient_.begin(), has_gradient_.end(), false);
  if (!has_two_streams()) return;
  communication_->record(*done_);
  compute_->wait(*done_);
}

void ParamSync::publish() {
  for (int b = 0; b < store_->num_buckets(); ++b) store_->weights_changed(b);
  if (store_->shards_weights()) {
    cast_codes();
    if (has_two_streams()) compute_->record(*published_);
    return;
  }
  if (store_->shard_count() == 1) return;
  for (int b = 0; b < store_->num_buckets(); ++b) {
    const Tensor& shard = store_->shard(b).weight;
    for (const BucketLayout::Part& part : store_->layout(b).parts) {
      store_->mesh().shard().all_gather(shard.flat_slice(part.shard_begin, part.shard_size),
                                        store_->bucket_weights(b).flat_slice(part.begin, part.size),
                                        *compute_);
    }
  }
}

}  // namespace tessera
