#include "engine/train/trainer.h"

#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <utility>

#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/host_memory.h"
#include "data/progress_display.h"
#include "engine/core/log.h"
#include "engine/core/text.h"
#include "engine/train/export.h"
#include "engine/train/precision.h"
#include "kernels/gemm_choices.h"
#include "kernels/step_control.h"
#include "models/hf/names.h"
#include "models/weights.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::json;

// Ranks on this rank's node, by the host's name; the same on every node, with neighbouring numbers.
std::int64_t ranks_per_node(Communicator& world) {
  char name[256] = {};
  CHECK(gethostname(name, sizeof name - 1) == 0, "[train] the host has no name");
  const auto color = static_cast<int>(std::hash<std::string>{}(name) & 0x7fffffff);
  const auto node = world.split(color, world.rank(), "node");
  const bool is_regular =
      world.size() % node->size() == 0 && world.rank() % node->size() == node->rank();
  CHECK_USER(is_regular,
             "[config] parallel.shard_group is node: rank {} is number {} of {} on its node, and nodes "
             "must have as many ranks each, numbered one after the other; write all",
             world.rank(), node->rank(), node->size());
  return node->size();
}

ProcessMesh make_mesh(const RunConfig& config, std::unique_ptr<Communicator> world) {
  const bool by_node = config.parallel.shard_group == "node";
  const MeshShape shape =
      mesh_shape(config, world->size(), by_node ? ranks_per_node(*world) : 0);
  return ProcessMesh(std::move(world), shape);
}

// "pipeline 4 x 2 (interleaved) x ", empty for a pipeline of one stage.
std::string describe_pipeline(const ParallelOptions& options, const MeshShape& shape) {
  if (shape.pipeline == 1) return "";
  const std::string chunks =
      options.virtual_stages > 1 ? fmt::format(" x {} virtual", options.virtual_stages) : "";
  return fmt::format("pipeline {}{} ({}) x ", shape.pipeline, chunks, options.pipeline_schedule);
}

// Ranks on this rank's node, by the host's name, however they are numbered. Collective.
std::int64_t ranks_on_node(Communicator& world) {
  char name[256] = {};
  CHECK(gethostname(name, sizeof name - 1) == 0, "[train] the host has no name");
  const auto color = static_cast<int>(std::hash<std::string>{}(name) & 0x7fffffff);
  return world.split(color, world.rank(), "host memory")->size();
}

// What the ranks plan for. Where something is left to choose they must choose alike: a block that is
// computed again takes part in collectives again. Collective.
MemoryLimits memory_limits(const MemoryOptions& options, const ProcessMesh& mesh,
                           BackendContext& context) {
  MemoryLimits limits;
  Communicator& world = mesh.world();
  const bool is_cpu = context.device().kind == DeviceKind::kCpu;
  std::size_t host = 0;
  if (is_cpu || !options.offload.empty()) {
    host = static_cast<std::size_t>(available_host_bytes() / ranks_on_node(world));
  }
  limits.device = options.limit ? static_cast<std::size_t>(parse_bytes(*options.limit).value())
                  : is_cpu      ? host
                                : context.available_bytes();
  if (!options.offload.empty()) limits.host = host;
  if (!chooses_memory(options) || world.size() == 1) return limits;
  // The least of all ranks: the largest of the negatives.
  const auto stream = context.make_stream("memory limits");
  const Buffer memory(context, 2 * sizeof(std::int64_t));
  std::int64_t values[2] = {-static_cast<std::int64_t>(limits.device),
                            -static_cast<std::int64_t>(limits.host)};
  stream->copy_bytes(memory.data(), values, sizeof values);
  world.all_reduce(Tensor(memory.data(), DType::kI64, Shape{2}, memory.device()), ReduceOp::kMax, *stream);
  stream->copy_bytes(values, memory.data(), sizeof values);
  stream->synchronize();
  limits.device = static_cast<std::size_t>(-values[0]);
  limits.host = static_cast<std::size_t>(-values[1]);
  return limits;
}

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

// Page-locked memory for the scalars between the host and the device: two slots, since a step's results
// are read while the next step is under way.
struct Trainer::Staging {
  struct Scalars {  // to the device at a step's end
    double denominator;
    StepControl control;
  };
  struct Results {  // back from it, read one step late
    double totals[2];  // summed loss, denominator
    StepControl control;
  };
  struct Slot {
    Scalars scalars;
    Results results;
    std::int32_t wants_save;  // before: by rank 0's clock; after: for all ranks
  };

