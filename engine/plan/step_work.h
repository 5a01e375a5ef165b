// The work of one training step on one rank, counted from the model and the layout: products,
// attention, and the bytes that the memory-bound passes move at least — each tensor of an op's
// formula read once and written once, whatever a kernel really moves. What a benchmark and the
// planner hold time against.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/model_runtime.h"

namespace tessera {

struct StepProduct {
  std::string name;  // "qkv forward", "down dgrad", "head wgrad"
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t count = 0;  // in a step
  bool is_fp8 = false;
  bool is_gradient = false;  // one operand is a gradient
  bool is_wgrad = false;     // accumulates into a gradient of the weights
  double flops() const {
    return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) *
           static_cast<double>(count);
  }
};

struct StepPass {
  std::string op;    // as classify_kernel names it
  double bytes = 0;  // in a step
};

struct StepWork {
  std::vector<StepProduct> products;
  double attention_forward_flops = 0;   // causal, full rows: half of the square
  double attention_backward_flops = 0;  // five products where the forward has two
  std::vector<StepPass> passes;         // without the optimizer
  double optimizer_bytes = 0;

  double product_flops(bool fp8) const;
  // Of all products' FLOPs.
  double fp8_share() const;
  double pass_bytes() const;
};

// Of a rank of pipeline stage `stage` (all those of a stage are alike).
StepWork step_work(const ModelConfig& model, const MeshShape& mesh, const RuntimeOptions& options,
                   std::int64_t micro_batches, int stage);

}  // namespace tessera
