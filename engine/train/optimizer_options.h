// The `optimizer` and `schedule` sections. engine/train/schedule.h has the formulas.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/core/config.h"

namespace tessera {

struct OptimizerOptions {
  std::string name = "adamw";
  std::optional<double> learning_rate;  // required
  double weight_decay = 0.1;
  std::vector<double> betas = {0.9, 0.95};
  double eps = 1e-8;
  double max_grad_norm = 1.0;

  void visit(FieldVisitor& v) {
    v.field("name", name, "Update rule",
            {.aliases = {"optim", "optimizer"},
             .choices = {"adamw"},
             .value_aliases = {{"adamw_torch", "adamw"}, {"adamw_torch_fused", "adamw"}, {"AdamW", "adamw"}}});
    v.field("learning_rate", learning_rate, "Peak learning rate; required", {.aliases = {"lr"}, .above = 0});
    v.field("weight_decay", weight_decay,
            "Decoupled decay of matrices; norms, biases and other vectors are not decayed",
            {.at_least = 0});
    v.field("betas", betas, "Decay rates of the two moments", {.at_least = 0, .below = 1});
    v.field("eps", eps, "Added to the root of the second moment",
            {.aliases = {"adam_epsilon", "adam_eps"}, .above = 0});
    v.field("max_grad_norm", max_grad_norm,
            "The gradient is scaled down to this global norm; 0 switches clipping off",
            {.aliases = {"clip_grad", "gradient_clipping"}, .at_least = 0});
  }
};

struct ScheduleOptions {
  std::string name = "cosine";
  std::optional<std::int64_t> warmup_steps;
  std::optional<double> warmup_ratio;
  double min_lr_ratio = 0.1;
  std::optional<std::int64_t> decay_steps;

  void visit(FieldVisitor& v) {
    v.field("name", name, "Shape of the learning rate behind the warm-up",
            {.aliases = {"lr_scheduler_type", "lr_scheduler", "lr_decay_style"},
             .choices = {"cosine", "linear", "constant", "wsd"},
             .value_aliases = {{"constant_with_warmup", "constant"},
                               {"cosine_with_min_lr", "cosine"},
                               {"warmup_stable_decay", "wsd"},
                               {"WSD", "wsd"}}});
    v.field("warmup_steps", warmup_steps,
            "Steps of linear warm-up; the last of them runs at the peak. Give this or warmup_ratio",
            {.aliases = {"lr_warmup_iters"}, .at_least = 0});
    v.field("warmup_ratio", warmup_ratio, "Warm-up as a part of all steps, rounded up",
            {.aliases = {"lr_warmup_fraction"}, .at_least = 0, .at_most = 1});
    v.field("min_lr_ratio", min_lr_ratio,
            "Learning rate of the last step, as a part of the peak; not used by constant",
            {.aliases = {"cosine_min_lr_ratio", "min_lr_rate", "final_lr_fraction"}, .at_least = 0, .at_most = 1});
    v.field("decay_steps", decay_steps,
            "Steps of decay. wsd: the last ones, 10% of all when unset; cosine and linear: those "
            "behind the warm-up, all when unset, the minimum being held afterwards",
            {.aliases = {"lr_wsd_decay_iters", "num_decay_steps"}, .at_least = 1});
  }
};

}  // namespace tessera
