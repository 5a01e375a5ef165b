#include "engine/train/quant_monitor.h"

namespace tessera {
namespace {

// Of each layer: elements and lost ones of the input, then of the gradient.
constexpr std::size_t kCounts = 4;

}  // namespace

QuantMonitor::QuantMonitor(ModelRuntime& runtime, std::int64_t every_steps)
    : runtime_(&runtime), every_steps_(every_steps) {
  for (const QuantRegistry::Linear& linear : runtime.model().quant_registry().linears()) {
    const std::string& name = runtime.params().spec(linear.weight).name;
    layers_.push_back(name.substr(0, name.rfind('.')));
  }
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
  const Tensor& counts = runtime_->quant().losses();
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
