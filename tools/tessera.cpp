// The command line: parses the arguments and runs one command (tools/commands/).
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/core/text.h"
#include "tools/commands/command.h"

namespace {

// The command that the words before the mistake chose, the program itself if none did.
const CLI::App& chosen_command(const CLI::App& app, std::string& path) {
  const CLI::App* command = &app;
  path = app.get_name();
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
    path += " " + command->get_name();
  }
  return *command;
}

// What is wrong with the command line. A word that nothing takes says more than what is missing
// without it.
std::string explain(const CLI::App& app, const CLI::ParseError& error, std::string& path) {
  const CLI::App& command = chosen_command(app, path);
  std::vector<std::string> commands;
  for (const CLI::App* sub : command.get_subcommands({})) commands.push_back(sub->get_name());
  const std::vector<std::string> unknown = app.remaining(true);
  if (unknown.empty()) {
    if (commands.empty()) return error.what();
    return fmt::format("no command is given; use {}", tessera::join_choices(commands));
  }
  const std::string& word = unknown.front();
  const bool is_option = word.rfind('-', 0) == 0;
  std::vector<std::string> known = commands;
  if (is_option) {
    known.clear();
    for (const CLI::Option* option : command.get_options()) {
      for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
    }
  }
  const auto nearest = tessera::nearest_name(word, known);
  std::string text = fmt::format("{} is not {}", word, is_option ? "an option" : "a command");
  if (!is_option && known.empty()) text = fmt::format("{} is one argument too many", word);
  if (nearest) return text + fmt::format("; did you mean {}?", *nearest);
  return commands.empty() ? text : text + "; use " + tessera::join_choices(commands);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Tessera trains Llama-style decoders: one binary, one configuration file."};
  app.name("tessera");
  app.set_version_flag("--version", "tessera " TESSERA_VERSION);
  app.require_subcommand(1);
  app.footer("Exit codes: 0 done, 1 the answer is no, 2 a mistake in the configuration or input, 3 failed and\n"
             "would fail again, 4 a retry may help, 75 stopped on request after saving, 130 second Ctrl-C.\n"
             "`tessera COMMAND --help` explains each command.");
  int code = 0;
  tessera::add_train_command(app, code);
  tessera::add_plan_command(app, code);
  tessera::add_eval_command(app, code);
  tessera::add_generate_command(app, code);
  tessera::add_inspect_command(app, code);
  tessera::add_export_command(app, code);
  tessera::add_init_command(app, code);
  tessera::add_tokenize_command(app, code);
  tessera::add_verify_command(app, code);
  tessera::add_diff_command(app, code);
  tessera::add_doctor_command(app, code);
  tessera::add_bench_command(app, code);
  try {
    app.parse(argc, argv);
    return code;
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    std::string path;
    const std::string problem = explain(app, error, path);
    tessera::log::error("[{}] {} (see {} --help)", path, problem, path);
    return 2;
  } catch (const tessera::Error& error) {
    tessera::log::error("{}", error.what());
    return tessera::exit_code(error.kind());
  } catch (const std::bad_alloc&) {
    tessera::log::error("[memory] the machine has no more memory for this process");
    return 4;
  } catch (const std::exception& error) {
    tessera::log::error("[tessera] {}", error.what());
    return 3;
  }
}
