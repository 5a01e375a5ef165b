// tessera train: runs a configuration.
#include <csignal>

#include <CLI/CLI.hpp>

#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/train/trainer.h"
#include "tools/commands/command.h"

namespace tessera {
namespace {

struct Options {
  std::string config;
  std::vector<std::string> overrides;
  TrainSettings settings;
};

volatile std::sig_atomic_t stop_signals = 0;

void on_stop_signal(int signal) {
  stop_signals = stop_signals + 1;
  // The first request saves at the next step edge; a second Ctrl-C ends at once.
  if (signal == SIGINT && stop_signals > 1) _exit(130);
}

int run(const Options& options) {
  std::vector<std::string> notes;
  const RunConfig config = load_run_config(options.config, options.overrides, &notes);
  for (const std::string& note : notes) log::info("{}", note);
  struct sigaction action = {};
  action.sa_handler = on_stop_signal;
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) sigaction(signal, &action, nullptr);
  TrainSettings settings = options.settings;
  settings.stop_requested = [] { return stop_signals > 0; };

  const Device device = choose_device(config.run.device, 0);
  const bool on_gpu = device.kind == DeviceKind::kCuda;
  const std::int64_t layout = config.parallel.tensor * config.parallel.pipeline * config.parallel.context;
  const std::int64_t ranks = config.run.ranks.value_or(on_gpu ? cuda_device_count() : layout);
  int code = 0;
  run_local_ranks(static_cast<int>(ranks), config.run.device,
                  [&](int rank, std::unique_ptr<Communicator> world, BackendContext& context) {
                    RunConfig resolved = config;
                    resolve(resolved, ranks, on_gpu);
                    Trainer trainer(std::move(resolved), settings, std::move(world), context);
                    const int result = trainer.run();
                    if (rank == 0) code = result;
                  });
  return code;
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
  command->add_flag("--dry-run", options->settings.dry_run, "Check everything and print the plan, then stop");
  command->callback([options, &code] { code = run(*options); });
}

}  // namespace tessera
