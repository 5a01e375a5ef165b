#include "engine/train/precision.h"

#include "engine/core/error.h"

namespace tessera {
namespace {

// The first GPUs with FP8 tensor cores, and those whose library multiplies with scales of 128
// elements.
constexpr int kFirstFp8Arch = 89;
constexpr int kBlockwiseArch = 90;

Transformer layers_of(const ModelConfig& model, const RuntimeOptions& options, int tensor_size) {
  return Transformer(model, tensor_size, options.sequence_parallel, options.recipe);
}

}  // namespace

QuantRecipe quant_recipe(const PrecisionOptions& options) {
  QuantRecipe recipe;
  if (options.fp8 == "none") return recipe;
  recipe.scaling = options.fp8 == "blockwise" ? QuantScaling::kBlockwise : QuantScaling::kCurrent;
  recipe.gradient = options.fp8_gradients == "e4m3" ? DType::kF8E4M3 : DType::kF8E5M2;
  recipe.keep_bf16 = options.keep_bf16;
  return recipe;
}

void check_precision(const RunConfig& config, const Capabilities& target) {
  if (config.precision.fp8 == "none" || target.target != DeviceKind::kCuda) return;
  CHECK_USER(
      target.sm_arch >= kFirstFp8Arch,
      "[config] {} is {}; FP8 products need a GPU of compute capability 8.9 or newer, this one has "
      "{}.{}; write precision.fp8: none",
      config.locate("precision.fp8"), config.precision.fp8, target.sm_arch / 10,
      target.sm_arch % 10);
  CHECK_USER(config.precision.fp8 != "blockwise" || target.sm_arch == kBlockwiseArch,
             "[config] {} is blockwise; products with scales of 128 elements need a GPU of compute "
             "capability 9.0, this one has {}.{}; write precision.fp8: current",
             config.locate("precision.fp8"), target.sm_arch / 10, target.sm_arch % 10);
}

double fp8_share(const ModelConfig& model, const RuntimeOptions& options, int tensor_size) {
  return layers_of(model, options, tensor_size).quant_registry().share();
}

std::vector<std::string> precision_report(const RunConfig& config, const ModelConfig& model,
                                          const RuntimeOptions& options, int tensor_size) {
  if (!options.recipe.is_quantized()) return {};
  const Transformer layers = layers_of(model, options, tensor_size);
  const QuantRegistry& registry = layers.quant_registry();
  std::string kept;
  for (const std::string& name : options.recipe.keep_bf16)
    kept += (kept.empty() ? "" : ", ") + name;
  std::vector<std::string> lines{fmt::format(
      "{} scaling: {} forward, {} gradients; {:.1f}% of the GEMM FLOPs in FP8; {} in {}",
      config.precision.fp8, name_of(options.recipe.forward), name_of(options.recipe.gradient),
      100 * registry.share(), kept, config.precision.compute)};
  if (!registry.note().empty()) lines.push_back(registry.note());
  return lines;
}

}  // namespace tessera
