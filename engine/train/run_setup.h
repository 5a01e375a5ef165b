// RunSetup: everything that a run decides before it allocates memory — the model, the layout, the data,
// the length and the memory plan. `train`, `train --dry-run` and `plan` share it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/loader.h"
#include "data/prepare.h"
#include "engine/device/context.h"
#include "engine/train/optimizer.h"
#include "engine/train/run_config.h"
#include "engine/train/schedule.h"
#include "models/hf/config_io.h"
#include "models/model_runtime.h"
#include "parallel/mesh.h"

namespace tessera {

// The model of a run: config.json under model.path, checked.
HfConfig load_run_model(const RunConfig& config);

// The tokenizer that data.tokenizer names, else the model's own, else none (pre-tokenised data only).
struct RunTokenizer {
  std::optional<TextEncoder> encoder;
  std::string source;  // folder or file it was read from, "bytes", or empty
};
RunTokenizer load_run_tokenizer(const RunConfig& config);

// The mesh that the configuration asks of `ranks` ranks; kUser where it does not fit the model.
MeshShape mesh_shape(const RunConfig& config, std::int64_t ranks);

// What the runtime needs to know, apart from how much is recomputed. `config` is resolved.
RuntimeOptions runtime_options(const RunConfig& config, const MeshShape& mesh, std::int64_t max_documents);

// Every call of a step on the meta device, so that memory() covers the whole run.
void dry_run_step(ModelRuntime& runtime, const AdamWSettings& adamw);

// Fixes options.recompute (memory.recompute: auto takes the first of none, selective, full that fits
// `available` bytes) and returns the memory of `rank`. kAnswerNo, naming what is missing, where nothing
// fits. available 0: unknown, everything fits.
RuntimeMemory plan_memory(const RunConfig& config, const ModelConfig& model, const MeshShape& mesh,
                          int rank, const Capabilities& target, std::size_t available,
                          RuntimeOptions& options);

AdamWSettings adamw_settings(const OptimizerOptions& options);

// Floating-point operations of forward and backward per token: 6 per parameter in a matrix product
// (head included, embedding lookup not) and causal attention over half of the square.
double flops_per_token(const ModelConfig& model, std::int64_t sequence_length);

}  // namespace tessera