  explicit Staging(ModelRuntime& runtime)
      : memory(runtime.context(), 2 * sizeof(Slot), MemoryKind::kPinnedHost),
        wants_save(runtime.context(), sizeof(std::int32_t)) {
    for (auto& event : started) event = runtime.context().make_event();
    for (auto& event : finished) event = runtime.context().make_event();
  }
  Slot& slot(std::int64_t step) { return static_cast<Slot*>(memory.data())[step % 2]; }

  Buffer memory;
  Buffer wants_save;  // on the device
  // Times of a step are taken when the next one is under way, from the end of the one before it.
  static constexpr int kEvents = 4;
  std::unique_ptr<Event> started[kEvents];
  std::unique_ptr<Event> finished[kEvents];
};

Trainer::Trainer(RunConfig config, TrainSettings settings, std::unique_ptr<Communicator> world,
                 BackendContext& context, ControlPlane& control)
    : config_(std::move(config)),
      settings_(std::move(settings)),
      control_(&control),
      context_(&context),
      mesh_(make_mesh(config_, std::move(world))),
      is_first_(mesh_.world().rank() == 0),
      rehearsal_(mesh_.world().rank(), mesh_.world().size()),
      folder_(config_.run.dir.value()) {
  run_start_ = last_save_ = Clock::now();
  tokenizer_ = load_run_tokenizer(config_);
  hf_ = load_run_model(config_, tokenizer_);
  if (is_first_) {
    for (const std::string& warning : hf_.warnings) log::warning("{}", warning);
  }
  batch_ = batch_shape(config_, mesh_.shape().data);
  load_data();
  plan();
  if (is_first_) report_plan();
  if (settings_.dry_run) return;
  if (config_.run.tune_gemm) gemm_choices_.emplace(context, mesh_.world().rank());
  free_at_start_ = context.available_bytes();
  runtime_ = std::make_unique<ModelRuntime>(context, mesh_, hf_.model, options_, memory_);
  uploader_ = std::make_unique<BatchUploader>(*runtime_);
  staging_ = std::make_unique<Staging>(*runtime_);
  if (config_.log.per_layer) parameter_norms_ = std::make_unique<ParameterNorms>(*runtime_, hf_.model);
  if (config_.faults.check_replicas > 0) replica_check_ = std::make_unique<ReplicaCheck>(*runtime_);
  if (config_.log.fp8_every_steps > 0 && options_.recipe.is_quantized() && !settings_.is_benchmark) {
    quant_monitor_ = std::make_unique<QuantMonitor>(*runtime_, hf_.model, config_.log.fp8_every_steps);
  }
  start_weights();
}

Trainer::~Trainer() = default;

void Trainer::load_data() {
  PrepareSettings settings;
  settings.sequence_length = config_.train.sequence_length;
  settings.vocab_size = hf_.model.vocab_size;
  settings.encoder = tokenizer_.encoder ? &*tokenizer_.encoder : nullptr;
  settings.fallback_cache_dir = folder_.path() / "cache";
  {
    ProgressDisplay display(is_first_);
    settings.progress = [&display](const PrepareProgress& progress) { display(progress); };
    data_ = prepare_data(config_.data, settings);
  }
  CHECK_USER(data_.train != nullptr, "[data] {}: there is nothing to train on; name a file or folder",
             config_.locate("data.train"));
  LoaderSettings loader;
  loader.micro_batch_size = batch_.micro_batch_size;
  loader.gradient_accumulation = batch_.gradient_accumulation_steps;
  loader.dp_rank = mesh_.data().rank();
  loader.dp_size = mesh_.data().size();
  loader.seed = static_cast<std::uint64_t>(config_.train.seed);
  loader.vocab_size = hf_.model.vocab_size;
  loader.skipped_steps = parse_step_ranges(config_.data.skip_steps);
  train_loader_ = std::make_unique<DataLoader>(data_.train, loader);
  if (data_.eval) {
    loader.shuffle = false;
    loader.gradient_accumulation = 1;
    loader.skipped_steps.clear();
    eval_loader_ = std::make_unique<DataLoader>(data_.eval, loader);
  }
  total_steps_ = total_steps(config_.train, batch_.global_batch_size, data_.train->epoch_rows());
  schedule_ = make_schedule(config_.optimizer, config_.schedule, total_steps_);
}

