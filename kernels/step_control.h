// StepControl: the scalars of one optimizer step, in device memory. Kernels read them there, so a step
// needs no host synchronisation, can be captured in a graph, and a non-finite step changes nothing.
#pragma once

#include <cstdint>

#include "engine/core/philox.h"

namespace tessera {

struct StepControl {
  // Written by the host before the step.
  std::int64_t step = 0;        // number of the update being made, from 1
  std::int64_t adam_step = 0;   // updates made so far, skipped steps not counted; kernels add 1
  float learning_rate = 0;
  float max_grad_norm = 0;      // 0: no clipping
  PhiloxKey rounding_key;       // stochastic rounding
  // Written by step_control_finish.
  double sum_of_squares = 0;    // of the unnormalised gradient, over all ranks
  double denominator = 0;       // target tokens (or pairs, or weights) of the step, over all ranks
  float grad_norm = 0;          // of the normalised gradient, before clipping
  float grad_scale = 0;         // clip factor / denominator: multiplies each stored gradient
  std::int32_t is_finite = 0;   // 0: the update is skipped everywhere
  std::int32_t has_targets = 0; // 0: no target token in the step; the update is skipped
};

}  // namespace tessera
