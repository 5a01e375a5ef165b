#include "tools/bench/step_bench.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include <fmt/format.h>

#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/device/kernel_trace.h"
#include "engine/train/trainer.h"
#include "models/block.h"
#include "models/hf/names.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Share of the copy rate that memory-bound passes are held to.
constexpr double kPassShare = 0.85;
constexpr std::int64_t kSquareSize = 1536;
// The kernel that runs once in each step of a rank, for cutting a trace into steps.
constexpr std::string_view kStepMarker = "step_control_finish";

struct Work {
  const char* name;
  int micro_batch, accumulation;
};
constexpr Work kWorks[] = {{"1b", 4, 4}, {"8b", 2, 8}};

// configs/models/NAME.json below the current folder or beside the program's tree.
std::string find_model_file(const std::string& name) {
  std::error_code ignored;
  const fs::path file = fs::path("configs") / "models" / (name + ".json");
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  for (const fs::path& root :
       {fs::path(), program / ".." / "..", program / ".." / "share" / "tessera"}) {
    if (fs::exists(root / file, ignored)) return (root / file).lexically_normal().string();
  }
  TESSERA_FAIL(
      ErrorKind::kUser,
      "[bench] {} is not below the current folder; start from the project's folder, or give "
      "a configuration file",
      file.string());
}

std::string work_config(const Work& work) {
  return fmt::format(
      "model: {{path: \"{}\", init: random}}\n"
      "train: {{sequence_length: 4096, micro_batch_size: {}, gradient_accumulation_steps: {}, max_steps: 1}}\n"
      "optimizer: {{learning_rate: 1e-4}}\n"
      "precision: {{compute: bf16, master_weights: none, optimizer_states: bf16, gradients: "
      "bf16}}\n",
      find_model_file(work.name), work.micro_batch, work.accumulation);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return n == 0 ? 0 : n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

// The traced steps between the first and the last marker.
void read_trace(const std::vector<KernelRecord>& records, int device, StepModeResult& mode) {
  std::vector<ActivitySpan> spans;
  std::vector<std::uint64_t> markers;
  int marker_stream = -1;  // of the first rank, where several share the device
  for (const KernelRecord& record : records) {
    if (record.device != device) continue;
    spans.push_back({classify_kernel(record.name), record.begin_ns, record.end_ns});
    if (record.name.find(kStepMarker) == std::string::npos) continue;
    if (marker_stream < 0) marker_stream = record.stream;
    if (record.stream == marker_stream) markers.push_back(record.begin_ns);
  }
  if (markers.size() < 2) {
    mode.trace_problem = fmt::format("the trace holds {} kernels and no whole step", spans.size());
    return;
  }
  mode.traced_steps = static_cast<int>(markers.size()) - 1;
  mode.breakdown = break_down(spans, markers.front(), markers.back());
}

void trace_steps(Trainer& trainer, int steps, bool traces, int device, StepModeResult& mode) {
  if (steps == 0) {
    mode.trace_problem = "no steps were to be traced";
    return;
  }
  const auto trace = traces ? KernelTrace::start(mode.trace_problem) : nullptr;
  // One more: steps are counted from marker to marker.
  trainer.run_steps(steps + 1);
  if (trace) read_trace(trace->stop(), device, mode);
}

void measure_rates(const StepBenchOptions& options, const RunConfig& config,
                   const ModelConfig& model, const MeshShape& mesh, const RuntimeOptions& runtime,
                   BackendContext& context, StepBenchResult& result) {
  const std::int64_t micro_batches = batch_shape(config, mesh.data).gradient_accumulation_steps;
  const bool on_gpu = context.device().kind == DeviceKind::kCuda;
  result.products =
      soak_products(context, result.per_rank, runtime, micro_batches, false, options.soak_seconds);
  result.products_fp8 =
      soak_products(context, result.per_rank, runtime, micro_batches, true, options.soak_seconds);
  const QkvLayout layout = local_qkv_layout(model, mesh.tensor);
  AttentionShape shape;
  shape.heads_q = layout.heads_q;
  shape.heads_kv = layout.heads_kv;
  shape.head_dim = layout.head_dim;
  shape.window = model.sliding_window(0);
  shape.max_length = runtime.geometry.max_length;
  shape.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(layout.head_dim)));
  const std::int64_t rows = std::max<std::int64_t>(1, runtime.geometry.tokens / shape.max_length);
  result.attention = soak_attention(context, shape, runtime.params.compute, rows,
                                    runtime.deterministic, options.soak_seconds);
  result.copy_rate = copy_rate(context);
  if (!on_gpu) {
    result.sgemm_rate = square_product_rate(context, kSquareSize, options.soak_seconds / 3);
  }
}

StepModeResult measure_mode(Trainer& trainer, const StepBenchOptions& options, bool reproducible,
                            bool is_first, int device) {
  StepModeResult mode;
  mode.reproducible = reproducible;
  trainer.run_steps(options.warmup_steps);
  const auto monitor = is_first ? GpuMonitor::start(device) : nullptr;
  const std::vector<TrainRow> rows = trainer.run_steps(options.steps);
  if (monitor) mode.condition = monitor->stop();
  std::vector<double> seconds;
  for (const TrainRow& row : rows) {
    seconds.push_back(row.step_seconds);
    if (row.skipped) ++mode.skipped_steps;
  }
  mode.step_seconds = median(seconds);
  mode.fastest_seconds = *std::min_element(seconds.begin(), seconds.end());
  mode.slowest_seconds = *std::max_element(seconds.begin(), seconds.end());
  mode.tokens_per_second =
      rows.front().tokens_per_second * rows.front().step_seconds / mode.step_seconds;
  mode.planned_bytes = trainer.planned_memory().total();
  mode.used_bytes = trainer.memory_in_use();
  trace_steps(trainer, options.traced_steps, is_first, device, mode);
  return mode;
}

}  // namespace

