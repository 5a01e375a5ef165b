// Loading a model folder into a runtime, for commands that only run it forward.
#pragma once

#include <filesystem>
#include <string>

#include "models/hf/config_io.h"
#include "models/model_runtime.h"

namespace tessera {

struct LoadedModel {
  HfConfig hf;
  std::filesystem::path folder;
};

// config.json and the check of the weights' names; reads no weight.
LoadedModel open_model(const std::filesystem::path& folder);

// "auto": bf16 on a GPU, fp32 on the CPU.
DType compute_dtype_of(const std::string& name, Device device);

}  // namespace tessera
