#include "engine/train/layout_search.h"

#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "engine/core/error.h"
#include "engine/plan/step_work.h"
#include "engine/train/memory_choice.h"
#include "engine/train/run_setup.h"
#include "models/hf/names.h"

namespace tessera {
namespace {

// Share of a message's time that the products around it do not hide: sequence parallelism sends pieces behind them
// (parallel/overlap.h), without it sums stand alone.
constexpr double kExposedWithPieces = 0.4;
constexpr double kExposedContext = 0.5;
// Matrix products of rows or columns cut thin run below the rate of whole ones.
constexpr double kThinPiece = 1024;
// Memory-bound passes are held to this share of the copy rate.
constexpr double kPassShare = 0.85;
// Layouts whose exact memory is planned before one gives up.
constexpr int kMostPlans = 24;

struct Candidate {
  RunConfig config;
  MeshShape mesh;
  RuntimeOptions runtime;
  SuggestedLayout layout;
  int busiest_stage = 0;
};

std::vector<std::int64_t> powers_up_to(std::int64_t most) {
  std::vector<std::int64_t> result;
  for (std::int64_t value = 1; value <= most; value *= 2) result.push_back(value);
  return result;
}

// The configuration under one layout; nothing where it is not possible.
std::optional<Candidate> make_candidate(const RunConfig& config, const ModelConfig& model, const Cluster& cluster,
                                        std::int64_t global_batch, std::int64_t tensor, std::int64_t pipeline,
                                        std::int64_t context, std::int64_t zero, std::int64_t micro_batch) {
  const std::int64_t model_ranks = tensor * pipeline * context;
  if (cluster.ranks % model_ranks != 0) return std::nullopt;
  const std::int64_t data = cluster.ranks / model_ranks;
  if (global_batch % (data * micro_batch) != 0) return std::nullopt;
  if (data * context == 1 ? zero != 0 : zero == 0) return std::nullopt;
  if (pipeline > 1 && global_batch / (data * micro_batch) < pipeline) return std::nullopt;  // mostly idle
  Candidate candidate;
  candidate.config = config;
  RunConfig& c = candidate.config;
  c.parallel.tensor = tensor;
  c.parallel.pipeline = pipeline;
  c.parallel.context = context;
  c.parallel.zero = zero;
  c.parallel.sequence_parallel.reset();
  c.run.ranks = cluster.ranks;
  c.train.global_batch_size = global_batch;
  c.train.micro_batch_size = micro_batch;
  c.train.gradient_accumulation_steps.reset();
  c.memory.recompute = "auto";
  try {
    resolve(c, cluster.ranks, true);
    candidate.mesh = mesh_shape(c, cluster.ranks, cluster.gpus_per_node);
    candidate.runtime = runtime_options(c, candidate.mesh, guessed_documents(c));
    // Cuts that the model does not allow are found by building it.
    const Transformer whole(model, static_cast<int>(tensor), candidate.runtime.sequence_parallel);
    stage_pieces(model, static_cast<int>(pipeline), candidate.runtime.pipeline.chunks, 0,
                 candidate.runtime.geometry.max_length);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUser) throw;
    return std::nullopt;
  }
  SuggestedLayout& layout = candidate.layout;
  layout.mesh = candidate.mesh;
  layout.zero = static_cast<int>(zero);
  layout.sequence_parallel = candidate.runtime.sequence_parallel;
  layout.micro_batch_size = micro_batch;
  layout.micro_batches = global_batch / (data * micro_batch);
  layout.tokens = static_cast<double>(global_batch * config.train.sequence_length);
  return candidate;
}

double positive(double value) { return std::max(0.0, value); }

void estimate(Candidate& candidate, const ModelConfig& model, const Cluster& cluster) {
  SuggestedLayout& layout = candidate.layout;
  const MeshShape& mesh = candidate.mesh;
  const GpuModel& gpu = cluster.gpu;
  const std::int64_t times = layout.micro_batches;
  // All wait for the busiest stage.
  StepWork work;
  double most = -1;
  for (int stage = 0; stage < mesh.pipeline; ++stage) {
    StepWork own = step_work(model, mesh, candidate.runtime, times, stage);
    const double flops = own.product_flops(false) + own.product_flops(true);
    if (flops <= most) continue;
    most = flops;
    work = std::move(own);
    candidate.busiest_stage = stage;
  }
  const double thin = static_cast<double>(candidate.runtime.geometry.tokens) / kThinPiece;
  const double efficiency = std::min(1.0, 0.6 + 0.4 * std::min(1.0, thin));
  layout.products = (work.product_flops(false) / gpu.sustained_bf16_flops +
                     work.product_flops(true) / gpu.sustained_fp8_flops) / efficiency;
  layout.attention_and_passes =
      (work.attention_forward_flops + work.attention_backward_flops) / gpu.sustained_attention_flops +
      (work.pass_bytes() + work.optimizer_bytes) / (kPassShare * gpu.copy_bytes_per_second);
  const double computing = layout.products + layout.attention_and_passes;

  const Traffic traffic = step_traffic(model, mesh, candidate.runtime, times);
  const auto rate = [&](std::int64_t group_span) {
    return group_span <= cluster.gpus_per_node ? gpu.link_bytes_per_second : cluster.network_bytes_per_second;
  };
  const std::int64_t tensor_span = mesh.tensor;
  const std::int64_t context_span = tensor_span * mesh.context;
  const std::int64_t data_span = context_span * mesh.data;
  layout.tensor = traffic.tensor_bytes / rate(tensor_span) * (layout.sequence_parallel ? kExposedWithPieces : 1.0);
  layout.context = traffic.context_bytes / rate(context_span) * kExposedContext;
  // Gradients go behind the backward of the last micro-batch (ZeRO 2, 3: of each), gathers one bucket ahead: hidden
  // as long as they are faster than what they stand behind.
  const double data = traffic.data_bytes / rate(data_span);
  const double behind = layout.zero >= 2 ? computing : computing / static_cast<double>(times);
  layout.data = positive(data - 0.9 * behind);
  const double units = static_cast<double>(times * candidate.runtime.pipeline.chunks);
  layout.bubble = (computing + layout.tensor + layout.context) * (mesh.pipeline - 1) / units;
}

// The exact plan of the stages that may need most: the first keeps the most micro-batches, the last has the logits,
// the busiest the most blocks.
bool fits(Candidate& candidate, const ModelConfig& model, const Cluster& cluster) {
  bool all = true;
  candidate.layout.memory = 0;
  for (const int stage : {0, candidate.busiest_stage, candidate.mesh.pipeline - 1}) {
    MeshCoordinate coordinate;
    coordinate.pipeline = stage;
    const int rank = rank_of(candidate.mesh, coordinate);
    RuntimeOptions runtime = candidate.runtime;
    MemoryLimits limits;
    limits.device = cluster.gpu.usable_bytes;
    MemoryChoice choice;
    try {
      choice = plan_memory(candidate.config, model, candidate.mesh, rank, cluster.gpu.capabilities, limits, runtime);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kAnswerNo) throw;
      all = false;
      choice = plan_least_memory(candidate.config, model, candidate.mesh, rank, cluster.gpu.capabilities, runtime);
    }
    const std::size_t bytes = choice.memory.total() + cluster.gpu.reserved_bytes;
    if (bytes < candidate.layout.memory) continue;
    candidate.layout.memory = bytes;
    candidate.layout.recompute = describe_memory_choice(runtime);
    candidate.runtime.recompute = runtime.recompute;
  }
  return all;
}

