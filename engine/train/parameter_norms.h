// ParameterNorms: the gradient norm of each parameter of the whole model, for log.per_layer.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "models/model_runtime.h"

namespace tessera {

class ParameterNorms {
 public:
  // Collective in form: every rank of the mesh makes one. Takes 8 bytes of device memory a
  // parameter.
  ParameterNorms(ModelRuntime& runtime, const ModelConfig& config);

  // Enqueues the sums of squares of the step's finished gradients, summed over all ranks, and their
  // copy to the host; before the gradients are used again. Every rank calls it at the same steps.
  void enqueue(std::int64_t step);

  // The norms of a step in the model's order, once its work is done; of one of the last two
  // enqueued. `denominator` is the step's, as in StepControl.
  std::vector<std::pair<std::string, double>> read(std::int64_t step, double denominator) const;

 private:
  std::size_t count() const { return names_.size(); }
  double* host(std::int64_t step) const;

  ModelRuntime* runtime_;
  std::vector<std::string> names_;
  std::vector<std::vector<int>> indices_;  // of each shard's pieces
  std::unique_ptr<Buffer> device_;
  std::unique_ptr<Buffer> host_;  // two slots
};

}  // namespace tessera
