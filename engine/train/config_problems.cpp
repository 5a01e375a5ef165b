#include "engine/train/config_problems.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "engine/core/text.h"
#include "engine/train/availability.h"

namespace tessera {
namespace {

class Problems {
 public:
  Problems(const RunConfig& config, const std::set<std::string>& unreadable)
      : config_(config), unreadable_(unreadable) {}

  // `keys` are those that the rule looks at; the message stands at the last one that was given, or
  // at the first if none was.
  void add(const std::vector<std::string>& keys, const std::string& message) {
    const bool is_blind = std::any_of(keys.begin(), keys.end(), [this](const std::string& key) {
      return unreadable_.contains(key);
    });
    if (is_blind) return;
    std::string shown = keys.front();
    std::int64_t order = -1;
    for (const std::string& key : keys) {
      const auto found = config_.places.find(key);
      if (found != config_.places.end() && found->second.order > order) {
        order = found->second.order;
        shown = key;
      }
    }
    // What is missing has no line: such messages come last.
    if (order < 0) order = std::numeric_limits<std::int64_t>::max();
    mistakes.push_back({order, fmt::format("{} {}", config_.locate(shown), message)});
  }

  bool is_given(const std::string& key) const {
    return config_.places.contains(key) || unreadable_.contains(key);
  }

  std::vector<ConfigMistake> mistakes;

