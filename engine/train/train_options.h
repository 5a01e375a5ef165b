// The `train` and `eval` sections: what is trained, how much of it, and when it is measured.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/core/config.h"

namespace tessera {

struct TrainOptions {
  std::string stage = "pretrain";
  std::int64_t sequence_length = 2048;
  std::int64_t micro_batch_size = 1;
  std::optional<std::int64_t> global_batch_size;
  std::optional<std::int64_t> gradient_accumulation_steps;
  std::optional<std::int64_t> max_steps;
  std::optional<double> epochs;
  std::optional<std::int64_t> max_tokens;
  std::int64_t seed = 42;

  void visit(FieldVisitor& v) {
    v.field("stage", stage, "pretrain: every token; sft: answers; dpo: preferences",
            {.choices = {"pretrain", "sft", "dpo"}, .value_aliases = {{"pt", "pretrain"}}});
    v.field("sequence_length", sequence_length, "Tokens in a row",
            {.aliases = {"seq_length", "sequence_len", "cutoff_len", "max_length", "max_seq_length"},
             .at_least = 1,
             .at_most = 1 << 24});
    v.field("micro_batch_size", micro_batch_size, "Rows that a data-parallel rank works on at once",
            {.aliases = {"per_device_train_batch_size", "train_micro_batch_size_per_gpu"},
             .at_least = 1,
             .at_most = 1 << 20,
             .free_on_resume = true});
    v.field("global_batch_size", global_batch_size,
            "Rows of one update over all ranks: micro_batch_size * data-parallel ranks * "
            "accumulation. Give this or gradient_accumulation_steps",
            {.aliases = {"train_batch_size"}, .at_least = 1, .at_most = 1ll << 32});
    v.field("gradient_accumulation_steps", gradient_accumulation_steps,
            "Micro-batches of one update on each data-parallel rank; 1 when neither is given",
            {.aliases = {"grad_accumulation"},
             .at_least = 1,
             .at_most = 1 << 20,
             .free_on_resume = true});
    v.field("max_steps", max_steps,
            "Length of the run in updates. Give one of max_steps, epochs and max_tokens",
            {.aliases = {"train_iters", "steps"}, .at_least = 1, .free_on_resume = true});
    v.field("epochs", epochs, "Length of the run in passes over the data",
            {.aliases = {"num_train_epochs", "num_epochs"}, .above = 0, .free_on_resume = true});
    v.field("max_tokens", max_tokens,
            "Length of the run in tokens, counted as whole rows of sequence_length",
            {.at_least = 1, .free_on_resume = true});
    v.field("seed", seed, "Of initial weights, data order, dropout and rounding", {.at_least = 0});
  }
};

struct EvalOptions {
  std::optional<std::int64_t> every_steps;
  std::optional<std::int64_t> max_batches;
  bool at_start = false;
  bool keep_best = false;

  void visit(FieldVisitor& v) {
    v.field("every_steps", every_steps,
            "Evaluate every so many steps, and at the end; unset: only at the end, if there is data "
            "for it",
            {.aliases = {"eval_steps", "eval_interval"}, .at_least = 1, .free_on_resume = true});
    v.field("max_batches", max_batches, "Use at most so many global batches for an evaluation",
            {.aliases = {"eval_iters"}, .at_least = 1, .free_on_resume = true});
    v.field("at_start", at_start, "Evaluate before the first step, too",
            {.aliases = {"eval_on_start"}, .free_on_resume = true});
    v.field("keep_best", keep_best, "Keep the checkpoint with the lowest evaluation loss",
            {.free_on_resume = true});
  }
};

}  // namespace tessera
