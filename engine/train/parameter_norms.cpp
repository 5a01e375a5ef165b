#include "engine/train/parameter_norms.h"

#include <cmath>
#include <map>

#include "kernels/ops.h"

namespace tessera {

ParameterNorms::ParameterNorms(ModelRuntime& runtime, const ModelConfig& config)
    : runtime_(&runtime) {
  // Of the whole model: stages of a pipeline hold different parts, and all ranks sum one array.
  const Transformer whole(config, runtime.mesh().tensor().size(),
                          runtime.options().sequence_parallel);
  std::map<std::string, int> index_of;
  for (const BucketSpec& bucket : whole.registry().buckets()) {
    for (const ParamSpec& spec : bucket.params) {
      if (index_of.emplace(spec.name, static_cast<int>(names_.size())).second)
        names_.push_back(spec.name);
    }
  }
  ParamStore& params = runtime.params();
  for (int b = 0; b < params.num_shards(); ++b) {
    std::vector<int>& indices = indices_.emplace_back();
    for (const ShardPiece& piece : params.shard(b).pieces) {
      const std::string& name = params.bucket(b).params[static_cast<std::size_t>(piece.param)].name;
      const auto found = index_of.find(name);
      CHECK(found != index_of.end(), "[train] parameter {} is not one of the whole model", name);
      indices.push_back(found->second);
    }
  }
  device_ =
      std::make_unique<Buffer>(runtime.context(), count() * sizeof(double), MemoryKind::kDevice);
  host_ = std::make_unique<Buffer>(runtime.context(), 2 * count() * sizeof(double),
                                   MemoryKind::kPinnedHost);
}

double* ParameterNorms::host(std::int64_t step) const {
  return static_cast<double*>(host_->data()) + static_cast<std::size_t>(step % 2) * count();
}

void ParameterNorms::enqueue(std::int64_t step) {
  Stream& stream = runtime_->compute();
  ParamStore& params = runtime_->params();
  const Tensor sums{device_->data(), DType::kF64, Shape{static_cast<std::int64_t>(count())},
                    runtime_->context().device()};
  stream.set_zero(sums.data, sums.bytes());
  constexpr auto kSegmentBytes = static_cast<std::int64_t>(sizeof(ShardSegment));
  for (int b = 0; b < params.num_shards(); ++b) {
    const ParamStore::Shard& shard = params.shard(b);
    const std::vector<int>& indices = indices_[static_cast<std::size_t>(b)];
    for (std::size_t i = 0; i < indices.size(); ++i) {
      // A shard's segments are its pieces, in order.
      const Tensor segment =
          shard.segments.flat_slice(static_cast<std::int64_t>(i) * kSegmentBytes, kSegmentBytes);
      sum_of_squares(SumOfSquares{shard.gradient, segment, sums.flat_slice(indices[i], 1)}, stream);
    }
  }
  // The same two sums as for the norm of all (optimizer_step).
  const ProcessMesh& mesh = runtime_->mesh();
  mesh.model().all_reduce(sums, ReduceOp::kSum, stream);
  if (params.shard_count() > 1) mesh.shard().all_reduce(sums, ReduceOp::kSum, stream);
  stream.copy_bytes(host(step), sums.data, sums.bytes());
}

std::vector<std::pair<std::string, double>> ParameterNorms::read(std::int64_t step,
                                                                 double denominator) const {
  std::vector<std::pair<std::string, double>> norms;
  const double* sums = host(step);
  for (std::size_t i = 0; i < count(); ++i)
    norms.emplace_back(names_[i], std::sqrt(sums[i]) / denominator);
  return norms;
}

}  // namespace tessera