 private:
  const RunConfig& config_;
  const std::set<std::string>& unreadable_;
};

// Exactly one, or at most one, of several keys that say the same thing differently.
void check_exclusive(Problems& problems, const std::vector<std::pair<std::string, bool>>& keys,
                     bool is_required, const std::string& what) {
  std::vector<std::string> names;
  std::vector<std::string> given;
  for (const auto& [name, is_set] : keys) {
    names.push_back(name);
    if (is_set) given.push_back(name);
  }
  if (given.size() > 1) {
    problems.add(
        given, fmt::format("is one of {} keys for {}: {}. Keep one; in --set, key=null removes one "
                           "of the file",
                           given.size(), what, fmt::join(given, ", ")));
  }
  if (given.empty() && is_required) {
    problems.add(names,
                 fmt::format("is missing: {} is given by one of {}", what, fmt::join(names, ", ")));
  }
}

void check_training(const RunConfig& c, Problems& problems) {
  if (c.model.path.empty() && !c.model.from_checkpoint) {
    problems.add({"model.path"},
                 "is missing: name a Hugging Face folder or, with model.init random, a "
                 "config.json file");
  }
  if (c.model.from_checkpoint && c.model.init == "random") {
    problems.add(
        {"model.init", "model.from_checkpoint"},
        "contradicts: model.init is random and model.from_checkpoint names weights; keep one");
  }
  check_exclusive(problems,
                  {{"train.max_steps", c.train.max_steps.has_value()},
                   {"train.epochs", c.train.epochs.has_value()},
                   {"train.max_tokens", c.train.max_tokens.has_value()}},
                  true, "the length of the run");
  check_exclusive(
      problems,
      {{"train.global_batch_size", c.train.global_batch_size.has_value()},
       {"train.gradient_accumulation_steps", c.train.gradient_accumulation_steps.has_value()}},
      false, "the size of an update");
  if (c.train.global_batch_size && *c.train.global_batch_size % c.train.micro_batch_size != 0) {
    problems.add({"train.global_batch_size", "train.micro_batch_size"},
                 fmt::format("does not fit: train.global_batch_size {} is no multiple of "
                             "train.micro_batch_size {}",
                             *c.train.global_batch_size, c.train.micro_batch_size));
  }
}

void check_optimizer(const RunConfig& c, Problems& problems) {
  if (!c.optimizer.learning_rate) {
    problems.add({"optimizer.learning_rate"},
                 "is missing; 1e-5 suits full fine-tuning, 3e-4 training from scratch");
  }
  if (c.optimizer.betas.size() != 2) {
    problems.add({"optimizer.betas"},
                 fmt::format("has {} numbers; write two, [0.9, 0.95]", c.optimizer.betas.size()));
  }
  check_exclusive(problems,
                  {{"schedule.warmup_steps", c.schedule.warmup_steps.has_value()},
                   {"schedule.warmup_ratio", c.schedule.warmup_ratio.has_value()}},
                  false, "the warm-up");
  if (c.schedule.name == "constant" && c.schedule.decay_steps) {
    problems.add(
        {"schedule.decay_steps", "schedule.name"},
        "has no effect: schedule.name constant does not decay; take wsd or leave decay_steps out");
  }
  if (!c.train.max_steps) return;
  const std::int64_t steps = *c.train.max_steps;
  const std::int64_t warmup = c.schedule.warmup_steps.value_or(0);
  if (warmup > steps) {
    problems.add(
        {"schedule.warmup_steps", "train.max_steps"},
        fmt::format("does not fit: schedule.warmup_steps {} is more than train.max_steps {}",
                    warmup, steps));
  } else if (c.schedule.name == "wsd" && c.schedule.decay_steps &&
             *c.schedule.decay_steps > steps - std::max<std::int64_t>(warmup, 1)) {
    problems.add(
        {"schedule.decay_steps", "schedule.warmup_steps", "train.max_steps"},
        fmt::format("does not fit: schedule.warmup_steps {} and schedule.decay_steps {} are more "
                    "than train.max_steps {}",
                    warmup, *c.schedule.decay_steps, steps));
  }
}

void check_layout(const RunConfig& c, Problems& problems) {
  const ParallelOptions& p = c.parallel;
  const bool interleaves = p.pipeline_schedule == "interleaved" || p.pipeline_schedule == "auto";
  if (p.virtual_stages > 1 && (p.pipeline == 1 || !interleaves)) {
    problems.add(
        {"parallel.virtual_stages", "parallel.pipeline", "parallel.pipeline_schedule"},
        fmt::format("is {}; it needs parallel.pipeline above 1 and parallel.pipeline_schedule "
                    "interleaved, but those are {} and {}",
                    p.virtual_stages, p.pipeline, p.pipeline_schedule));
  }
  if (!c.run.ranks) return;
  const std::int64_t model_ranks = p.tensor * p.pipeline * p.context;
  if (*c.run.ranks % model_ranks != 0) {
    problems.add({"run.ranks", "parallel.tensor", "parallel.pipeline", "parallel.context"},
                 fmt::format("does not fit: run.ranks {} is no multiple of parallel.tensor {} * "
                             "pipeline {} * context {}",
                             *c.run.ranks, p.tensor, p.pipeline, p.context));
    return;
  }
  const std::int64_t data_parallel = *c.run.ranks / model_ranks;
  if (!c.train.global_batch_size || *c.train.global_batch_size % c.train.micro_batch_size != 0)
    return;
  if (*c.train.global_batch_size / c.train.micro_batch_size % data_parallel != 0) {
    problems.add(
        {"train.global_batch_size", "train.micro_batch_size", "run.ranks", "parallel.tensor"},
        fmt::format("does not fit: train.global_batch_size {} is no multiple of "
                    "train.micro_batch_size {} on {} data-parallel ranks",
                    *c.train.global_batch_size, c.train.micro_batch_size, data_parallel));
  }
}

void check_memory(const RunConfig& c, Problems& problems) {
  const std::vector<std::string>& offload = c.memory.offload;
  const auto lists = [&](const char* what) {
    return std::find(offload.begin(), offload.end(), what) != offload.end();
  };
  const bool is_full = c.memory.recompute == "full" || c.memory.recompute == "auto";
  if (lists("activations") && !is_full) {
    problems.add({"memory.offload"},
                 fmt::format("lists activations, but memory.recompute {} keeps more than the inputs "
                             "of the blocks; write memory.recompute full or auto",
                             c.memory.recompute));
  }
  if (lists("masters") && (c.precision.master_weights == "none" || c.precision.compute == "fp32")) {
    problems.add({"memory.offload"},
                 fmt::format("lists masters, but there are none with precision.compute {} and "
                             "precision.master_weights {}; leave it out",
                             c.precision.compute, c.precision.master_weights));
  }
  if (c.memory.mlp_chunk && parse_bytes(*c.memory.mlp_chunk).value_or(0) < 1) {
    problems.add({"memory.mlp_chunk"}, "is nothing; write a size such as 256MiB");
  }
}

void check_data(const RunConfig& c, Problems& problems) {
  if (c.data.train.empty()) {
    problems.add({"data.train"}, "is missing: name at least one file or folder");
  }
  auto check_sources = [&problems](const std::vector<DataSource>& sources,
                                   const std::string& list) {
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (!sources[i].path.empty()) continue;
      problems.add({list, fmt::format("{}[{}].path", list, i)},
                   fmt::format("has no path on source number {}: name a file or folder", i + 1));
    }
  };
  check_sources(c.data.train, "data.train");
  check_sources(c.data.eval, "data.eval");
  // A weight is a share of the tokens where others have none: those, seen once, make up the rest.
  double weights = 0;
  std::size_t weighted = 0;
  for (const DataSource& source : c.data.train) {
    weights += source.weight.value_or(0);
    weighted += source.weight ? 1 : 0;
  }
  if (weighted != 0 && weighted != c.data.train.size() && weights >= 1) {
    problems.add(
        {"data.train"},
        fmt::format("has weights that add up to {:g} on {} of its {} sources: nothing is left for "
                    "the others; lower them below 1, or give every source a weight",
                    weights, weighted, c.data.train.size()));
  }
  if (!c.data.eval.empty() && c.data.eval_fraction > 0) {
    problems.add(
        {"data.eval_fraction", "data.eval"},
        "contradicts: data.eval names the evaluation data, so data.eval_fraction has no effect; "
        "keep one");
  }
  const bool has_eval_data = !c.data.eval.empty() || c.data.eval_fraction > 0;
  if (has_eval_data) return;
  for (const char* key : {"eval.every_steps", "eval.at_start", "eval.keep_best"}) {
    const bool is_on = std::string_view(key) == "eval.every_steps" ? c.eval.every_steps.has_value()
                       : std::string_view(key) == "eval.at_start"  ? c.eval.at_start
                                                                   : c.eval.keep_best;
    if (is_on) {
      problems.add({key, "data.eval", "data.eval_fraction"},
                   "needs data to evaluate on: give data.eval or data.eval_fraction");
    }
  }
}

}  // namespace

std::vector<ConfigMistake> find_config_problems(const RunConfig& config,
                                                const std::set<std::string>& unreadable) {
  Problems problems(config, unreadable);
  for (const UnavailableValue& value : unavailable_values(config)) {
    problems.add({value.key}, value.message);
  }
  check_training(config, problems);
  check_optimizer(config, problems);
  check_layout(config, problems);
  check_memory(config, problems);
  check_data(config, problems);
  if (config.eval.keep_best && !config.eval.every_steps) {
    problems.add({"eval.keep_best", "eval.every_steps"}, "needs eval.every_steps");
  }
  return std::move(problems.mistakes);
}

}  // namespace tessera
