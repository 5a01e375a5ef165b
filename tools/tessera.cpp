// The command line: parses the arguments and runs one command (tools/commands/).
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include <CLI/CLI.hpp>

#include "engine/core/error.h"
#include "engine/core/log.h"
#include "tools/commands/command.h"

int main(int argc, char** argv) {
  CLI::App app{"Tessera trains Llama-style decoders: one binary, one configuration file."};
  app.name("tessera");
  app.set_version_flag("--version", TESSERA_VERSION);
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
  tessera::add_doctor_command(app, code);
  try {
    app.parse(argc, argv);
    return code;
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    app.exit(error);
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