void Trainer::plan() {
  const std::int64_t max_documents =
      std::max(train_loader_->max_documents(), eval_loader_ ? eval_loader_->max_documents() : 1);
  options_ = runtime_options(config_, mesh_.shape(), max_documents);
  MemoryChoice choice =
      plan_memory(config_, hf_.model, mesh_.shape(), mesh_.world().rank(),
                  context_->capabilities(), memory_limits(config_.memory, mesh_, *context_), options_);
  memory_ = std::move(choice.memory);
  memory_reason_ = std::move(choice.reason);
}

void Trainer::report_plan() {
  const MeshShape& shape = mesh_.shape();
  log::info("model     {} {}  {} parameters  vocabulary {}", name_of(hf_.model.architecture),
            config_.model.path, format_count(static_cast<double>(parameter_count(hf_.model))),
            hf_.model.vocab_size);
  log::info("layout    {} ranks on {}: {}data {} x {}tensor {}{}, zero {}, compute {}",
            mesh_.world().size(), to_string(context_->device()),
            describe_pipeline(config_.parallel, shape), shape.data,
            shape.context > 1 ? fmt::format("context {} x ", shape.context) : "", shape.tensor,
            options_.sequence_parallel ? " with sequence parallelism" : "", options_.params.zero,
            config_.precision.compute);
  if (!config_.data.add_tokens.empty()) {
    log::info("tokens    {} of {} in data.add_tokens are new; vocabulary {}, the tokenizer has {} ids",
              tokenizer_.new_ids.size(), config_.data.add_tokens.size(), hf_.model.vocab_size,
              tokenizer_.encoder->vocab_size);
  }
  for (const std::string& line : data_.report) log::info("data      {}", line);
  for (const std::string& line : data_.train->describe_epoch(batch_.global_batch_size)) {
    log::info("data      {}", line);
  }
  for (const std::string& line : precision_report(config_, hf_.model, options_, shape.tensor)) {
    log::info("fp8       {}", line);
  }
  log::info("length    {} steps of {} x {} tokens ({:.2f} epochs)", total_steps_, batch_.global_batch_size,
            config_.train.sequence_length, train_loader_->epochs_after(total_steps_));
  std::string classes;
  for (int i = 0; i < kMemoryClasses; ++i) {
    const auto memory_class = static_cast<MemoryClass>(i);
    std::size_t bytes = memory_.plan.total(memory_class);
    if (memory_class == MemoryClass::kScratch) bytes += memory_.compute_scratch + memory_.communication_scratch;
    if (bytes == 0) continue;
    classes += fmt::format("{}{} {:.1f}", classes.empty() ? "" : ", ", name_of(memory_class),
                           static_cast<double>(bytes) / (1 << 20));
  }
  log::info("memory    {:.1f} MiB per rank ({}), recompute {}", static_cast<double>(memory_.total()) / (1 << 20),
            classes, describe_memory_choice(options_));
  if (memory_.host > 0) {
    log::info("memory    {:.1f} MiB per rank in host memory", static_cast<double>(memory_.host) / (1 << 20));
  }
  if (!memory_reason_.empty()) log::info("memory    {}", memory_reason_);
}

std::filesystem::path Trainer::checkpoint_folder() const {
  return config_.checkpoint.dir ? std::filesystem::path(*config_.checkpoint.dir) : folder_.checkpoints();
}

