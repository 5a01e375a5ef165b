// The `precision` section of a run: the number formats of a step.
#pragma once

#include <string>

#include "engine/core/config.h"

namespace tessera {

struct PrecisionOptions {
  std::string compute = "auto";
  std::string master_weights = "fp32";
  std::string optimizer_states = "fp32";
  std::string gradients = "fp32";
  std::string fp8 = "none";

  void visit(FieldVisitor& v) {
    v.field("compute", compute,
            "Weights and activations in forward and backward; sums are fp32. auto: bf16 on a GPU, "
            "fp32 on the CPU, which has to emulate bf16",
            {.aliases = {"dtype", "torch_dtype"},
             .choices = {"auto", "bf16", "fp32"},
             .value_aliases = {{"bfloat16", "bf16"}, {"float32", "fp32"}}});
    v.field("master_weights", master_weights,
            "Copy of the weights that the optimizer updates; none: it updates the compute weights "
            "themselves, with stochastic rounding",
            {.choices = {"fp32", "none"}});
    v.field("optimizer_states", optimizer_states,
            "Moments of the optimizer; bf16 rounds them stochastically",
            {.choices = {"fp32", "bf16"}});
    v.field("gradients", gradients, "Sums of gradients over micro-batches and ranks",
            {.aliases = {"grad_reduce_dtype"}, .choices = {"fp32", "bf16"}});
    v.field("fp8", fp8, "FP8 matrix products and how their scales are found",
            {.choices = {"none", "current", "delayed", "blockwise", "rowwise"}});
  }
};

}  // namespace tessera
