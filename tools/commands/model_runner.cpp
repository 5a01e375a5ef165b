#include "tools/commands/model_runner.h"

#include "engine/core/error.h"

namespace tessera {

LoadedModel open_model(const std::filesystem::path& folder) {
  CHECK_USER(std::filesystem::exists(folder), "[model] {} does not exist; expected a Hugging Face folder",
             folder.string());
  LoadedModel model{load_hf_config(folder), folder};
  validate(model.hf.model, folder.string());
  return model;
}

DType compute_dtype_of(const std::string& name, Device device) {
  if (name == "fp32") return DType::kF32;
  if (name == "bf16") return DType::kBF16;
  return device.kind == DeviceKind::kCuda ? DType::kBF16 : DType::kF32;
}

}  // namespace tessera
