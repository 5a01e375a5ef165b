// The `model` section of a run: which model, and where its first weights come from.
#pragma once

#include <optional>
#include <string>

#include "engine/core/config.h"

namespace tessera {

struct ModelOptions {
  std::string path;
  std::string init = "pretrained";
  std::optional<std::string> from_checkpoint;
  std::string quantization = "auto";

  void visit(FieldVisitor& v) {
    v.field("path", path,
            "Hugging Face folder, the id of a model in the local Hugging Face cache, or, with "
            "`init: random`, a config.json file",
            {.aliases = {"model_name_or_path", "base_model", "model"}, .is_path = true});
    v.field("init", init,
            "pretrained: the weights under path; random: new ones from path's config.json and "
            "train.seed",
            {.choices = {"pretrained", "random"}});
    v.field("from_checkpoint", from_checkpoint,
            "Take the first weights from this Tessera checkpoint folder, with a new optimizer and "
            "step 0",
            {.is_path = true});
    v.field("quantization", quantization,
            "How frozen base weights are stored; auto: as path has them",
            {.choices = {"auto", "none", "fp8", "nf4"}});
  }
};

}  // namespace tessera
