// tessera train: runs a configuration.
#include <CLI/CLI.hpp>

#include "engine/core/log.h"
#include "engine/train/trainer.h"
#include "tools/commands/command.h"
#include "tools/commands/rank_launch.h"

namespace tessera {
namespace {

struct Options {
  std::string config;
  std::vector<std::string> overrides;
  std::string launch = "threads";
  TrainSettings settings;
};

int run(const Options& options) {
  std::vector<std::string> notes;
  const RunConfig config = load_run_config(options.config, options.overrides, &notes);
  if (runs_rank_zero()) {
    for (const std::string& note : notes) log::info("{}", note);
  }
  const bool on_gpu = runs_on_gpu(config);
  const RunRanksOptions launch = rank_launch(
      config, options.launch == "processes" ? LaunchMode::kProcesses : LaunchMode::kThreads);
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