// A first guess, so that few layouts need an exact plan: states, and block inputs under full recompute.
double least_bytes(const Candidate& candidate, const ModelConfig& model) {
  const ParamStoreOptions& p = candidate.runtime.params;
  const MeshShape& mesh = candidate.mesh;
  const double parameters =
      static_cast<double>(parameter_count(model)) / static_cast<double>(mesh.tensor * mesh.pipeline);
  const double shards = p.zero > 0 ? mesh.shard_size() : 1;
  const double states = (p.fp32_masters ? 4 : 0) + 2 * static_cast<double>(size_of(p.moments));
  const double gradients = static_cast<double>(size_of(p.gradients)) / (p.zero >= 2 ? shards : 1);
  const double weights = static_cast<double>(size_of(p.compute)) / (p.zero >= 3 ? shards : 1);
  const double inputs = static_cast<double>(candidate.runtime.geometry.local_tokens * model.hidden_size *
                                            model.num_hidden_layers) * 2 / mesh.pipeline *
                        std::min<double>(mesh.pipeline, static_cast<double>(candidate.layout.micro_batches));
  return parameters * (weights + gradients + states / shards) + inputs;
}

}  // namespace

std::vector<std::string> SuggestedLayout::overrides() const {
  std::vector<std::string> result;
  const auto add = [&](const char* key, std::int64_t value) { result.push_back(fmt::format("{}={}", key, value)); };
  add("parallel.tensor", mesh.tensor);
  add("parallel.pipeline", mesh.pipeline);
  add("parallel.context", mesh.context);
  add("parallel.zero", zero);
  add("train.micro_batch_size", micro_batch_size);
  return result;
}

