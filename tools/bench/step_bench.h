// Measures training steps: the real Trainer on random tokens, without a run folder. Tokens per
// second over untraced steps, then where the time of traced ones went, beside what the same device
// does with the same shapes when it does nothing else.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/device/activity.h"
#include "engine/device/gpu_monitor.h"
#include "engine/plan/step_work.h"
#include "engine/train/run_config.h"
#include "parallel/launch.h"
#include "tools/bench/soak.h"

namespace tessera {

struct StepBenchOptions {
  int warmup_steps = 3;
  int steps = 10;
  int traced_steps = 3;
  double soak_seconds = 6;  // of each kind of rate; 0: rates are not measured
  bool both_modes = false;  // reproducible and not
};

// A work by name ("1b", "8b": PERFORMANCE's shapes) or a configuration file, on random tokens of
// its sequence length, without evaluation or checkpoints. kUser where there is neither.
RunConfig step_bench_config(const std::string& work, const std::vector<std::string>& overrides,
                            const StepBenchOptions& options, std::vector<std::string>* notes);

// What one mode of reproducibility measured; of the whole job, times and memory of rank 0.
struct StepModeResult {
  bool reproducible = true;
  double step_seconds = 0;  // median
  double fastest_seconds = 0, slowest_seconds = 0;
  double tokens_per_second = 0;
  int skipped_steps = 0;  // updates that were not applied: the numbers were not finite
  std::optional<GpuCondition> condition;
  std::uint64_t planned_bytes = 0;
  std::uint64_t used_bytes = 0;
  // Of the traced steps; traced_steps 0 where nothing could be traced, for trace_problem.
  int traced_steps = 0;
  std::string trace_problem;
  ActivityBreakdown breakdown;  // of all traced steps together
};

struct StepBenchResult {
  std::string work;
  std::string device;  // "cuda:0"
  std::string layout;  // "2 ranks: data 1 x tensor 2, zero 0, recompute none"
  std::string compute;
  std::int64_t parameters = 0;
  std::int64_t ranks = 1;
  std::int64_t tokens = 0;  // of a step, all ranks
  double model_flops = 0;   // of a step, all ranks: as the column mfu counts
  double peak_flops = 0;    // of one rank's device by the datasheet; 0: unknown
  StepWork per_rank;        // rank 0's
  std::vector<StepModeResult> modes;
  // Rates of rank 0's device, behind the steps; 0 where not measured.
  double copy_rate = 0;
  SoakedRate products, products_fp8;
  AttentionRates attention;
  double sgemm_rate = 0;  // of a CPU: square fp32 products

  // The step that the soaked rates allow: products, attention, memory-bound passes and optimizer at
  // 85% of the copy rate, one behind the other; 0 where rates were not measured.
  double bound_seconds() const;
};

// Runs as one rank of the job; rank 0's result is whole, the others' is empty.
StepBenchResult run_step_bench(const RunConfig& config, const std::string& work,
                               const StepBenchOptions& options, RankContext& rank,
                               BackendContext& context);

// As text and as one JSON object.
std::string format_step_bench(const StepBenchResult& result);
std::string step_bench_json(const StepBenchResult& result);

}  // namespace tessera
