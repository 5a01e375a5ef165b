// StepControl: the scalars of one optimizer step, in device memory. Kernels read them there, so a step
// needs no host synchronisation, can be captured in a graph, and a non-finite step changes nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/core/philox.h"

namespace tessera {

struct StepControl {
  // Written by the host before each step (the first kHostBytes of the struct).
  std::int64_t step = 0;        // number of the update being made, from 1
  float learning_rate = 0;
  float max_grad_norm = 0;      // 0: no clipping
  PhiloxKey rounding_key;       // stochastic rounding
  // Kept on the device: updates applied so far. step_control_finish adds 1 when this step is applied,
  // so adamw sees the number t of its bias correction; a skipped step is not counted.
  std::int64_t adam_step = 0;
  // Written by step_control_finish.
  double sum_of_squares = 0;    // of the unnormalised gradient, over all ranks
  double denominator = 0;       // target tokens (or pairs, or weights) of the step, over all ranks
  float grad_norm = 0;          // of the normalised gradient, before clipping
  float grad_scale = 0;         // clip factor / denominator: multiplies each stored gradient
  std::int32_t is_finite = 0;   // 0: the update is skipped everywhere
  std::int32_t has_targets = 0; // 0: no target token in the step; the update is skipped

  static constexpr std::size_t kHostBytes = 32;
};
static_assert(offsetof(StepControl, adam_step) == StepControl::kHostBytes);

}  // namespace tessera
