#include "models/quant_registry.h"

#include <algorithm>

#include "engine/core/error.h"
#include "kernels/quantize.h"
#include "parallel/shard_layout.h"

namespace tessera {
namespace {

// "model.layers.0.mlp.up_proj.weight" without its last word.
std::string layer_of(const std::string& parameter) {
  return parameter.substr(0, parameter.rfind('.'));
}

}  // namespace

int QuantRegistry::add(const ParamRegistry& params, ParamId first, int count) {
  const BucketSpec& bucket = params.buckets().at(static_cast<std::size_t>(first.bucket));
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  bool is_kept = false;
  for (int i = 0; i < count; ++i) {
    const ParamSpec& spec = bucket.params.at(static_cast<std::size_t>(first.index + i));
    const LocalExtent extent = local_extent(spec, tensor_size_, 0);
    rows += extent.storage_rows;
    cols = extent.storage_cols;
    names_.push_back(layer_of(spec.name));
    for (const std::string& entry : recipe_.keep_bf16) is_kept |= names_layer(entry, names_.back());
  }
  const double work = static_cast<double>(rows) * static_cast<double>(cols);
  total_ += work;
  if (!recipe_.is_quantized() || is_kept) return -1;
  if (rows % kFp8Quantum != 0 || cols % kFp8Quantum != 0) {
    if (odd_layers_++ == 0)
      first_odd_ = fmt::format("{} [{}, {}]",
                               layer_of(bucket.params[static_cast<std::size_t>(first.index)].name),
                               rows, cols);
    return -1;
  }
  quantized_ += work;
  linears_.push_back({first, count});
  return static_cast<int>(linears_.size()) - 1;
}

void QuantRegistry::add_plain(const std::string& layer, std::int64_t rows, std::int64_t cols) {
  names_.push_back(layer);
  total_ += static_cast<double>(rows) * static_cast<double>(cols);
}

void QuantRegistry::check_names() const {
  for (const std::string& entry : recipe_.keep_bf16) {
    const bool is_known = std::any_of(names_.begin(), names_.end(), [&](const std::string& layer) {
      return names_layer(entry, layer);
    });
    CHECK_USER(is_known,
               "[config] precision.keep_bf16 lists \"{}\", which names no layer of the model; "
               "write names such "
               "as {}, {} or layers.0",
               entry, names_.front(), names_.front().substr(names_.front().rfind('.') + 1));
  }
}

std::string QuantRegistry::note() const {
  if (odd_layers_ == 0) return {};
  return fmt::format(
      "{} linear layers have a size that is not a multiple of {} and run in the compute format "
      "(the first: {})",
      odd_layers_, kFp8Quantum, first_odd_);
}

}  // namespace tessera
