#include "tools/commands/rank_launch.h"

#include <algorithm>

#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/core/text.h"
#include "parallel/nccl_communicator.h"
#include "parallel/one_gpu_communicator.h"
#include "tools/commands/command.h"

namespace tessera {
namespace {

// The groups of ranks with a GPU each, or, where ranks outnumber the GPUs (a rehearsal), of threads
// on one.
void use_gpus(RunRanksOptions& launch, int gpus, double timeout_seconds) {
  const bool shares_one = launched_world_size() == 0 && launch.world_size > gpus;
  if (shares_one) {
    CHECK_USER(gpus == 1,
               "[run] {} ranks on {} GPUs: give each rank a GPU (run.ranks), or all of them one "
               "(CUDA_VISIBLE_DEVICES)",
               launch.world_size, gpus);
    auto groups = std::make_shared<std::vector<std::unique_ptr<Communicator>>>(
        make_one_gpu_communicators(launch.world_size, 0, timeout_seconds));
    launch.mode = LaunchMode::kThreads;
    launch.make_world = [groups](const WorldSeed& seed) {
      return std::move((*groups)[static_cast<std::size_t>(seed.rank)]);
    };
    return;
  }
  launch.mode = LaunchMode::kProcesses;
  launch.make_world = [timeout_seconds](const WorldSeed& seed) {
    const std::string id = seed.control.broadcast(
        "nccl id", seed.rank == 0 && seed.world_size > 1 ? make_nccl_id() : "", 0, timeout_seconds);
    return make_nccl_communicator(id, seed.rank, seed.world_size,
                                  choose_device("cuda", seed.local_rank).index, timeout_seconds);
  };
}

}  // namespace

bool runs_on_gpu(const RunConfig& config) {
  return choose_device(config.run.device, 0).kind == DeviceKind::kCuda;
}

RunRanksOptions rank_launch(const RunConfig& config, LaunchMode cpu_mode) {
  const bool on_gpu = runs_on_gpu(config);
  const std::int64_t layout =
      config.parallel.tensor * config.parallel.pipeline * config.parallel.context;
  const int launched = launched_world_size();
  RunRanksOptions launch;
  launch.collective_timeout_seconds = parse_duration(config.faults.collective_timeout).value();
  launch.world_size = static_cast<int>(
      launched > 0 ? launched
                   : config.run.ranks.value_or(
                         on_gpu ? std::max<std::int64_t>(cuda_device_count(), layout) : layout));
  launch.mode = cpu_mode;
  if (on_gpu) use_gpus(launch, cuda_device_count(), launch.collective_timeout_seconds);
  data_parallel_size(config,
                     launch.world_size);  // refuses an impossible layout before anything starts
  launch.on_failure = [](const FailureReport& failure) {
    if (failure.rank > 0) {
      log::error("rank {}: {}", failure.rank, failure.text);
    } else {
      log::error("{}", failure.text);
    }
  };
  return launch;
}

}  // namespace tessera