void Trainer::start_weights() {
  if (settings_.is_benchmark) {
    initialize_random(*runtime_, static_cast<std::uint64_t>(config_.train.seed));
    return;
  }
  std::optional<std::filesystem::path> from;
  if (settings_.resume == "auto") {
    std::string note;
    if (!settings_.overwrite) from = find_latest_checkpoint(checkpoint_folder(), &note);
    if (is_first_ && !note.empty()) log::warning("[resume] {}", note);
  } else if (settings_.resume != "never") {
    from = settings_.resume;
  }
  if (!from && !settings_.overwrite && is_first_) {
    CHECK_USER(!std::filesystem::exists(folder_.path() / "metrics.jsonl") || settings_.resume != "never",
               "[run] {} already holds a run; choose another run.dir, or start over with --overwrite",
               folder_.path().string());
  }
  // A checkpoint folder that is not to be continued must not be mistaken for this run's later.
  if (settings_.overwrite && is_first_) {
    folder_.clear();
    remove_all_saves(checkpoint_folder());
  }
  mesh_.world().barrier();

  if (from) {
    restore(*from);
  } else if (config_.model.from_checkpoint) {
    CheckpointReader reader(*config_.model.from_checkpoint);
    std::vector<NamedState> states = parameter_state(*runtime_);
    std::erase_if(states, [](const NamedState& state) { return !state.name.starts_with("weight/"); });
    for (NamedState& state : states) reader.read(state, runtime_->compute());
    refresh_weights(*runtime_);
  } else if (config_.model.init == "random") {
    initialize_random(*runtime_, static_cast<std::uint64_t>(config_.train.seed));
  } else {
    const auto notes = load_pretrained_weights(*runtime_, config_, tokenizer_, is_first_);
    if (is_first_) {
      for (const std::string& note : notes) log::info("{}", note);
    }
  }
  if (is_first_) {
    folder_.open(config_.log.tensorboard);
    folder_.write_config(write_run_config(config_));
    log::set_file((folder_.path() / "log.txt").string());
  }
  mesh_.world().barrier();
  CheckpointWriterOptions options;
  options.keep_last = static_cast<int>(config_.checkpoint.keep_last);
  options.keep_every = config_.checkpoint.keep_every.value_or(0);
  options.on_error = config_.checkpoint.on_error == "stop" ? OnSaveError::kStop : OnSaveError::kContinue;
  checkpoints_ = std::make_unique<CheckpointWriter>(checkpoint_folder(), mesh_.world(), runtime_->compute(), options);
  checkpoints_->check_space(parameter_state(*runtime_), runtime_->compute());
}

void Trainer::restore(const std::filesystem::path& checkpoint) {
  CheckpointReader reader(checkpoint);
  const Json saved = Json::parse(reader.metadata());
  const RunConfig saved_config = parse_run_config(saved.at("config").get<std::string>(),
                                                  (checkpoint / "config.yaml").string());
  CHECK_USER(
      saved_config.checkpoint.contents != "weights",
      "[resume] {} was saved with checkpoint.contents: weights, without the optimizer's state that "
      "going on needs; start a new run from it with model.from_checkpoint and another run.dir, or "
      "start over with --overwrite",
      checkpoint.string());
  start_step_ = saved.at("step").get<std::int64_t>();
  check_resumable(saved_config, config_, start_step_, settings_.allowed_changes);
  tokens_total_ = saved.at("tokens_total").get<std::int64_t>();
  skipped_steps_ = saved.at("skipped_steps").get<std::int64_t>();
  adam_step_ = saved.at("adam_step").get<std::int64_t>();
  best_eval_step_ = saved.at("best_eval_step").get<std::int64_t>();
  best_eval_loss_ = saved.at("best_eval_loss").get<double>();
  if (gemm_choices_) import_gemm_choices(*context_, saved.value("gemm_choices", ""));
  for (NamedState& state : parameter_state(*runtime_)) reader.read(state, runtime_->compute());
  refresh_weights(*runtime_);
  StepControl control;
  control.adam_step = adam_step_;
  runtime_->compute().copy_bytes(runtime_->control().data, &control, sizeof control);
  runtime_->compute().synchronize();
  if (is_first_) log::info("resume    {} at step {}", checkpoint.string(), start_step_);
}

std::string Trainer::metadata(std::int64_t step) const {
  Json json;
  json["step"] = step;
  json["config"] = write_run_config(config_);
  json["tokens_total"] = tokens_total_;
  json["skipped_steps"] = skipped_steps_;
  json["adam_step"] = adam_step_;
  json["best_eval_step"] = best_eval_step_;
  json["best_eval_loss"] = best_eval_loss_;
  // What `tessera export` needs beside the weights.
  json["model_config"] = format_hf_config(hf_.model, hf_.config_text);
  json["generation_config"] = hf_.generation_text;
  json["tokenizer"] = tokenizer_.source;
  json["add_tokens"] = config_.data.add_tokens;
  json["compute"] = config_.precision.compute;
  if (gemm_choices_) json["gemm_choices"] = export_gemm_choices(*context_);
  return json.dump();
}

