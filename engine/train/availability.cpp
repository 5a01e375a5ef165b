#include "engine/train/availability.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera {

const std::map<std::string, std::string>& unavailable_keys() {
  static const std::map<std::string, std::string> kKeys = {
      {"adapter", "is not available in this version: it trains all weights, without LoRA adapters"},
      {"dpo", "is not available in this version: train.stage dpo is not"},
      {"data.train_on", "is not available in this version: conversations are not"},
      {"data.chat_template", "is not available in this version: conversations are not"},
      {"data.template_args", "is not available in this version: conversations are not"},
      {"checkpoint.local_dir", "is not available in this version: checkpoints are written to "
                               "checkpoint.dir directly"},
      // Scalars of other tools that are part of a list here.
      {"optimizer.adam_beta1", "is written as the first of optimizer.betas: [0.9, 0.95]"},
      {"optimizer.adam_beta2", "is written as the second of optimizer.betas: [0.9, 0.95]"},
      {"optimizer.beta1", "is written as the first of optimizer.betas: [0.9, 0.95]"},
      {"optimizer.beta2", "is written as the second of optimizer.betas: [0.9, 0.95]"},
      {"optimizer.min_lr", "is written as a part of the peak, schedule.min_lr_ratio"},
      {"schedule.min_lr", "is written as a part of the peak, schedule.min_lr_ratio"},
      {"precision.bf16", "is written precision.compute: bf16"},
      {"precision.fp16", "is not available: precision.compute is bf16 or fp32"},
  };
  return kKeys;
}

std::vector<UnavailableValue> unavailable_values(const RunConfig& config) {
  std::vector<UnavailableValue> found;
  auto refuse = [&found](bool condition, const char* key, std::string message) {
    if (condition) found.push_back({key, std::move(message)});
  };
  const std::string& stage = config.train.stage;
  refuse(stage != "pretrain", "train.stage",
         fmt::format("is {}, which is not available in this version; write pretrain", stage));
  const std::string& quantization = config.model.quantization;
  refuse(quantization != "auto" && quantization != "none", "model.quantization",
         fmt::format("is {}, which is not available in this version; write auto or none", quantization));
  const PrecisionOptions& precision = config.precision;
  refuse(precision.fp8 == "delayed" || precision.fp8 == "rowwise", "precision.fp8",
         fmt::format("is {}, which is not available in this version; write current, blockwise or none",
                     precision.fp8));
  const auto& kept = precision.keep_bf16;
  refuse(precision.fp8 != "none" && std::find(kept.begin(), kept.end(), "lm_head") == kept.end(),
         "precision.keep_bf16",
         "leaves lm_head out; FP8 logits are not available in this version: list lm_head");
  refuse(config.faults.nan == "rollback", "faults.nan",
         "is rollback, which is not available in this version; write stop or skip");
  refuse(config.faults.spike != "off", "faults.spike",
         fmt::format("is {}, which is not available in this version; write off", config.faults.spike));
  return found;
}

bool is_unavailable(const std::string& key, const std::string& value) {
  ConfigNode root;
  apply_override(root, fmt::format("{}={}", key, value));
  RunConfig config;
  collect_config(root, [&config](FieldVisitor& v) { config.visit(v); });
  return !unavailable_values(config).empty();
}

}  // namespace tessera
