// tessera verify: reads every byte of a checkpoint or model folder and says what is damaged.
#include <cstdio>

#include <CLI/CLI.hpp>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/checkpoint_reader.h"
#include "engine/core/error.h"
#include "models/hf/config_io.h"
#include "models/hf/names.h"
#include "tools/commands/command.h"

namespace tessera {
namespace {

int verify(const std::filesystem::path& folder) {
  CHECK_USER(std::filesystem::is_directory(folder), "[verify] {} is no folder", folder.string());
  if (std::filesystem::exists(folder / "config.json")) {
    const HfConfig hf = load_hf_config(folder);
    // To other commands broken weights are input that is wrong; here they are the answer.
    try {
      const SafetensorsFolder weights(folder);
      match_hf_tensors(hf.model, weights);
      std::printf("%s: %zu tensors, %.1f MB, as config.json wants them\n", folder.c_str(),
                  weights.entries().size(), static_cast<double>(weights.total_bytes()) / 1e6);
      return 0;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kUser) throw;
      std::printf("%s: %s\n", folder.c_str(), error.what());
      return 1;
    }
  }
  std::vector<std::filesystem::path> checkpoints;
  int code = 0;
  if (folder.filename().string().starts_with("step-")) {
    checkpoints.push_back(folder);
  } else {
    const std::filesystem::path root =
        std::filesystem::is_directory(folder / "checkpoints") ? folder / "checkpoints" : folder;
    for (const CheckpointInfo& info : list_checkpoints(root)) {
      if (info.is_complete()) {
        checkpoints.push_back(info.path);
      } else {
        std::printf("%s: %s\n", info.path.c_str(), info.problem.c_str());
        code = 1;
      }
    }
    CHECK_USER(!checkpoints.empty() || code != 0,
               "[verify] {} holds neither a model (config.json) nor a checkpoint (step-*)",
               folder.string());
  }
  for (const std::filesystem::path& checkpoint : checkpoints) {
    const std::vector<CheckpointDamage> damages = verify_checkpoint(checkpoint);
    for (const CheckpointDamage& damage : damages) {
      std::printf("%s: %s\n", damage.file.c_str(), damage.text.c_str());
    }
    if (damages.empty()) {
      std::printf("%s: whole\n", checkpoint.c_str());
    } else {
      code = 1;
    }
  }
  return code;
}

}  // namespace

void add_verify_command(CLI::App& app, int& code) {
  auto folder = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand(
      "verify", "Read a checkpoint, run or model folder whole; exit 1 if damaged");
  command->add_option("folder", *folder, "Checkpoint step-*, run folder, or model folder")
      ->required();
  command->callback([folder, &code] { code = verify(*folder); });
}

}  // namespace tessera