void Trainer::run_step(std::int64_t step) {
  Stream& stream = runtime_->compute();
  ModelRuntime& runtime = *runtime_;
  Staging::Slot& slot = staging_->slot(step);
  stream.record(*staging_->started[step % Staging::kEvents]);
  runtime.params().begin_step();
  stream.set_zero(runtime.totals().data, runtime.totals().bytes());
  double target_tokens = 0;
  const std::int64_t count = train_loader_->used_micro_batches(step - 1);
  if (quant_monitor_) quant_monitor_->begin(step);
  rehearsal_.at_forward(step);
  runtime.run_micro_batches(static_cast<int>(count), [&](int i, const DeviceBatch& target) {
    const MicroBatch batch = train_loader_->load(step - 1, i);
    target_tokens += static_cast<double>(uploader_->upload(batch, target));
  });

  Staging::Scalars* scalars = &slot.scalars;
  scalars->denominator = target_tokens;
  scalars->control = StepControl{};
  scalars->control.step = step;
  scalars->control.learning_rate = static_cast<float>(schedule_.rate(step));
  scalars->control.max_grad_norm = static_cast<float>(config_.optimizer.max_grad_norm);
  scalars->control.rounding_key = derive_key(static_cast<std::uint64_t>(config_.train.seed),
                                             RandomPurpose::kStochasticRounding, static_cast<std::uint64_t>(step));
  stream.copy_bytes(runtime.totals().flat_slice(1, 1).data, &scalars->denominator, sizeof(double));
  stream.copy_bytes(runtime.control().data, &scalars->control, StepControl::kHostBytes);
  if (quant_monitor_) quant_monitor_->finish(step);
  runtime.sum_totals();
  runtime.sync().finish_gradients();
  if (parameter_norms_ && is_logged(step)) parameter_norms_->enqueue(step);
  if (checkpoints_) checkpoints_->before_update(stream);
  optimizer_step(runtime, adamw_settings(config_.optimizer));

  Staging::Results* results = &slot.results;
  stream.copy_bytes(results->totals, runtime.totals().data, sizeof results->totals);
  stream.copy_bytes(&results->control, runtime.control().data, sizeof results->control);
  if (config_.checkpoint.every_minutes) {
    // Only rank 0's clock counts; the ranks learn of it with the step's results.
    const double minutes = seconds_between(last_save_, Clock::now()) / 60;
    slot.wants_save = is_first_ && minutes >= *config_.checkpoint.every_minutes ? 1 : 0;
    const Tensor flag{staging_->wants_save.data(), DType::kI32, Shape{1}, context_->device()};
    stream.copy_bytes(flag.data, &slot.wants_save, sizeof slot.wants_save);
    mesh_.world().all_reduce(flag, ReduceOp::kMax, stream);
    stream.copy_bytes(&slot.wants_save, flag.data, sizeof slot.wants_save);
  }
  stream.record(*staging_->finished[step % Staging::kEvents]);
  enqueued_step_ = step;
}

void Trainer::collect(std::int64_t step) {
  if (step <= collected_step_ || step > enqueued_step_) return;
  staging_->finished[step % Staging::kEvents]->synchronize();
  collected_step_ = step;
  if (gemm_choices_ && step == start_step_ + 1) gemm_choices_->save();
  const Staging::Results results = staging_->slot(step).results;
  adam_step_ = results.control.adam_step;
  if (config_.checkpoint.every_minutes && staging_->slot(step).wants_save != 0) save_due_step_ = step;

  // From the end of the step before, unless an evaluation or a save stood between the two.
  Event& finished = *staging_->finished[step % Staging::kEvents];
  const Event& begin = step == first_timed_step_ ? *staging_->started[step % Staging::kEvents]
                                                 : *staging_->finished[(step - 1) % Staging::kEvents];
  const double seconds = finished.milliseconds_since(begin) / 1e3;
  const auto tokens = static_cast<std::int64_t>(results.totals[1]);
  tokens_total_ += tokens;
  const bool applied = results.control.is_finite != 0 && results.control.has_targets != 0;
  if (!applied) ++skipped_steps_;

  TrainRow row;
  row.step = step;
  row.epoch = train_loader_->epochs_after(step);
  row.loss = tokens > 0 ? results.totals[0] / results.totals[1] : std::nan("");
  row.grad_norm = results.control.grad_norm;
  row.learning_rate = schedule_.rate(step);
  row.target_tokens = tokens;
  row.tokens_total = tokens_total_;
  row.step_seconds = seconds;
  const auto work = static_cast<double>(batch_.global_batch_size * config_.train.sequence_length);
  row.tokens_per_second = work / seconds;
  row.tokens_per_second_per_gpu = row.tokens_per_second / mesh_.world().size();
  const double peak = context_->capabilities().peak_bf16_flops;
  if (peak > 0) {
    row.mfu = row.tokens_per_second_per_gpu * flops_per_token(hf_.model, config_.train.sequence_length) / peak;
  }
  row.skipped = !applied;
  if (settings_.is_benchmark) {
    measured_.push_back(row);
    return;
  }
  if (is_first_) {
    if (is_logged(step)) {
      row.memory_peak_bytes = memory_in_use();
      if (parameter_norms_) row.parameter_norms = parameter_norms_->read(step, results.totals[1]);
      folder_.write(row);
    }
    progress_->show(row);
    if (quant_monitor_ && quant_monitor_->is_due(step)) report_quant_losses(step);
    if (results.control.has_targets == 0) {
      progress_->say(fmt::format("step {} has no target token on any rank: no update was made", step));
      folder_.write_event("no_targets", step, "no target token; no update");
    }
  }
  if (results.control.has_targets != 0 && results.control.is_finite == 0) {
    const std::string text = fmt::format("loss {} and gradient norm {} are not finite", row.loss, row.grad_norm);
    if (is_first_) folder_.write_event("not_finite", step, text);
    if (config_.faults.nan == "stop") {
      TESSERA_FAIL(ErrorKind::kInternal,
                   "[train] step {}: {}; no update was made. Lower optimizer.learning_rate, look at the step's "
                   "data with `tessera inspect data`, or go on past it with faults.nan: skip",
                   step, text);
    }
    if (is_first_) progress_->say(fmt::format("step {}: {}: no update was made", step, text));
  }
}

