// Trainer: owns one run on one rank — from the configuration to the final model. The step itself is
// Trainer::run_step; what it needs is built by the constructor, and nothing is allocated afterwards.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_writer.h"
#include "data/loader.h"
#include "engine/train/evaluator.h"
#include "engine/train/gemm_choices_cache.h"
#include "engine/train/parameter_norms.h"
#include "engine/train/quant_monitor.h"
#include "engine/train/replica_check.h"
#include "engine/train/progress.h"
#include "engine/train/rehearsal.h"
#include "engine/train/run_folder.h"
#include "engine/train/memory_choice.h"
#include "engine/train/run_setup.h"
#include "parallel/control/control_plane.h"

namespace tessera {

struct TrainSettings {
  std::string resume = "auto";              // auto, never, or a checkpoint folder
  std::vector<std::string> allowed_changes; // keys that may differ from the resumed run's
  bool overwrite = false;                   // start anew although the run folder holds a run
  bool dry_run = false;                     // plan and check everything, then stop
  bool is_benchmark = false;  // random weights; no folder, checkpoints or rows: run_steps, not run
};

class Trainer {
 public:
  // `config` is resolved; `world` has the ranks of the whole job. The context and the control plane must outlive the trainer.
  Trainer(RunConfig config, TrainSettings settings, std::unique_ptr<Communicator> world,
          BackendContext& context, ControlPlane& control);
  ~Trainer();

  // Trains to the end and returns the exit code: 0 done, 75 stopped on request after saving.
  int run();

  // For benchmarks: makes `count` more steps and returns their rows, on every rank. Blocks until they
  // are done.
  std::vector<TrainRow> run_steps(std::int64_t count);

  const RunConfig& config() const { return config_; }
  const ModelConfig& model() const { return hf_.model; }
  const ProcessMesh& mesh() const { return mesh_; }
  const RuntimeOptions& options() const { return options_; }
  const RuntimeMemory& planned_memory() const { return memory_; }
  // What the device says is in use for this rank, or what was planned where it cannot tell.
  std::uint64_t memory_in_use() const;

 private:
  struct Staging;

  void load_data();
  void plan();
  void report_plan();
  void start_weights();
  std::filesystem::path checkpoint_folder() const;
  void restore(const std::filesystem::path& checkpoint);

  void run_step(std::int64_t step);
  void collect(std::int64_t step);
  bool is_logged(std::int64_t step) const;
  // Writes what FP8 casts lost at a step that was watched, and says once of a layer what is much.
  void report_quant_losses(std::int64_t step);
  // Whether it is the lowest loss so far; the same on all ranks.
  bool evaluate_at(std::int64_t step);
  void save(std::int64_t step);
  void write_model(const std::filesystem::path& folder);
  void finish(std::int64_t step);
  // Whether the ranks have agreed to stop before the step behind `step`.
  bool stops_at(std::int64_t step);
  std::string metadata(std::int64_t step) const;

  RunConfig config_;
  TrainSettings settings_;
  ControlPlane* control_;
  BackendContext* context_;
  ProcessMesh mesh_;
  bool is_first_;  // rank 0 of the job: prints and writes
  Rehearsal rehearsal_;
  RunFolder folder_;
  HfConfig hf_;
  RunTokenizer tokenizer_;
  BatchShape batch_;
  PreparedData data_;
  std::unique_ptr<DataLoader> train_loader_;
  std::unique_ptr<DataLoader> eval_loader_;
  std::int64_t total_steps_ = 0;
  LearningRateSchedule schedule_;
  RuntimeOptions options_;
  RuntimeMemory memory_;
  std::string memory_reason_;  // why it is what it is, where something was chosen
  std::optional<GemmChoicesCache> gemm_choices_;  // where run.tune_gemm is on
  std::unique_ptr<ModelRuntime> runtime_;
  std::unique_ptr<BatchUploader> uploader_;
  std::unique_ptr<Staging> staging_;
  std::unique_ptr<ParameterNorms> parameter_norms_;  // where log.per_layer is on
  std::unique_ptr<QuantMonitor> quant_monitor_;      // where FP8 products are watched
  std::unique_ptr<ReplicaCheck> replica_check_;      // where faults.check_replicas is on
  std::unique_ptr<CheckpointWriter> checkpoints_;
  std::unique_ptr<Progress> progress_;
  std::vector<TrainRow> measured_;  // of a benchmark's steps

  std::set<std::string> reported_layers_;  // of which report_quant_losses has spoken

  // State of the run that a checkpoint carries.
  std::int64_t start_step_ = 0;       // finished updates at the start
  std::int64_t tokens_total_ = 0;     // target tokens trained so far
  std::int64_t skipped_steps_ = 0;
  std::int64_t adam_step_ = 0;        // updates applied, as of the last collected step
  double best_eval_loss_ = 0;
  std::int64_t best_eval_step_ = 0;   // 0: none yet

  std::int64_t enqueued_step_ = 0;   // last step given to the device
  std::int64_t collected_step_ = 0;  // last step whose results were read
  std::int64_t first_timed_step_ = 0;  // its time starts with itself, not with the step before
  std::int64_t save_due_step_ = 0;     // last step whose results said that checkpoint.every_minutes are over
  std::size_t free_at_start_ = 0;      // device memory before the model was built; 0: unknown
  std::string stop_reason_;
  std::chrono::steady_clock::time_point run_start_;
  std::chrono::steady_clock::time_point last_save_;
};

}  // namespace tessera
