// Writing a model as a Hugging Face folder that other tools load.
#pragma once

#include <filesystem>
#include <optional>

#include "data/tokenizer/tokenizer.h"
#include "models/hf/config_io.h"
#include "models/model_runtime.h"

namespace tessera {

struct ExportSettings {
  std::filesystem::path folder;
  DType dtype = DType::kBF16;        // of the written weights; rounded once from the exact values
  const HfConfig* source = nullptr;  // where the model came from, or null
  const Tokenizer* tokenizer = nullptr;  // saved beside the model, or null
};

// Collective over the mesh: gathers each parameter in bounded pieces to the first rank, which
// writes model.safetensors (in shards), config.json, generation_config.json and the tokenizer's
// files. Nothing already in the folder is lost if it fails.
void export_model(ModelRuntime& runtime, const ExportSettings& settings);

}  // namespace tessera
