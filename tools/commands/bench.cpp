// tessera bench: what the machine does with a model's step and its parts.
#include <cstdio>

#include <CLI/CLI.hpp>

#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/core/text.h"
#include "tools/bench/collective_bench.h"
#include "tools/bench/op_bench.h"
#include "tools/bench/step_bench.h"
#include "tools/commands/command.h"
#include "tools/commands/rank_launch.h"

namespace tessera {
namespace {

struct StepOptions {
  std::string work;
  std::vector<std::string> overrides;
  std::string launch = "threads";
  StepBenchOptions bench;
  bool json = false;
};

int run_step(const StepOptions& options) {
  std::vector<std::string> notes;
  const RunConfig config =
      step_bench_config(options.work, options.overrides, options.bench, &notes);
  if (runs_rank_zero()) {
    for (const std::string& note : notes) log::info("{}", note);
  }
  RunRanksOptions launch = rank_launch(
      config, options.launch == "processes" ? LaunchMode::kProcesses : LaunchMode::kThreads);
  launch.handles_signals = false;  // there is nothing to save
  return run_ranks(launch, [&](RankContext& rank) {
    const auto context = make_rank_context(choose_device(config.run.device, rank.local_rank),
                                           rank.world_size, config.run.tune_gemm);
    const StepBenchResult result =
        run_step_bench(config, options.work, options.bench, rank, *context);
    if (rank.rank == 0) {
      const std::string text =
          options.json ? step_bench_json(result) + "\n" : format_step_bench(result);
      std::fputs(text.c_str(), stdout);
      std::fflush(stdout);
    }
    return 0;
  });
}

void add_step(CLI::App& bench, int& code) {
  auto options = std::make_shared<StepOptions>();
  CLI::App* command = bench.add_subcommand(
      "step", "Training steps on random tokens: tokens/s, where the time goes, and the bound");
  command->add_option("work", options->work, "1b, 8b, or a run configuration")->required();
  command->add_option("--set", options->overrides,
                      "section.key=value, over the work; may be repeated");
  command->add_option("--steps", options->bench.steps, "Steps that are timed")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  command->add_option("--warmup", options->bench.warmup_steps, "Steps before them")
      ->capture_default_str()
      ->check(CLI::Range(0, 100000));
  command
      ->add_option("--trace-steps", options->bench.traced_steps,
                   "Steps behind them for the breakdown")
      ->capture_default_str()
      ->check(CLI::Range(0, 1000));
  command
      ->add_option("--soak-seconds", options->bench.soak_seconds,
                   "Length of each measurement of a rate behind the steps; 0: none")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 600.0));
  command->add_flag("--both-modes", options->bench.both_modes,
                    "Measure run.reproducible true and false");
  command->add_option("--launch", options->launch, "CPU ranks as threads or processes")
      ->capture_default_str()
      ->check(CLI::IsMember({"threads", "processes"}));
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([options, &code] { code = run_step(*options); });
}

struct CollectivesOptions {
  int ranks = 0;
  std::string device = "auto";
  std::string launch = "threads";
  std::string smallest = "64KiB";
  std::string largest = "256MiB";
  bool json = false;
};

std::int64_t message_bytes(const char* option, const std::string& text) {
  const auto bytes = parse_bytes(text);
  CHECK_USER(bytes && *bytes >= 1, "[bench] {} is {}, expected a size such as 1MiB", option, text);
  return *bytes;
}

int run_collectives(const CollectivesOptions& options) {
  CollectiveBenchOptions bench;
  bench.smallest = message_bytes("--from", options.smallest);
  bench.largest = message_bytes("--to", options.largest);
  CHECK_USER(bench.smallest <= bench.largest, "[bench] --from {} is more than --to {}", options.smallest,
             options.largest);
  RunConfig config;
  config.run.device = options.device;
  if (options.ranks > 0) config.run.ranks = options.ranks;
  // On the CPU two ranks are the least that exchange anything.
  if (options.ranks == 0 && !runs_on_gpu(config)) config.run.ranks = 2;
  RunRanksOptions launch =
      rank_launch(config, options.launch == "processes" ? LaunchMode::kProcesses : LaunchMode::kThreads);
  launch.handles_signals = false;
  CHECK_USER(launch.world_size > 1, "[bench] one rank exchanges nothing; give --ranks 2 or more, or start the "
             "command under mpirun or srun");
  return run_ranks(launch, [&](RankContext& rank) {
    const auto context =
        make_rank_context(choose_device(config.run.device, rank.local_rank), rank.world_size, false);
    const auto results = run_collective_bench(bench, *rank.world, *context);
    if (rank.rank == 0) {
      const std::string device = to_string(context->device());
      const std::string text = options.json ? collectives_json(results, rank.world_size, device) + "\n"
                                            : format_collectives(results, rank.world_size, device);
      std::fputs(text.c_str(), stdout);
      std::fflush(stdout);
    }
    return 0;
  });
}

void add_collectives(CLI::App& bench, int& code) {
  auto options = std::make_shared<CollectivesOptions>();
  CLI::App* command = bench.add_subcommand("collectives", "Every collective over message sizes: time and bus rate");
  command->add_option("--ranks", options->ranks, "Ranks; by default every GPU, or two CPU ranks")
      ->check(CLI::Range(1, 100000));
  command->add_option("--device", options->device, "auto, cpu or cuda")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  command->add_option("--launch", options->launch, "CPU ranks as threads or processes")
      ->capture_default_str()
      ->check(CLI::IsMember({"threads", "processes"}));
  command->add_option("--from", options->smallest, "Smallest message")->capture_default_str();
  command->add_option("--to", options->largest, "Largest message")->capture_default_str();
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([options, &code] { code = run_collectives(*options); });
}

struct OpsOptions {
  std::string model = "8b";
  std::string filter;
  bool tunes = false;
};

// `prefix`: only ops whose names start so; all with an empty one.
void add_ops(CLI::App& bench, const char* name, const char* help, const std::string& prefix, int& code) {
  auto options = std::make_shared<OpsOptions>();
  CLI::App* command = bench.add_subcommand(name, help);
  command->add_option("model", options->model, "1b or 8b")->capture_default_str();
  if (prefix.empty()) command->add_option("filter", options->filter, "Only ops whose name holds this");
  command->add_flag("--tune", options->tunes, "Time the algorithms of each product first");
  command->callback([options, prefix, &code] {
    bench_ops(options->model, prefix.empty() ? options->filter : prefix, options->tunes);
    code = 0;
  });
}

}  // namespace

void add_bench_command(CLI::App& app, int& code) {
  CLI::App* command = app.add_subcommand("bench", "Measure steps and their parts on this machine");
  command->require_subcommand(1);
  add_step(*command, code);
  add_ops(*command, "ops", "Every op on GPU 0 at a model's shapes: time, rate, share of the ceiling", "", code);
  add_ops(*command, "gemm", "The matrix products among them", "gemm", code);
  add_ops(*command, "attention", "Attention among them", "attention", code);
  add_collectives(*command, code);
}

}  // namespace tessera
