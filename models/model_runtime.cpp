#include "models/model_runtime.h"

#include <numeric>

#include "engine/core/log.h"
#include "kernels/step_control.h"
#include "parallel/context_split.h"

namespace tessera {
namespace {

std::unique_ptr<Stream> copy_stream(BackendContext& context, const RuntimeOptions& options,
                                    const char* name) {
  const bool copies = options.offloads_inputs || options.params.offloads_masters ||
                      options.params.offloads_moments;
  return copies && options.overlap && options.params.trains ? context.make_stream(name) : nullptr;
}

}  // namespace

ModelRuntime::ModelRuntime(BackendContext& context, const ProcessMesh& mesh,
                           const ModelConfig& config, const RuntimeOptions& options,
                           const RuntimeMemory& memory)
    : context_(&context),
      mesh_(&mesh),
      options_(options),
      compute_(context.make_stream("compute")),
      communication_(options.overlap ? context.make_stream("communication") : nullptr),
      transfer_(options.overlap && mesh.shape().pipeline > 1 ? context.make_stream("pipeline")
                                                             : nullptr),
      exchange_(options.overlap && options.sequence_parallel && mesh.shape().tensor > 1
                    ? context.make_stream("tensor exchange")
                    : nullptr),
      copies_in_(copy_stream(context, options, "copies in")),
      copies_out_(copy_stream(context, options, "copies out")),
      compute_scratch_(std::make_unique<ScratchStack>(*compute_, memory.compute_scratch)),
      arena_(context, memory.arena),
      host_arena_(context, memory.host, MemoryKind::kPinnedHost),
      model_(config, mesh.tensor().size(), options.sequence_parallel, options.recipe,
             stage_pieces(config, mesh.shape().pipeline, options.pipeline.chunks,
                          mesh.coordinate().pipeline, options.geometry.max_length)) {
  const PipelineShape shape = pipeline_shape(mesh.shape(), options.pipeline);
  const PipelineBuffers buffers = PipelineRunner::buffers(shape, mesh.coordinate().pipeline);
  if (communication_) {
    communication_scratch_ =
        std::make_unique<ScratchStack>(*communication_, memory.communication_scratch);
  }
  ParamStoreOptions params = options.params;
  // Scales of blocks straddle the cuts of shards.
  if (options.recipe.scaling == QuantScaling::kCurrent) {
    params.code_format = options.recipe.forward;
    for (const QuantRegistry::Linear& linear : model_.quant_registry().linears()) {
      params.code_matrices.push_back({linear.weight, linear.count});
    }
  }
  params_ = std::make_unique<ParamStore>(model_.registry().buckets(), mesh, params, arena_,
                                         &host_arena_);
  sync_ = std::make_unique<ParamSync>(*params_, *compute_,
                                      communication_ ? *communication_ : *compute_);
  const bool exchanges = options.sequence_parallel && mesh.shape().tensor > 1;
  overlap_ =
      std::make_unique<Overlap>(mesh.tensor(), *compute_, exchange_ ? *exchange_ : *compute_,
                                options.peer_copies && exchanges);
  if (options.peer_copies && exchanges && !overlap_->has_window() &&
      context.device().kind != DeviceKind::kMeta && mesh.world().rank() == 0) {
    log::warning("[parallel] parallel.peer_copies: these ranks do not reach each other's memory; "
                 "messages of tensor parallelism are sent");
  }
  const int sets = options.params.trains
                       ? std::accumulate(buffers.activations.begin(), buffers.activations.end(), 0)
                       : model_.num_chunks();
  quant_ = std::make_unique<QuantState>(model_.quant_registry(), *params_, arena_, sets);
  states_ = std::make_unique<StateOffload>(*params_, *compute_,
                                           copies_in_ ? *copies_in_ : *compute_,
                                           copies_out_ ? *copies_out_ : *compute_, arena_);
  if (options.offloads_inputs) {
    inputs_ = std::make_unique<InputOffload>(*compute_, copies_out_ ? *copies_out_ : *compute_);
  }
  const ActivationOptions activations{options.recompute, options.mlp_chunk_bytes,
                                      options.offloads_inputs};
  model_.plan(options.geometry, activations, options.params.trains, buffers, *quant_, arena_,
              inputs_.get(), &host_arena_);
  const int batches = options.params.trains ? buffers.batches : 1;
  for (int i = 0; i < batches; ++i) batches_.push_back(plan_batch(options.geometry, arena_));
  runner_ = std::make_unique<PipelineRunner>(model_, mesh.pipeline(), *compute_,
                                             transfer_ ? *transfer_ : *compute_, shape);
  const auto scalar = [&](const char* name, DType dtype, std::int64_t count) {
    return arena_.allocate(name, dtype, Shape{count}, MemoryClass::kInput);
  };
  totals_ = scalar("totals", DType::kF64, 2);
  sum_of_squares_ = scalar("sum of squares", DType::kF64, 1);
  control_ = scalar("step control", DType::kU8, sizeof(StepControl));
  nll_ = scalar("token losses", options.geometry.statistics(),
                options.geometry.tokens * mesh.context().size());
  if (context.device().kind == DeviceKind::kMeta) return;
  params_->initialize(*compute_);
  states_->initialize(*compute_);
  model_.initialize(*compute_);
  compute_->set_zero(control_.data, control_.bytes());
  compute_->synchronize();
}

MomentImage* ModelRuntime::moment_image(bool makes) {
  const ParamStoreOptions& params = options_.params;
  if (makes && moment_image_ == nullptr && params.trains && params.moments == DType::kU8) {
    moment_image_ = std::make_unique<MomentImage>(*params_);
  }
  return moment_image_.get();
}

LayerContext ModelRuntime::layer_context() {
  return LayerContext{*params_,
                      *sync_,
                      *quant_,
                      mesh_->tensor(),
                      *overlap_,
                      mesh_->context(),
                      *compute_,
                      options_.sequence_parallel,
                      options_.deterministic};
}

void ModelRuntime::run_micro_batches(int count, const PipelineRunner::Load& load) {
  LayerContext context = layer_context();
  runner_->run(count, batches_, load, loss_sum(), context);
}

void ModelRuntime::evaluate(bool wants_nll) {
  LayerContext context = layer_context();
  Communicator& group = mesh_->context();
  const std::int64_t tokens = options_.geometry.tokens;
  const Tensor own = nll_.flat_slice(group.rank() * tokens, tokens);
  runner_->evaluate(batch(), loss_sum(), wants_nll ? own : Tensor{}, context);
  if (wants_nll) group.all_gather(own, nll_, *compute_);
}

void ModelRuntime::sum_totals() {
  mesh_->data_context().all_reduce(totals_, ReduceOp::kSum, *compute_);
  // Every stage knows the denominator; the loss, the last one alone.
  if (mesh_->pipeline().size() > 1) {
    mesh_->pipeline().all_reduce(loss_sum(), ReduceOp::kSum, *compute_);
  }
}

PipelineShape pipeline_shape(const MeshShape& mesh, const PipelineOptions& options) {
  return PipelineShape{mesh.pipeline, options.chunks, options.micro_batches, options.kind};
}

RuntimeMemory ModelRuntime::memory() const {
  return RuntimeMemory{arena_.plan(), arena_.used(), compute_scratch_->high_water(),
                       communication_scratch_ ? communication_scratch_->high_water() : 0,
                       host_arena_.plan(), host_arena_.used()};
}

RuntimeMemory measure_runtime(const Capabilities& target, const MeshShape& shape, int rank,
                              const ModelConfig& config, const RuntimeOptions& options,
                              const std::function<void(ModelRuntime&)>& dry_run) {
  ContextOptions context_options;
  context_options.planned = target;
  const auto context = make_context(Device{DeviceKind::kMeta, 0}, context_options);
  const ProcessMesh mesh(make_meta_communicator(rank, shape.size()), shape);
  ModelRuntime runtime(*context, mesh, config, options, {});
  dry_run(runtime);
  return runtime.memory();
}

BatchGeometry batch_geometry(std::int64_t rows, std::int64_t sequence_length,
                             std::int64_t max_documents, DType compute, int tensor_size,
                             bool sequence_parallel, int context_size) {
  BatchGeometry geometry;
  // Padding makes the pieces equal: those of context parallelism, then those between blocks.
  const std::int64_t quantum = std::lcm(context_size > 1 ? ContextSplit::kPieces : 1,
                                        sequence_parallel ? tensor_size : 1);
  const std::int64_t share = (rows * sequence_length + context_size - 1) / context_size;
  geometry.tokens = (share + quantum - 1) / quantum * quantum;
  geometry.context_ranks = context_size;
  geometry.local_tokens = sequence_parallel ? geometry.tokens / tensor_size : geometry.tokens;
  geometry.max_documents = max_documents;
  geometry.max_length = sequence_length;
  geometry.compute = compute;
  return geometry;
}

}  // namespace tessera
