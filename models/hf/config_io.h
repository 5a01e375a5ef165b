// Hugging Face config.json to ModelConfig and back.
//
// Nothing in a file is dropped in silence. Each key is used, or is known to change nothing in
// training, or is refused by name because it would change the result (another architecture, an
// unknown rope type, dropout, quantised weights), or, when nobody knows it, becomes a warning.
// Missing keys take the default of transformers' configuration class of that model_type.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "models/config.h"

namespace tessera {

// What a model folder said about its model.
struct HfConfig {
  ModelConfig model;
  // Keys that were read past or understood otherwise than written, a sentence each.
  std::vector<std::string> warnings;
  // Tokens that end a generated text: generation_config.json where it says so, else the model's.
  std::vector<std::int64_t> stop_token_ids;
  // The files as they were, carried along to exports; empty when there was none.
  std::string config_text;
  std::string generation_text;
};

// Reads config.json, and generation_config.json beside it. `path` is a folder or the file itself.
// All mistakes of the file come in one kUser error.
HfConfig load_hf_config(const std::filesystem::path& path);

// The same from text; `where` names it in messages. `generation_text` may be empty.
HfConfig parse_hf_config(std::string_view config_text, std::string_view generation_text,
                         const std::string& where);

// config.json for `model`. With `original_text` (the file that the model was loaded from) its keys,
// their order and spelling stay and only what differs is set; without it a complete file in the
// spelling that transformers 4 and 5 both read. kUser if the model cannot be expressed in its
// model_type (say, different windows in different layers); the text is read back to make sure.
std::string format_hf_config(const ModelConfig& model, std::string_view original_text = {});

// Writes config.json and generation_config.json into `folder`, each replaced in one step. `source`
// is what load_hf_config gave for the model's origin, or null for a model trained from scratch.
void write_hf_config(const std::filesystem::path& folder, const ModelConfig& model,
                     const HfConfig* source = nullptr);

}  // namespace tessera
