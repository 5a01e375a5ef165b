#include "engine/train/optimizer.h"

#include "kernels/ops.h"

namespace tessera {

void optimizer_step(ModelRuntime& runtime, const AdamWSettings& settings) {
  Stream& stream = runtime.compute();
  ParamStore& params = runtime.params();
  const Tensor& sum = runtime.sum_of_squares();
  stream.set_zero(sum.data, sum.bytes());
  for (int b = 0; b < params.num_shards(); ++b) {
    const ParamStore::Shard& shard = params.shard(b);
    sum_of_squares(SumOfSquares{shard.gradient, shard.segments, sum}, stream);
  }
  // Ranks of one model copy hold different parameters; ranks of one ZeRO group, different shards.
  const ProcessMesh& mesh = runtime.mesh();
  mesh.model().all_reduce(sum, ReduceOp::kSum, stream);
  if (params.shard_count() > 1) mesh.shard().all_reduce(sum, ReduceOp::kSum, stream);
  step_control_finish(StepControlFinish{runtime.control(), sum, runtime.totals().flat_slice(1, 1)}, stream);
  runtime.states().update([&](const ShardState& state) {
    AdamW args;
    args.weight = state.weight;
    args.master = state.master;
    args.grad = state.gradient;
    args.m = state.m;
    args.v = state.v;
    args.m_scale = state.m_scale;
    args.v_scale = state.v_scale;
    args.segments = state.segments;
    args.control = runtime.control();
    args.beta1 = settings.beta1;
    args.beta2 = settings.beta2;
    args.eps = settings.eps;
    adamw(args, stream);
  });
  runtime.sync().publish();
}

}  // namespace tessera
