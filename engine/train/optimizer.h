// Optimizer: one AdamW update of this rank's shards, with the gradient norm and clipping in front of it,
// all on the device. It knows shards and segments, never layers.
#pragma once

#include "models/model_runtime.h"

namespace tessera {

struct AdamWSettings {
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float eps = 1e-8f;
};

// Enqueues the update for gradients that ParamSync has finished. Reads the runtime's StepControl (host
// part already uploaded) and totals()[1], the step's denominator summed over all ranks; fills the
// control's results; publishes the new weights.
void optimizer_step(ModelRuntime& runtime, const AdamWSettings& settings);

}  // namespace tessera
