// How the ranks of a configuration are started: shared by the commands that run a step.
#pragma once

#include "engine/train/run_config.h"
#include "parallel/launch.h"

namespace tessera {

// Ranks with a GPU each as processes over NCCL; more ranks than the one GPU there is (a rehearsal)
// as threads that share it; CPU ranks as `cpu_mode` says. A launcher that has started ranks counts.
// kUser where the layout does not fit the ranks. Errors of the job go to the log.
RunRanksOptions rank_launch(const RunConfig& config, LaunchMode cpu_mode);

// Whether `config` runs on GPUs here.
bool runs_on_gpu(const RunConfig& config);

}  // namespace tessera
