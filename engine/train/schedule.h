// The learning rate of a step as a closed formula: no state, so a resume or a longer run needs none.
#pragma once

#include <cstdint>
#include <string>

#include "engine/train/optimizer_options.h"

namespace tessera {

enum class ScheduleKind : unsigned char { kCosine, kLinear, kConstant, kWsd };

// With step s from 1 to T, warm-up W, peak p, minimum m, and the step of the peak P = max(W, 1):
//   s <= W     p * s / W: step 1 is above 0, step W is exactly p
//   cosine     m + (p - m) * (1 + cos(pi * f)) / 2   with f = (s - P) / D, D = decay or T - P
//   linear     p + (m - p) * f                       with the same f
//   constant   p
//   wsd        p until step T - D, then p + (m - p) * (s - (T - D)) / D
// Where f reaches 1 the rate is exactly m and stays there; step T has it unless the decay is set to
// be longer. A run with no step behind the peak (T == P) ends at the peak.
struct LearningRateSchedule {
  ScheduleKind kind = ScheduleKind::kConstant;
  double peak = 0;
  double minimum = 0;
  std::int64_t warmup_steps = 0;
  std::int64_t decay_steps = 0;
  std::int64_t total_steps = 0;

  // `step` counts updates from 1; past total_steps the last rate holds.
  double rate(std::int64_t step) const;
};

// The schedule of a run of `total_steps` updates. Throws kUser when warm-up and decay do not fit.
LearningRateSchedule make_schedule(const OptimizerOptions& optimizer, const ScheduleOptions& schedule,
                                   std::int64_t total_steps);

}  // namespace tessera
