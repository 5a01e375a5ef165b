#include "engine/train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "engine/core/error.h"

namespace tessera {

double LearningRateSchedule::rate(std::int64_t step) const {
  CHECK(step >= 1, "[schedule] step {}; the first is 1", step);
  step = std::min(step, total_steps);
  if (step < warmup_steps) {
    return peak * static_cast<double>(step) / static_cast<double>(warmup_steps);
  }
  if (kind == ScheduleKind::kConstant) return peak;

  const std::int64_t decay_begin =
      kind == ScheduleKind::kWsd ? total_steps - decay_steps : std::max<std::int64_t>(warmup_steps, 1);
  // The ends are returned as they are: the formulas would miss them by a rounding error.
  if (step <= decay_begin) return peak;
  if (step >= decay_begin + decay_steps) return minimum;
  const double fraction =
      static_cast<double>(step - decay_begin) / static_cast<double>(decay_steps);
  if (kind == ScheduleKind::kCosine) {
    return minimum + (peak - minimum) * 0.5 * (1.0 + std::cos(std::numbers::pi * fraction));
  }
  return peak + (minimum - peak) * fraction;
}

LearningRateSchedule make_schedule(const OptimizerOptions& optimizer, const ScheduleOptions& options,
                                   std::int64_t total_steps) {
  CHECK(total_steps >= 1, "[schedule] {} steps", total_steps);
  CHECK(optimizer.learning_rate.has_value(), "[schedule] the learning rate was not validated");
  LearningRateSchedule schedule;
  schedule.kind = options.name == "cosine"   ? ScheduleKind::kCosine
                  : options.name == "linear" ? ScheduleKind::kLinear
                  : options.name == "wsd"    ? ScheduleKind::kWsd
                                             : ScheduleKind::kConstant;
  schedule.peak = *optimizer.learning_rate;
  schedule.minimum = schedule.peak * options.min_lr_ratio;
  schedule.total_steps = total_steps;

  schedule.warmup_steps = options.warmup_steps.value_or(0);
  if (options.warmup_ratio) {
    // 0.07 of 100 steps is 7 steps, although the product is 7.000000000000001.
    const double steps = *options.warmup_ratio * static_cast<double>(total_steps);
    schedule.warmup_steps = static_cast<std::int64_t>(std::ceil(steps * (1 - 1e-12)));
  }
  CHECK_USER(schedule.warmup_steps <= total_steps,
             "[schedule] schedule.warmup_steps is {}, but the run has {} steps; make the warm-up shorter "
             "or the run longer", schedule.warmup_steps, total_steps);

  const std::int64_t first_after_peak = std::max<std::int64_t>(schedule.warmup_steps, 1);
  const std::int64_t room = total_steps - first_after_peak;
  if (schedule.kind == ScheduleKind::kWsd) {
    const std::int64_t tenth = (total_steps + 9) / 10;
    schedule.decay_steps = options.decay_steps.value_or(std::min(tenth, room));
    CHECK_USER(schedule.decay_steps <= room || !options.decay_steps,
               "[schedule] schedule.decay_steps is {}, but only {} of the run's {} steps are behind its "
               "warm-up of {}; make the decay or the warm-up shorter, or the run longer",
               schedule.decay_steps, room, total_steps, schedule.warmup_steps);
  } else {
    schedule.decay_steps = options.decay_steps.value_or(room);
  }
  return schedule;
}

}  // namespace tessera
