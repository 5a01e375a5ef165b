// The `run`, `faults` and `log` sections: the process around the training.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/core/config.h"

namespace tessera {

struct RunOptions {
  std::optional<std::string> dir;
  std::string device = "auto";
  std::optional<std::int64_t> ranks;
  std::optional<std::string> time_limit;
  bool reproducible = true;
  bool tune_gemm = true;

  void visit(FieldVisitor& v) {
    v.field("dir", dir, "Run folder; unset: runs/ and the name of the configuration file",
            {.aliases = {"output_dir"}, .free_on_resume = true, .is_path = true});
    v.field("device", device, "auto: the GPUs if there are any, the CPU otherwise",
            {.choices = {"auto", "cuda", "cpu"}, .free_on_resume = true});
    v.field("ranks", ranks,
            "Ranks of the whole job; auto: what the launcher started, else every GPU of this "
            "machine, else as many CPU ranks as the layout needs",
            {.unset_word = "auto", .at_least = 1, .at_most = 1 << 20, .free_on_resume = true});
    v.field("time_limit", time_limit,
            "Save and stop with exit code 75 when this much time has passed since the start",
            {.unit = "duration", .free_on_resume = true});
    v.field("reproducible", reproducible,
            "The same seed, layout and machine kind give the same bits; false may be faster",
            {.aliases = {"deterministic_mode", "full_determinism"}, .free_on_resume = true});
    v.field("tune_gemm", tune_gemm,
            "Time the algorithms of each matrix product on a GPU at its first use, and keep the "
            "fastest in ~/.cache/tessera and in checkpoints; false: the library's first proposal",
            {.free_on_resume = true});
  }
};

struct FaultOptions {
  std::string nan = "stop";
  std::string spike = "off";
  std::string collective_timeout = "10m";
  std::int64_t check_replicas = 0;

  void visit(FieldVisitor& v) {
    v.field("nan", nan, "A loss or gradient that is not finite. stop: end the run; skip: make no "
            "update and go on; rollback: go back to the last checkpoint and skip its data",
            {.choices = {"stop", "skip", "rollback"}, .free_on_resume = true});
    v.field("spike", spike, "A loss far above the recent ones",
            {.choices = {"off", "skip", "rollback"}, .free_on_resume = true});
    v.field("collective_timeout", collective_timeout,
            "Longest wait for another rank before the run is ended with the names of the late ones",
            {.aliases = {"ddp_timeout"}, .unit = "duration", .free_on_resume = true});
    v.field("check_replicas", check_replicas,
            "Every so many steps, compare checksums of the parameters that several ranks hold and end the run where "
            "they differ; copies the weights to the host each time; 0: never",
            {.at_least = 0, .free_on_resume = true});
  }
};

struct LogOptions {
  std::int64_t every_steps = 1;
  bool tensorboard = true;
  bool per_layer = false;
  std::int64_t fp8_every_steps = 100;

  void visit(FieldVisitor& v) {
    v.field("every_steps", every_steps, "Write a row of metrics.jsonl every so many steps",
            {.aliases = {"logging_steps", "log_interval"}, .at_least = 1, .free_on_resume = true});
    v.field("tensorboard", tensorboard, "Write TensorBoard event files as well",
            {.free_on_resume = true});
    v.field("per_layer", per_layer, "Gradient norm of each parameter in each row, as grad_norms",
            {.free_on_resume = true});
    v.field("fp8_every_steps", fp8_every_steps,
            "With precision.fp8, every so many steps: what share of each layer's input and gradient the casts make "
            "zero, as rows of kind fp8; 0: never",
            {.at_least = 0, .free_on_resume = true});
  }
};

}  // namespace tessera