RunConfig step_bench_config(const std::string& work, const std::vector<std::string>& overrides,
                            const StepBenchOptions& options, std::vector<std::string>* notes) {
  // Data is replaced below; a configuration without any is welcome here.
  std::vector<std::string> all = {"data.train=[\"synthetic:1x1\"]", "data.eval=[]"};
  all.insert(all.end(), overrides.begin(), overrides.end());
  const auto known = std::find_if(std::begin(kWorks), std::end(kWorks),
                                  [&](const Work& w) { return work == w.name; });
  std::error_code ignored;
  CHECK_USER(known != std::end(kWorks) || fs::exists(work, ignored),
             "[bench] {} is neither 1b nor 8b nor a configuration file", work);
  RunConfig config = known != std::end(kWorks)
                         ? parse_run_config(work_config(*known), work, all, notes)
                         : load_run_config(work, all, notes);
  config.run.dir = (fs::temp_directory_path() / fmt::format("tessera-bench-{}", getpid())).string();
  config.model.init = "random";
  config.model.from_checkpoint.reset();
  config.data = DataOptions{};
  DataSource source;
  source.path = fmt::format("synthetic:256x{}", config.train.sequence_length);
  config.data.train.push_back(source);
  config.data.packing = false;
  config.data.tokenizer = "bytes";
  config.eval = EvalOptions{};
  config.train.epochs.reset();
  config.train.max_tokens.reset();
  config.train.max_steps = options.warmup_steps + options.steps + options.traced_steps + 1;
  config.schedule = ScheduleOptions{};
  config.schedule.name = "constant";
  return config;
}

double StepBenchResult::bound_seconds() const {
  if (copy_rate == 0) return 0;
  const auto time = [](double work, double rate) { return rate > 0 ? work / rate : 0; };
  return time(per_rank.product_flops(false), products.soaked) +
         time(per_rank.product_flops(true), products_fp8.soaked) +
         time(per_rank.attention_forward_flops, attention.forward.soaked) +
         time(per_rank.attention_backward_flops, attention.backward.soaked) +
         (per_rank.pass_bytes() + per_rank.optimizer_bytes) / (kPassShare * copy_rate);
}

StepBenchResult run_step_bench(const RunConfig& given, const std::string& work,
                               const StepBenchOptions& options, RankContext& rank,
                               BackendContext& context) {
  const bool is_first = rank.rank == 0;
  const bool on_gpu = context.device().kind == DeviceKind::kCuda;
  StepBenchResult result;
  result.work = work;
  result.device = to_string(context.device());
  result.ranks = rank.world_size;
  result.peak_flops = context.capabilities().peak_bf16_flops;
  std::vector<bool> modes = {given.run.reproducible};
  if (options.both_modes) modes.push_back(!given.run.reproducible);
  ModelConfig model;
  MeshShape mesh;
  RuntimeOptions runtime;
  RunConfig config = given;
  resolve(config, rank.world_size, on_gpu);
  for (std::size_t i = 0; i < modes.size(); ++i) {
    config.run.reproducible = modes[i];
    TrainSettings settings;
    settings.resume = "never";
    settings.is_benchmark = true;
    Trainer trainer(config, settings, rank.world->split(0, rank.rank, "world"), context,
                    rank.control);
    if (i == 0) {
      model = trainer.model();
      mesh = trainer.mesh().shape();
      runtime = trainer.options();
    }
    result.modes.push_back(
        measure_mode(trainer, options, modes[i], is_first, context.device().index));
  }
  const BatchShape batch = batch_shape(config, mesh.data);
  static constexpr const char* kRecompute[] = {"none", "selective", "full"};
  result.layout = fmt::format(
      "{} rank{}: {}data {} x {}tensor {}{}, zero {}, recompute {}; {} rows of {} tokens x {}",
      rank.world_size, rank.world_size == 1 ? "" : "s",
      mesh.pipeline > 1 ? fmt::format("pipeline {} x ", mesh.pipeline) : "", mesh.data,
      mesh.context > 1 ? fmt::format("context {} x ", mesh.context) : "", mesh.tensor,
      runtime.sequence_parallel ? " with sequence parallelism" : "", runtime.params.zero,
      kRecompute[static_cast<int>(runtime.recompute)], batch.micro_batch_size,
      config.train.sequence_length, batch.gradient_accumulation_steps);
  result.compute = config.precision.fp8 == "none"
                       ? config.precision.compute
                       : config.precision.compute + ", fp8 " + config.precision.fp8;
  result.parameters = parameter_count(model);
  result.tokens = batch.global_batch_size * config.train.sequence_length;
  result.model_flops =
      static_cast<double>(result.tokens) * flops_per_token(model, config.train.sequence_length);
  result.per_rank = step_work(model, mesh, runtime, batch.gradient_accumulation_steps, 0);
  if (is_first && options.soak_seconds > 0) {
    measure_rates(options, config, model, mesh, runtime, context, result);
  }
  // The others wait here, without work on their devices.
  rank.control.broadcast("bench rates", "measured", 0, 600 + 10 * options.soak_seconds);
  return result;
}

}  // namespace tessera
