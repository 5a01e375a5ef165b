// tessera init: a commented configuration to start from.
#include <cstdio>

#include <CLI/CLI.hpp>

#include "checkpoint/posix_file.h"
#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/train/run_config.h"
#include "tools/commands/command.h"

namespace tessera {
namespace {

struct Options {
  std::string output;
  std::string model;
  std::string data;
  bool force = false;
};

int run(const Options& options) {
  RunConfig config;
  config.model.path = options.model.empty() ? "path/to/model" : options.model;
  DataSource source;
  source.path = options.data.empty() ? "path/to/data.jsonl" : options.data;
  config.data.train.push_back(source);
  config.optimizer.learning_rate = 1e-5;
  config.train.epochs = 1;
  const std::string text = write_run_config(config, true);
  if (options.output.empty()) {
    std::fputs(text.c_str(), stdout);
    return 0;
  }
  CHECK_USER(options.force || !std::filesystem::exists(options.output),
             "[init] {} exists; choose another name with -o, or replace it with --force", options.output);
  replace_file(options.output, text, "init");
  log::info("{} is written; edit it, then: tessera train {}", options.output, options.output);
  return 0;
}

}  // namespace

void add_init_command(CLI::App& app, int& code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("init", "Write a commented configuration with every key and its default");
  command->add_option("-o,--output", options->output, "File to write; standard output by default");
  command->add_option("--model", options->model, "Value of model.path");
  command->add_option("--data", options->data, "Value of data.train[0].path");
  command->add_flag("--force", options->force, "Replace an existing file");
  command->callback([options, &code] { code = run(*options); });
}

}  // namespace tessera
