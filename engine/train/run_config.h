// RunConfig: the whole configuration of a run, composed of the structs that the components own.
//   RunConfig config = load_run_config("run.yaml", {"parallel.tensor=2"}, &notes);
// reads and checks everything that needs no model; resolve() then fills in what depends on the ranks
// and the device, and the result is what config.yaml of the run folder and a checkpoint hold.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_options.h"
#include "data/data_options.h"
#include "engine/core/config.h"
#include "engine/memory/memory_options.h"
#include "engine/train/optimizer_options.h"
#include "engine/train/run_options.h"
#include "engine/train/train_options.h"
#include "models/model_options.h"
#include "models/precision_options.h"
#include "parallel/parallel_options.h"

namespace tessera {

class ControlPlane;

struct RunConfig {
  RunOptions run;
  ModelOptions model;
  TrainOptions train;
  OptimizerOptions optimizer;
  ScheduleOptions schedule;
  PrecisionOptions precision;
  ParallelOptions parallel;
  MemoryOptions memory;
  DataOptions data;
  EvalOptions eval;
  CheckpointOptions checkpoint;
  FaultOptions faults;
  LogOptions log;

  // Where the values came from; for messages only.
  std::string source = "configuration";         // "run.yaml"
  std::map<std::string, ConfigPlace> places;    // of the keys that were given

  void visit(FieldVisitor& v);

  // "run.yaml:14 parallel.tensor", or "run.yaml parallel.tensor" for a default: how a message about a
  // value begins, behind "[config] ".
  std::string locate(const std::string& key) const;
};

// Parses the file, applies the overrides ("section.key=value", in order), reads and validates. All
// mistakes come in one kUser error. `notes` receives a line for each alias that was translated.
RunConfig load_run_config(const std::string& path, const std::vector<std::string>& overrides = {},
                          std::vector<std::string>* notes = nullptr);
// The same from text; `name` stands for the file in messages and gives the default run.dir.
RunConfig parse_run_config(std::string_view text, const std::string& name,
                           const std::vector<std::string>& overrides = {},
                           std::vector<std::string>* notes = nullptr);

// Everything that can be found wrong without the model, the data or the machine, as one kUser error.
void validate(const RunConfig& config);

// As YAML, canonical and re-readable; `with_help` explains every key.
std::string write_run_config(const RunConfig& config, bool with_help = false);

// Ranks of one data-parallel group, ranks / (tensor * pipeline * context); kUser if that is not whole.
std::int64_t data_parallel_size(const RunConfig& config, std::int64_t ranks);

// How one update is put together: global = micro * data_parallel * accumulation.
struct BatchShape {
  std::int64_t micro_batch_size = 1;
  std::int64_t data_parallel = 1;
  std::int64_t gradient_accumulation_steps = 1;
  std::int64_t global_batch_size = 1;
};

// kUser when global_batch_size is no multiple of micro_batch_size * data_parallel.
BatchShape batch_shape(const RunConfig& config, std::int64_t data_parallel);

// Updates of the run. `rows_per_epoch` is needed for train.epochs only: an epoch has
// ceil(rows / global_batch_size) updates, the last one maybe smaller (and normalised by its own
// tokens); a part of an epoch is rounded up to whole updates.
std::int64_t total_steps(const TrainOptions& train, std::int64_t global_batch_size,
                         std::optional<std::int64_t> rows_per_epoch = std::nullopt);

// Replaces what is left to the program: global_batch_size instead of gradient_accumulation_steps,
// precision.compute, parallel.sequence_parallel, parallel.zero. memory.recompute: auto stays: the
// memory plan decides it.
void resolve(RunConfig& config, std::int64_t ranks, bool on_gpu);

struct ChangedKey {
  std::string name;
  std::string saved;  // as YAML, "unset" if absent
  std::string now;
};

// Keys that differ and are not free on resume, of two resolved configurations.
std::vector<ChangedKey> changed_keys(const RunConfig& saved, const RunConfig& now);

// Throws the kUser error that refuses a resume with changed keys, except those in `allowed` (names, or
// prefixes such as "data"); an allowed name that is no key is an error, too.
void check_resumable(const RunConfig& saved, const RunConfig& now, std::int64_t saved_step,
                     const std::vector<std::string>& allowed);

// Throws the kUser error on a rank whose configuration is not rank 0's: a launcher may start ranks on
// other files or options. Folders of a machine's own (data.cache_dir, checkpoint.local_dir) may differ.
// Every rank calls it.
void check_ranks_agree(const RunConfig& config, ControlPlane& control, double timeout_seconds);

}  // namespace tessera