void Trainer::report_quant_losses(std::int64_t step) {
  // Shares that a healthy layer does not come near (docs/precision.md).
  constexpr double kMuch = 0.1;
  const std::vector<QuantLosses> losses = quant_monitor_->read(step);
  folder_.write(step, losses);
  for (const QuantLosses& layer : losses) {
    const bool is_gradient = layer.gradient > layer.input;
    const double share = is_gradient ? layer.gradient : layer.input;
    if (share < kMuch || !reported_layers_.insert(layer.layer).second) continue;
    const std::string text =
        fmt::format("FP8 makes {:.0f}% of the {} of {} zero; if the loss suffers, list \"{}\" in precision.keep_bf16",
                    100 * share, is_gradient ? "gradient" : "input", layer.layer, layer.layer);
    progress_->say(fmt::format("step {}: {}", step, text));
    folder_.write_event("fp8_losses", step, text);
  }
}

bool Trainer::is_logged(std::int64_t step) const {
  return step % config_.log.every_steps == 0 || step == total_steps_;
}

std::uint64_t Trainer::memory_in_use() const {
  const std::size_t now = context_->available_bytes();
  return free_at_start_ > now && now > 0 ? free_at_start_ - now : memory_.total();
}

bool Trainer::evaluate_at(std::int64_t step) {
  const EvaluationResult result = evaluate(*runtime_, *uploader_, *eval_loader_, config_.eval.max_batches);
  EvalRow row;
  row.step = step;
  row.loss = result.loss();
  row.target_tokens = result.target_tokens;
  row.source = data_.eval->sources().size() == 1 ? data_.eval->sources()[0].name : "all";
  if (is_first_) {
    folder_.write(row);
    progress_->show(row);
  }
  // All ranks have the same loss; that they save together must not hang on its last bit.
  const std::string loss = control_->broadcast("evaluation loss", fmt::format("{:a}", row.loss), 0,
                                               parse_duration(config_.faults.collective_timeout).value());
  const double agreed = std::strtod(loss.c_str(), nullptr);
  const bool is_best = best_eval_step_ == 0 ? std::isfinite(agreed) : agreed < best_eval_loss_;
  if (is_best) {
    best_eval_loss_ = agreed;
    best_eval_step_ = step;
  }
  return is_best;
}

