// What a run keeps, computes again and moves to the host, chosen so that its memory plan fits. `train`,
// `train --dry-run` and `plan` share it.
#pragma once

#include <cstddef>
#include <string>

#include "engine/device/context.h"
#include "engine/train/run_config.h"
#include "models/model_runtime.h"

namespace tessera {

// Bytes that a rank may plan for; 0: unknown, everything fits.
struct MemoryLimits {
  std::size_t device = 0;
  std::size_t host = 0;  // page-locked, for what memory.offload moves
};

struct MemoryChoice {
  RuntimeMemory memory;
  std::string reason;  // one line with the numbers where something was chosen, else empty
};

// Whether anything is left to choose: ranks must then agree on the limits.
bool chooses_memory(const MemoryOptions& options);

// Fixes what `options` says of recompute and offload and returns the memory of `rank`. Of the values
// that memory.recompute and memory.offload leave open it takes the first that fits:
//   recompute none, selective, full; then, where offload is auto, the inputs of blocks in host memory
//   (under full), the moments, the masters.
// kAnswerNo, naming what is missing, where nothing fits.
MemoryChoice plan_memory(const RunConfig& config, const ModelConfig& model, const MeshShape& mesh,
                         int rank, const Capabilities& target, const MemoryLimits& limits,
                         RuntimeOptions& options);

// The same with the values that take least, whatever the limits.
MemoryChoice plan_least_memory(const RunConfig& config, const ModelConfig& model,
                               const MeshShape& mesh, int rank, const Capabilities& target,
                               RuntimeOptions& options);

// "none", "selective", "full", with "offload optimizer, masters" behind it where something is moved.
std::string describe_memory_choice(const RuntimeOptions& options);

}  // namespace tessera
