// ModelRuntime: a Transformer with its memory and streams on one rank. Built once over the meta
// device it measures what it needs; built over a real device it allocates exactly that.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/memory/arena.h"
#include "engine/memory/scratch.h"
#include "models/moment_image.h"
#include "models/pipeline_runner.h"
#include "models/transformer.h"
#include "parallel/mesh.h"
#include "parallel/param_store.h"
#include "parallel/param_sync.h"
#include "parallel/state_offload.h"

namespace tessera {

// How a step's micro-batches go through the pipeline stages of the mesh.
struct PipelineOptions {
  PipelineKind kind = PipelineKind::k1F1B;
  int chunks = 1;         // per rank
  int micro_batches = 1;  // most in a step
};

struct RuntimeOptions {
  BatchGeometry geometry;
  PipelineOptions pipeline;
  Recompute recompute = Recompute::kNone;
  std::int64_t mlp_chunk_bytes = kMlpChunkBytes;  // see ActivationOptions
  bool offloads_inputs = false;                   // under Recompute::kFull alone
  ParamStoreOptions params;
  QuantRecipe recipe;
  bool sequence_parallel = false;
  bool deterministic = true;
  bool peer_copies = false;  // messages of tensor parallelism by copies into the peers' memory
  bool overlap = true;  // streams of their own for communication and copies to and from the host
};

// What a rank allocates: everything planned, and the high-water mark of each stream's temporaries.
struct RuntimeMemory {
  MemoryPlan plan;
  std::size_t arena = 0;
  std::size_t compute_scratch = 0;
  std::size_t communication_scratch = 0;
  MemoryPlan host_plan;  // what is offloaded, in page-locked host memory
  std::size_t host = 0;
  // On the device.
  std::size_t total() const { return arena + compute_scratch + communication_scratch; }
};

class ModelRuntime {
 public:
  // On the meta device `memory` is ignored. The mesh and the context must outlive the runtime.
  ModelRuntime(BackendContext& context, const ProcessMesh& mesh, const ModelConfig& config,
               const RuntimeOptions& options, const RuntimeMemory& memory);

  Transformer& model() { return model_; }
  ParamStore& params() { return *params_; }
  ParamSync& sync() { return *sync_; }
  StateOffload& states() { return *states_; }
  QuantState& quant() { return *quant_; }
  // The form in which checkpoints hold 8-bit moments, made at the first call that asks for it (its
  // host memory is kept from save to save); null while it is not, or where moments have other
  // formats.
  MomentImage* moment_image(bool makes = false);
  Stream& compute() { return *compute_; }
  BackendContext& context() { return *context_; }
  const ProcessMesh& mesh() const { return *mesh_; }
  const RuntimeOptions& options() const { return options_; }
  // For evaluate(), decode and models in one piece; run_micro_batches has more of them.
  const DeviceBatch& batch() const { return batches_.front(); }
  // Scalars of a step on the device.
  const Tensor& totals() const { return totals_; }  // [2] fp64: summed loss, denominator
  const Tensor& sum_of_squares() const { return sum_of_squares_; }  // [1] fp64
  const Tensor& control() const { return control_; }                // u8: one StepControl
  // Loss of each token, [T] of every context-parallel rank, one behind the other.
  const Tensor& nll() const { return nll_; }
  Tensor loss_sum() const { return totals_.flat_slice(0, 1); }

  LayerContext layer_context();

  // Forward and backward of `count` micro-batches of a step: `load` enqueues the copy of each to
  // its target on compute(). The loss is added to totals() on the last pipeline stage.
  void run_micro_batches(int count, const PipelineRunner::Load& load);
  // Forward of batch(): the loss, and with `wants_nll` that of each token, on the last stage.
  void evaluate(bool wants_nll);
  // Sums totals() over the data-parallel ranks, so that all ranks of all stages have the same.
  void sum_totals();

  // What has been planned so far, with the scratch in use up to now.
  RuntimeMemory memory() const;

 private:
  BackendContext* context_;
  const ProcessMesh* mesh_;
  RuntimeOptions options_;
  std::unique_ptr<Stream> compute_;
  std::unique_ptr<Stream> communication_;
  std::unique_ptr<Stream> transfer_;  // of pipeline messages; null where computation's is used
  std::unique_ptr<Stream> exchange_;  // of tensor parallelism; null where computation's is used
  // Of copies from and to host memory; null where nothing is offloaded or computation's is used.
  std::unique_ptr<Stream> copies_in_;
  std::unique_ptr<Stream> copies_out_;
  std::unique_ptr<ScratchStack> compute_scratch_;
  std::unique_ptr<ScratchStack> communication_scratch_;
  Arena arena_;
  Arena host_arena_;
  Transformer model_;
  std::unique_ptr<ParamStore> params_;
  std::unique_ptr<ParamSync> sync_;
  std::unique_ptr<Overlap> overlap_;
  std::unique_ptr<StateOffload> states_;
  std::unique_ptr<InputOffload> inputs_;
  std::unique_ptr<MomentImage> moment_image_;
  std::unique_ptr<QuantState> quant_;
  std::vector<DeviceBatch> batches_;
  std::unique_ptr<PipelineRunner> runner_;
  Tensor totals_;
  Tensor sum_of_squares_;
  Tensor control_;
  Tensor nll_;
};

// The shape of a mesh's pipeline.
PipelineShape pipeline_shape(const MeshShape& mesh, const PipelineOptions& options);

// Memory of rank `rank` of a mesh: builds the runtime on the meta device, for a device with these
// capabilities, and passes it to `dry_run`, which makes every call that the real run will make.
RuntimeMemory measure_runtime(const Capabilities& target, const MeshShape& shape, int rank,
                              const ModelConfig& config, const RuntimeOptions& options,
                              const std::function<void(ModelRuntime&)>& dry_run);

// The geometry of micro-batches of rows x sequence_length tokens in documents of at most that
// length, shared over `context_size` ranks.
BatchGeometry batch_geometry(std::int64_t rows, std::int64_t sequence_length,
                             std::int64_t max_documents, DType compute, int tensor_size,
                             bool sequence_parallel, int context_size = 1);

}  // namespace tessera
