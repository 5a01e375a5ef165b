// tessera train: runs a configuration.
#include <algorithm>

#include <CLI/CLI.hpp>

#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/core/text.h"
#include "engine/train/trainer.h"
#include "parallel/launch.h"
#include "parallel/nccl_communicator.h"
#include "parallel/one_gpu_communicator.h"
#include "tools/commands/command.h"

namespace tessera {
namespace {

struct Options {
  std::string config;
  std::vector<std::string> overrides;
  std::string launch = "threads";
  TrainSettings settings;
};

// The groups of ranks with a GPU each, or, where ranks outnumber the GPUs (a rehearsal), of threads on one.
void use_gpus(RunRanksOptions& launch, int gpus, double timeout_seconds) {
  const bool shares_one = launched_world_size() == 0 && launch.world_size > gpus;
  if (shares_one) {
    CHECK_USER(gpus == 1, "[run] {} ranks on {} GPUs: give each rank a GPU (run.ranks), or all of them one "
               "(CUDA_VISIBLE_DEVICES)", launch.world_size, gpus);
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
    const std::string id = seed.control.broadcast("nccl id", seed.rank == 0 && seed.world_size > 1 ? make_nccl_id() : "",
                                                  0, timeout_seconds);
    return make_nccl_communicator(id, seed.rank, seed.world_size, choose_device("cuda", seed.local_rank).index,
                                  timeout_seconds);
  };
}

int run(const Options& options) {
  std::vector<std::string> notes;
  const RunConfig config = load_run_config(options.config, options.overrides, &notes);
  if (runs_rank_zero()) {
    for (const std::string& note : notes) log::info("{}", note);
  }
  const bool on_gpu = choose_device(config.run.device, 0).kind == DeviceKind::kCuda;
  const std::int64_t layout = config.parallel.tensor * config.parallel.pipeline * config.parallel.context;
  const int launched = launched_world_size();
  RunRanksOptions launch;
  launch.collective_timeout_seconds = parse_duration(config.faults.collective_timeout).value();
  launch.world_size = static_cast<int>(
      launched > 0 ? launched : config.run.ranks.value_or(on_gpu ? std::max<std::int64_t>(cuda_device_count(), layout) : layout));
  launch.mode = options.launch == "processes" ? LaunchMode::kProcesses : LaunchMode::kThreads;
  if (on_gpu) use_gpus(launch, cuda_device_count(), launch.collective_timeout_seconds);
  data_parallel_size(config, launch.world_size);  // refuses an impossible layout before anything starts
  launch.on_failure = [](const FailureReport& failure) {
    if (failure.rank > 0) {
      log::error("rank {}: {}", failure.rank, failure.text);
    } else {
      log::error("{}", failure.text);
    }
  };
  return run_ranks(launch, [&](RankContext& rank) {
    const auto context = make_rank_context(choose_device(config.run.device, rank.local_rank),
                                           rank.world_size, config.run.tune_gemm);
    check_ranks_agree(config, rank.control, launch.collective_timeout_seconds);
    RunConfig resolved = config;
    resolve(resolved, rank.world_size, on_gpu);
    Trainer trainer(std::move(resolved), options.settings, std::move(rank.world), *context, rank.control);
    return trainer.run();
  });
}

}  // namespace

void add_train_command(CLI::App& app, int& code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("train", "Train as a configuration says");
  command->add_option("config", options->config, "Run configuration, YAML or JSON")->required();
  command->add_option("--set", options->overrides, "section.key=value, over the file; may be repeated");
  command->add_option("--resume", options->settings.resume,
                      "auto: go on with what run.dir holds; never: refuse to; or a checkpoint folder")->capture_default_str();
  command->add_option("--allow-change", options->settings.allowed_changes,
                      "A key that may differ from the resumed run's configuration; may be repeated");
  command->add_flag("--overwrite", options->settings.overwrite, "Start anew: what run.dir holds is removed");
  command->add_option("--launch", options->launch,
                      "CPU ranks as threads of this process or as processes of their own; under mpirun or srun "
                      "the launcher decides, and GPUs have a process each")->capture_default_str()->check(CLI::IsMember({"threads", "processes"}));
  command->add_flag("--dry-run", options->settings.dry_run, "Check everything and print the plan, then stop");
  command->callback([options, &code] { code = run(*options); });
}

}  // namespace tessera
