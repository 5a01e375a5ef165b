// The `precision` section of a run: the number formats of a step.
#pragma once

#include <string>
#include <vector>

#include "engine/core/config.h"

namespace tessera {

struct PrecisionOptions {
  std::string compute = "auto";
  std::string master_weights = "fp32";
  std::string optimizer_states = "fp32";
  std::string gradients = "fp32";
  std::string fp8 = "none";
  std::string fp8_gradients = "e5m2";
  std::vector<std::string> keep_bf16 = {"lm_head"};

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
            "Moments of the optimizer; bf16 and int8 round them stochastically. int8: a byte each, "
            "with a scale for every 256 elements",
            {.choices = {"fp32", "bf16", "int8"}, .value_aliases = {{"8bit", "int8"}}});
    v.field("gradients", gradients, "Sums of gradients over micro-batches and ranks",
            {.aliases = {"grad_reduce_dtype"}, .choices = {"fp32", "bf16"}});
    v.field("fp8", fp8, "FP8 matrix products and how their scales are found",
            {.choices = {"none", "current", "delayed", "blockwise", "rowwise"}});
    v.field("fp8_gradients", fp8_gradients,
            "FP8 format of gradients: e5m2 reaches further, e4m3 has one bit more",
            {.choices = {"e5m2", "e4m3"}});
    v.field("keep_bf16", keep_bf16,
            "Layers whose products stay in the compute format under FP8, by any part of their names: "
            "`lm_head`, `layers.0`, `down_proj`, `layers.31.mlp`");
  }
};

}  // namespace tessera
