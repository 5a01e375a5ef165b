#include "engine/plan/traffic.h"

#include "models/hf/names.h"

namespace tessera {
namespace {

// Elements of a tensor-parallel rank's matrices that are gathered as FP8 codes, of all stages.
double code_parameters(const ModelConfig& model, int tensor_size, const RuntimeOptions& options) {
  if (options.recipe.scaling != QuantScaling::kCurrent) return 0;
  const Transformer whole(model, tensor_size, options.sequence_parallel, options.recipe);
  double elements = 0;
  for (const QuantRegistry::Linear& linear : whole.quant_registry().linears()) {
    const auto& params = whole.registry().buckets()[static_cast<std::size_t>(linear.weight.bucket)].params;
    for (int i = 0; i < linear.count; ++i) {
      const ParamSpec& spec = params[static_cast<std::size_t>(linear.weight.index + i)];
      elements += static_cast<double>(local_extent(spec, tensor_size, 0).elements());
    }
  }
  return elements;
}

}  // namespace

Traffic step_traffic(const ModelConfig& model, const MeshShape& mesh, const RuntimeOptions& options,
                     std::int64_t micro_batches) {
  Traffic traffic;
  const double tp = mesh.tensor;
  const double activation = static_cast<double>(options.geometry.tokens) *
                            static_cast<double>(model.hidden_size) *
                            static_cast<double>(size_of(options.params.compute));
  // A ring all-gather or reduce-scatter of S bytes sends S (n - 1) / n per rank, an all-reduce
  // twice that. Per block: forward two gathers and two scatters (or two all-reduces); backward four
  // gathers (two of them again for the weight gradients) and two scatters under sequence
  // parallelism, else two all-reduces. A full recompute repeats the forward but its last exchange.
  const double exchange = activation * (tp - 1) / tp;
  const bool split = options.sequence_parallel;
  const double forward = 4 * exchange;
  const double backward = split ? 6 * exchange : 4 * exchange;
  const double again =
      options.recompute == Recompute::kFull ? forward - (split ? 1 : 2) * exchange : 0;
  const double stages = mesh.pipeline;
  const auto times = static_cast<double>(micro_batches);
  traffic.tensor_bytes =
      times * static_cast<double>(model.num_hidden_layers) / stages * (forward + backward + again);
  // Keys and values of a micro-batch are gathered in the forward and again in the backward (once
  // more by a full recompute), and their gradients scattered. Each rank of tp has its own heads.
  const double cp = mesh.context;
  const double key_values = static_cast<double>(options.geometry.tokens) * cp * 2 *
                            static_cast<double>(local_qkv_layout(model, mesh.tensor).kv_cols()) *
                            static_cast<double>(size_of(options.params.compute));
  const double exchanges = options.recompute == Recompute::kFull ? 4 : 3;
  traffic.context_bytes = times * static_cast<double>(model.num_hidden_layers) / stages *
                          exchanges * key_values * (cp - 1) / cp;
  // A message of the residual stream forward and one of its gradient back at each of the
  // stages * chunks - 1 cuts; under sequence parallelism each rank sends its own tokens.
  const double cuts = stages * options.pipeline.chunks - 1;
  traffic.pipeline_bytes = 2 * times * cuts / stages * (split ? activation / tp : activation);

  const double dp = mesh.data * mesh.context;
  const double shards = mesh.shard_size();
  const double parameters = static_cast<double>(parameter_count(model)) / (tp * stages);
  const double all_gradients = parameters * static_cast<double>(size_of(options.params.gradients));
  const double gradients = all_gradients * (shards - 1) / shards;
  const double weights =
      parameters * static_cast<double>(size_of(options.params.compute)) * (shards - 1) / shards;
  const double replicas = dp / shards;
  const double between = 2 * all_gradients / shards * (replicas - 1) / replicas;
  switch (options.params.zero) {
    case 0:
      traffic.data_bytes = 2 * all_gradients * (dp - 1) / dp;
      break;
    case 1:
      traffic.data_bytes = gradients + weights + between;
      break;
    case 2:
      traffic.data_bytes = times * gradients + weights + between;
      break;
    default: {  // gathered for the forward and again for the backward; FP8 products' weights as codes
      const double saved = code_parameters(model, mesh.tensor, options) / stages *
                           (static_cast<double>(size_of(options.params.compute)) - 1) * (shards - 1) / shards;
      traffic.data_bytes = times * (gradients + 2 * (weights - saved)) + between;
    }
  }
  return traffic;
}

}  // namespace tessera