LayoutSearch search_layouts(const RunConfig& config, const ModelConfig& model, const Cluster& cluster, int wanted) {
  CHECK_USER(cluster.gpu.sustained_bf16_flops > 0, "[plan] --suggest needs a GPU whose rates are known, not --gpu {}",
             cluster.gpu.name);
  RunConfig base = config;
  resolve(base, cluster.ranks, true);
  const std::int64_t global_batch =
      batch_shape(base, mesh_shape(base, cluster.ranks, cluster.gpus_per_node).data).global_batch_size;
  LayoutSearch search;
  std::vector<Candidate> candidates;
  for (const std::int64_t tensor : powers_up_to(std::min(cluster.gpus_per_node, model.num_attention_heads))) {
    for (const std::int64_t pipeline : powers_up_to(std::min<std::int64_t>(32, model.num_hidden_layers))) {
      for (const std::int64_t context : powers_up_to(std::max<std::int64_t>(1, config.train.sequence_length / 8192))) {
        for (const std::int64_t zero : {0, 1, 3}) {
          for (const std::int64_t micro_batch : {1, 2, 4}) {
            auto candidate = make_candidate(config, model, cluster, global_batch, tensor, pipeline, context, zero, micro_batch);
            if (!candidate) continue;
            ++search.considered;
            candidates.push_back(std::move(*candidate));
          }
        }
      }
    }
  }
  CHECK_USER(!candidates.empty(),
             "[plan] no layout cuts a global batch of {} rows over {} ranks; choose train.global_batch_size as a "
             "multiple of a power of two",
             global_batch, cluster.ranks);
  for (Candidate& candidate : candidates) estimate(candidate, model, cluster);
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.layout.seconds() < b.layout.seconds();
  });
  const auto usable = static_cast<double>(cluster.gpu.usable_bytes);
  int plans = 0;
  for (Candidate& candidate : candidates) {
    if (plans == kMostPlans) break;
    if (least_bytes(candidate, model) > usable) continue;
    ++plans;
    if (!fits(candidate, model, cluster)) continue;
    estimate(candidate, model, cluster);  // with the recompute that it takes
    search.best.push_back(candidate.layout);
    // Two more than wanted: a recompute may change the order.
    if (static_cast<int>(search.best.size()) == wanted + 2) break;
  }
  std::sort(search.best.begin(), search.best.end(),
            [](const SuggestedLayout& a, const SuggestedLayout& b) { return a.seconds() < b.seconds(); });
  if (static_cast<int>(search.best.size()) > wanted) search.best.resize(static_cast<std::size_t>(wanted));
  if (search.best.empty()) {
    Candidate& smallest = *std::min_element(candidates.begin(), candidates.end(), [&](const auto& a, const auto& b) {
      return least_bytes(a, model) < least_bytes(b, model);
    });
    if (fits(smallest, model, cluster)) {
      estimate(smallest, model, cluster);
      search.best.push_back(smallest.layout);
    }
    search.smallest = smallest.layout;
  }
  return search;
}

}  // namespace tessera
