// Bytes that a rank sends in one step, by group of ranks: ring algorithms, counted from the layout;
// in a pipeline those of an average stage.
#pragma once

#include <cstdint>

#include "models/model_runtime.h"

namespace tessera {

struct Traffic {
  double tensor_bytes = 0;    // activations and their gradients over tp
  double data_bytes = 0;      // gradients and weights over dp x cp
  double context_bytes = 0;   // keys, values and their gradients over cp
  double pipeline_bytes = 0;  // activations and their gradients to the neighbouring stages
};

Traffic step_traffic(const ModelConfig& model, const MeshShape& mesh, const RuntimeOptions& options,
                     std::int64_t micro_batches);

}  // namespace tessera
