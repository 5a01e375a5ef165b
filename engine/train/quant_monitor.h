// QuantMonitor: what FP8 casts lose, layer by layer, at every so many steps (log.fp8_every_steps): the
// share of the elements other than zero that a cast makes zero, over all micro-batches and ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "models/model_runtime.h"

namespace tessera {

struct QuantLosses {
  std::string layer;    // "model.layers.0.mlp.down_proj"; fused ones by their first name
  double input = 0;     // lost share of the layer's input
  double gradient = 0;  // of its output's gradient
};

class QuantMonitor {
 public:
  // Every rank makes one where products are quantised.
  QuantMonitor(ModelRuntime& runtime, const ModelConfig& config, std::int64_t every_steps);

  bool is_due(std::int64_t step) const { return !layers_.empty() && step % every_steps_ == 0; }
  // Around the micro-batches of a step; nothing at one that is not due. finish() sums over all ranks
  // and enqueues the copy to the host.
  void begin(std::int64_t step);
  void finish(std::int64_t step);
  // Of a due step, once its work is done; of one of the last two due ones. Layers of which nothing
  // was counted are left out.
  std::vector<QuantLosses> read(std::int64_t step) const;

 private:
  std::int64_t* host(std::int64_t step) const;

  ModelRuntime* runtime_;
  std::int64_t every_steps_;
  std::vector<std::string> layers_;  // of the whole model
  std::vector<std::int64_t> places_;  // in these, of each quantised layer of this rank
  std::unique_ptr<Buffer> device_;
  std::unique_ptr<Buffer> host_;  // two slots
};

}  // namespace tessera
