#include "engine/train/quant_monitor.h"

#include <map>

namespace tessera {
namespace {

// Of each layer: elements and lost ones of the input, then of the gradient.
constexpr std::size_t kCounts = 4;

std::vector<std::string> quantized_layers(const Transformer& model) {
  std::vector<std::string> layers;
  for (const QuantRegistry::Linear& linear : model.quant_registry().linears()) {
    const BucketSpec& bucket = model.registry().buckets()[static_cast<std::size_t>(linear.weight.bucket)];
    const std::string& name = bucket.params[static_cast<std::size_t>(linear.weight.index)].name;
    layers.push_back(name.substr(0, name.rfind('.')));
  }
  return layers;
}

}  // namespace

QuantMonitor::QuantMonitor(ModelRuntime& runtime, const ModelConfig& config, std::int64_t every_steps)
    : runtime_(&runtime), every_steps_(every_steps) {
  // Of the whole model: stages of a pipeline hold different layers, and all ranks sum one array.
  const RuntimeOptions& options = runtime.options();
  layers_ = quantized_layers(
      Transformer(config, runtime.mesh().tensor().size(), options.sequence_parallel, options.recipe));
  std::map<std::string, std::int64_t> place_of;
  for (const std::string& layer : layers_) place_of.emplace(layer, static_cast<std::int64_t>(place_of.size()));
  for (const std::string& layer : quantized_layers(runtime.model())) places_.push_back(place_of.at(layer));
  device_ = std::make_unique<Buffer>(runtime.context(), layers_.size() * kCounts * sizeof(std::int64_t));
  host_ = std::make_unique<Buffer>(runtime.context(), 2 * layers_.size() * kCounts * sizeof(std::int64_t),
                                   MemoryKind::kPinnedHost);
}

std::int64_t* QuantMonitor::host(std::int64_t step) const {
  return static_cast<std::int64_t*>(host_->data()) +
         static_cast<std::size_t>(step / every_steps_ % 2) * layers_.size() * kCounts;
}

void QuantMonitor::begin(std::int64_t step) {
  if (is_due(step)) runtime_->quant().watch_losses(true, runtime_->compute());
}

void QuantMonitor::finish(std::int64_t step) {
  if (!is_due(step)) return;
  Stream& stream = runtime_->compute();
  runtime_->quant().watch_losses(false, stream);
  const Tensor& own = runtime_->quant().losses();
  const Tensor counts(device_->data(), DType::kI64, Shape{static_cast<std::int64_t>(layers_.size() * kCounts)},
                      device_->device());
  constexpr auto kWidth = static_cast<std::int64_t>(kCounts);
  stream.set_zero(counts.data, counts.bytes());
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const Tensor from = own.flat_slice(static_cast<std::int64_t>(i) * kWidth, kWidth);
    stream.copy_bytes(counts.flat_slice(places_[i] * kWidth, kWidth).data, from.data, from.bytes());
  }
  runtime_->mesh().world().all_reduce(counts, ReduceOp::kSum, stream);
  stream.copy_bytes(host(step), counts.data, counts.bytes());
}

std::vector<QuantLosses> QuantMonitor::read(std::int64_t step) const {
  std::vector<QuantLosses> result;
  const std::int64_t* counts = host(step);
  const auto share = [](const std::int64_t* pair) {
    return pair[0] > 0 ? static_cast<double>(pair[1]) / static_cast<double>(pair[0]) : 0.0;
  };
  for (const std::string& layer : layers_) {
    if (counts[0] + counts[2] > 0) result.push_back({layer, share(counts), share(counts + 2)});
    counts += kCounts;
  }
  return result;
}

}  // namespace tessera
