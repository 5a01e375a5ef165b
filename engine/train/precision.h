// The `precision` section as the recipe that layers follow, and what it comes to for a model.
#pragma once

#include <string>
#include <vector>

#include "engine/device/context.h"
#include "engine/train/run_config.h"
#include "models/config.h"
#include "models/model_runtime.h"

namespace tessera {

QuantRecipe quant_recipe(const PrecisionOptions& options);

// kUser where the device cannot do what the section asks for.
void check_precision(const RunConfig& config, const Capabilities& target);

// Share of the multiply-adds of matrix products (attention apart) that a run takes in FP8.
double fp8_share(const ModelConfig& model, const RuntimeOptions& options, int tensor_size);
// What a run prints of its FP8 products, a line each; nothing where there are none.
std::vector<std::string> precision_report(const RunConfig& config, const ModelConfig& model,
                                          const RuntimeOptions& options, int tensor_size);

}  // namespace tessera