void Trainer::save(std::int64_t step) {
  std::vector<NamedState> states = parameter_state(*runtime_);
  if (config_.checkpoint.contents == "weights") {
    std::erase_if(states, [](const NamedState& state) { return !state.name.starts_with("weight/"); });
  }
  if (config_.eval.keep_best && best_eval_step_ > 0) checkpoints_->set_kept_steps({best_eval_step_});
  checkpoints_->save(step, states, metadata(step), runtime_->compute());
  for (const SaveOutcome& outcome : checkpoints_->take_outcomes()) {
    if (!is_first_) continue;
    if (outcome.is_saved) {
      progress_->say(fmt::format("step {}  checkpoint saved ({:.1f} MB in {:.1f} s)", outcome.step,
                                 static_cast<double>(outcome.bytes) / 1e6, outcome.seconds));
      folder_.write_event("checkpoint", outcome.step, "saved");
    } else {
      progress_->say(fmt::format("step {}  the checkpoint could not be saved: {}", outcome.step, outcome.error));
      folder_.write_event("checkpoint_failed", outcome.step, outcome.error);
    }
  }
  last_save_ = Clock::now();
}

void Trainer::write_model(const std::filesystem::path& folder) {
  ExportSettings settings;
  settings.folder = folder;
  settings.dtype = options_.params.compute;
  settings.source = &hf_;
  settings.tokenizer = tokenizer_.tokenizer.get();
  export_model(*runtime_, settings);
}

void Trainer::finish(std::int64_t step) {
  write_model(folder_.final_model());
  if (is_first_) {
    progress_->say(fmt::format("final model in {}", folder_.final_model().string()));
    folder_.write_event("done", step, "final model written");
  }
}

bool Trainer::stops_at(std::int64_t step) {
  if (is_first_ && config_.run.time_limit &&
      seconds_between(run_start_, Clock::now()) > parse_duration(*config_.run.time_limit).value()) {
    control_->request_stop("run.time_limit " + *config_.run.time_limit + " has passed");
  }
  const std::optional<StopDecision> decision = control_->agreed_stop(step);
  if (decision) stop_reason_ = decision->reason;
  return decision.has_value();
}

std::vector<TrainRow> Trainer::run_steps(std::int64_t count) {
  CHECK(settings_.is_benchmark, "[train] run_steps is for benchmarks");
  const std::int64_t last = enqueued_step_ + count;
  first_timed_step_ = enqueued_step_ + 1;
  while (enqueued_step_ < last) {
    run_step(enqueued_step_ + 1);
    collect(enqueued_step_ - 1);
  }
  collect(last);
  return std::exchange(measured_, {});
}

int Trainer::run() {
  if (settings_.dry_run) return 0;
  progress_ = std::make_unique<Progress>(start_step_ + 1, total_steps_, is_first_);
  if (start_step_ >= total_steps_) {
    if (is_first_) progress_->say(fmt::format("the run is complete: {} of {} steps", start_step_, total_steps_));
    if (!std::filesystem::exists(folder_.final_model() / "config.json")) finish(start_step_);
    return 0;
  }
  if (config_.eval.at_start && eval_loader_ && start_step_ == 0) evaluate_at(0);
  first_timed_step_ = start_step_ + 1;
  collected_step_ = enqueued_step_ = start_step_;
  std::int64_t step = start_step_;
  std::int64_t saved_step = start_step_;
  while (step < total_steps_ && !stops_at(step)) {
    run_step(++step);
    const bool evaluates = eval_loader_ && config_.eval.every_steps && step % *config_.eval.every_steps == 0;
    const bool exports = config_.checkpoint.exports.every_steps &&
                         step % *config_.checkpoint.exports.every_steps == 0;
    collect(step - 1);
    bool saves = (config_.checkpoint.every_steps && step % *config_.checkpoint.every_steps == 0) ||
                 save_due_step_ > saved_step;
    const bool checks = replica_check_ && step % config_.faults.check_replicas == 0;
    if (!evaluates && !saves && !exports && !checks && step < total_steps_) continue;
    collect(step);
    if (checks) replica_check_->check(step);  // before a save could keep what is wrong
    if (evaluates || (eval_loader_ && step == total_steps_)) {
      const bool is_best = evaluate_at(step);
      saves = saves || (is_best && config_.eval.keep_best);
    }
    if (saves) {
      save(step);
      saved_step = step;
    }
    if (exports) write_model(folder_.exports() / fmt::format("step-{:06}", step));
    first_timed_step_ = step + 1;
  }
  collect(step);
  if (saved_step != step) save(step);
  checkpoints_->finish(runtime_->compute());
  if (step < total_steps_) {
    if (is_first_) {
      progress_->say(fmt::format("stopped after step {} of {} ({}); the same command goes on from here", step,
                                 total_steps_, stop_reason_));
      folder_.write_event("stopped", step, stop_reason_);
    }
    return 75;
  }
  finish(step);
  return 0;
}

}  // namespace tessera
