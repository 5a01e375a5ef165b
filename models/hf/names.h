// Tensor names of Hugging Face model files. Parameters of this engine carry the same names
// ("model.layers.3.self_attn.q_proj.weight"), so what is needed is the list that a configuration
// implies and the check of a folder against it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors_folder.h"
#include "checkpoint/safetensors_writer.h"
#include "models/config.h"

namespace tessera {

struct HfTensor {
  std::string name;
  std::vector<std::int64_t> shape;  // global; Linear weights are [out, in]
};

inline constexpr std::string_view kEmbeddingName = "model.embed_tokens.weight";
inline constexpr std::string_view kFinalNormName = "model.norm.weight";
inline constexpr std::string_view kLmHeadName = "lm_head.weight";

// "model.layers.<layer>." - the beginning of every name of that layer.
std::string layer_prefix(std::int64_t layer);

// Every parameter of the model, in the order of the forward pass. A tied model has no lm_head.
std::vector<HfTensor> hf_tensors(const ModelConfig& config);

// Numbers in all of hf_tensors().
std::int64_t parameter_count(const ModelConfig& config);

// The list for a SafetensorsFolderWriter, all of one type.
std::vector<SafetensorsSpec> export_specs(const ModelConfig& config, DType dtype);

struct HfNameMap {
  // Our name to the name in the file; one entry for every hf_tensors() name.
  std::map<std::string, std::string, std::less<>> file_name_of;
  // What was understood otherwise than written, a sentence each (older prefixes, a tied duplicate).
  std::vector<std::string> notes;
};

enum class TiedDuplicate {
  kCompare,  // a lm_head.weight in a tied model's file must equal the embedding, byte for byte
  kTrust,    // another rank compares
};

// Checks the folder against the configuration: every tensor there, none left over, shapes right,
// floating point. Names without the leading "model." (files of the bare decoder) are understood,
// rotary buffers of old files are passed over. Throws one kUser error that lists every mistake.
HfNameMap match_hf_tensors(const ModelConfig& config, const SafetensorsFolder& folder,
                           TiedDuplicate tied = TiedDuplicate::kCompare);

}  // namespace tessera
