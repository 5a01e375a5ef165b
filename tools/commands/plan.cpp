// tessera plan: what a run would need, by class and rank; needs no GPU and no data.
#include <algorithm>
#include <cstdio>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/plan/gpu_model.h"
#include "engine/plan/traffic.h"
#include "engine/train/layout_search.h"
#include "engine/train/memory_choice.h"
#include "engine/train/precision.h"
#include "engine/train/run_setup.h"
#include "models/hf/names.h"
#include "tools/commands/command.h"

namespace tessera {
namespace {

struct Options {
  std::string config;
  std::vector<std::string> overrides;
  std::string gpu = "h100-sxm";
  std::int64_t gpus_per_node = 8;
  std::int64_t nodes = 1;
  std::int64_t max_documents = 0;
  bool json = false;
  bool suggests = false;
  double network_gbps = 400;
};

double gib(double bytes) { return bytes / (1 << 30); }

// The memory of a rank of one pipeline stage; those of a stage are alike.
struct StagePlan {
  std::string layers;
  RuntimeMemory memory;
  std::string choice;  // of recompute and offload
  std::string reason;  // why, where it was left open
  Recompute recompute = Recompute::kNone;
  bool fits = true;
};

std::vector<StagePlan> plan_stages(const RunConfig& config, const ModelConfig& model,
                                   const MeshShape& mesh, const GpuModel& gpu,
                                   const RuntimeOptions& wanted) {
  std::vector<StagePlan> stages;
  for (int stage = 0; stage < mesh.pipeline; ++stage) {
    MeshCoordinate coordinate;
    coordinate.pipeline = stage;
    const int rank = rank_of(mesh, coordinate);
    RuntimeOptions runtime = wanted;
    StagePlan plan;
    for (const StagePiece& piece : stage_pieces(model, mesh.pipeline, runtime.pipeline.chunks,
                                                stage, runtime.geometry.max_length)) {
      plan.layers += fmt::format("{}{}-{}", plan.layers.empty() ? "" : ", ", piece.first_layer,
                                 piece.first_layer + piece.num_layers - 1);
    }
    MemoryChoice choice;
    try {
      MemoryLimits limits;
      limits.device = gpu.usable_bytes;
      choice = plan_memory(config, model, mesh, rank, gpu.capabilities, limits, runtime);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kAnswerNo) throw;
      plan.fits = false;
      choice = plan_least_memory(config, model, mesh, rank, gpu.capabilities, runtime);
    }
    plan.memory = std::move(choice.memory);
    plan.reason = std::move(choice.reason);
    plan.choice = describe_memory_choice(runtime);
    plan.recompute = runtime.recompute;
    stages.push_back(std::move(plan));
  }
  return stages;
}

// What decides a layout against its neighbours, in a few words.
std::string why(const SuggestedLayout& layout) {
  const auto share = [&](double seconds) { return 100 * seconds / layout.seconds(); };
  std::string text = layout.recompute == "none" ? "nothing is computed twice" : "recompute " + layout.recompute;
  const auto cost = [&](double seconds, const char* what) {
    if (share(seconds) >= 0.5) text += fmt::format(", {:.0f}% {}", share(seconds), what);
  };
  cost(layout.tensor, "messages of tensor parallelism");
  cost(layout.context, "messages of context parallelism");
  cost(layout.data, "gradients and weights that nothing hides");
  cost(layout.bubble, "idle in the pipeline");
  return text;
}

int suggest(const Options& options, const RunConfig& config, const HfConfig& hf) {
  constexpr int kWanted = 3;
  Cluster cluster;
  cluster.ranks = config.run.ranks.value_or(options.gpus_per_node * options.nodes);
  cluster.gpus_per_node = std::min(options.gpus_per_node, cluster.ranks);
  cluster.gpu = find_gpu_model(options.gpu, cluster.ranks);
  cluster.network_bytes_per_second = options.network_gbps / 8 * 1e9;
  const LayoutSearch search = search_layouts(config, hf.model, cluster, kWanted);
  const auto json_of = [&](const SuggestedLayout& l) {
    nlohmann::ordered_json json;
    json["set"] = l.overrides();
    json["data"] = l.mesh.data;
    json["tensor"] = l.mesh.tensor;
    json["pipeline"] = l.mesh.pipeline;
    json["context"] = l.mesh.context;
    json["zero"] = l.zero;
    json["micro_batch_size"] = l.micro_batch_size;
    json["recompute"] = l.recompute;
    json["memory"] = l.memory;
    json["tokens_per_second_per_gpu"] = l.tokens_per_second_per_gpu(cluster.ranks);
    json["seconds"] = {{"products", l.products},     {"attention_and_passes", l.attention_and_passes},
                       {"tensor", l.tensor},         {"context", l.context},
                       {"data", l.data},             {"bubble", l.bubble}};
    json["why"] = why(l);
    return json;
  };
  if (options.json) {
    nlohmann::ordered_json json;
    json["considered"] = search.considered;
    json["suggestions"] = nlohmann::ordered_json::array();
    for (const SuggestedLayout& layout : search.best) json["suggestions"].push_back(json_of(layout));
    if (search.best.empty()) json["smallest"] = json_of(search.smallest);
    std::printf("%s\n", json.dump().c_str());
    return search.best.empty() ? 1 : 0;
  }
  const double available = gib(static_cast<double>(cluster.gpu.usable_bytes + cluster.gpu.reserved_bytes));
  std::printf("%s: %.2fB parameters on %lld x %s, %d layouts considered\n", config.model.path.c_str(),
              static_cast<double>(parameter_count(hf.model)) / 1e9, static_cast<long long>(cluster.ranks),
              cluster.gpu.name.c_str(), search.considered);
  if (search.best.empty()) {
    const SuggestedLayout& l = search.smallest;
    std::printf("none fits: the smallest, tensor %d x pipeline %d with zero %d and recompute %s, needs %.1f GiB of %.1f; "
                "use more or larger GPUs, shorter rows, precision.optimizer_states bf16 or int8, or memory.offload auto\n",
                l.mesh.tensor, l.mesh.pipeline, l.zero, l.recompute.c_str(), gib(static_cast<double>(l.memory)), available);
    return 1;
  }
  int number = 0;
  for (const SuggestedLayout& l : search.best) {
    std::printf("\n%d. data %d x tensor %d x pipeline %d%s, zero %d, %lld rows x %lld micro-batches\n", ++number,
                l.mesh.data, l.mesh.tensor, l.mesh.pipeline,
                l.mesh.context > 1 ? fmt::format(" x context {}", l.mesh.context).c_str() : "", l.zero,
                static_cast<long long>(l.micro_batch_size), static_cast<long long>(l.micro_batches));
    std::printf("   about %.0f tokens/s per GPU, %.2f s a step, %.1f of %.1f GiB: %s\n",
                l.tokens_per_second_per_gpu(cluster.ranks), l.seconds(), gib(static_cast<double>(l.memory)), available,
                why(l).c_str());
    std::string flags;
    for (const std::string& set : l.overrides()) flags += " --set " + set;
    std::printf("  %s\n", flags.c_str());
  }
  return 0;
}

int run(const Options& options) {
  RunConfig config = load_run_config(options.config, options.overrides);
  // A plan needs no tokenizer but to count the tokens that are added.
  const HfConfig hf = load_run_model(
      config, config.data.add_tokens.empty() ? RunTokenizer{} : load_run_tokenizer(config));
  if (options.suggests) return suggest(options, config, hf);
  const std::int64_t ranks = config.run.ranks.value_or(options.gpus_per_node * options.nodes);
  const GpuModel gpu = find_gpu_model(options.gpu, ranks);
  const bool on_gpu = gpu.capabilities.target == DeviceKind::kCuda;
  resolve(config, ranks, on_gpu);
  const MeshShape mesh = mesh_shape(config, ranks, options.gpus_per_node);
  const BatchShape batch = batch_shape(config, mesh.data);
  const std::int64_t documents =
      options.max_documents > 0 ? options.max_documents : guessed_documents(config);
  RuntimeOptions runtime = runtime_options(config, mesh, documents);
  const std::vector<StagePlan> stages = plan_stages(config, hf.model, mesh, gpu, runtime);
  const StagePlan& worst = *std::max_element(
      stages.begin(), stages.end(),
      [](const StagePlan& a, const StagePlan& b) { return a.memory.total() < b.memory.total(); });
  const RuntimeMemory& memory = worst.memory;
  const bool fits =
      std::all_of(stages.begin(), stages.end(), [](const StagePlan& s) { return s.fits; });
  runtime.recompute = worst.recompute;
  const Traffic traffic = step_traffic(hf.model, mesh, runtime, batch.gradient_accumulation_steps);
  const double tokens = static_cast<double>(batch.global_batch_size * config.train.sequence_length);
  const double flops =
      tokens * flops_per_token(hf.model, config.train.sequence_length) / static_cast<double>(ranks);
  const double compute_seconds =
      gpu.sustained_bf16_flops > 0 ? flops / gpu.sustained_bf16_flops : 0;
  const char* recompute[] = {"none", "selective", "full"};

  if (options.json) {
    nlohmann::ordered_json json;
    json["fits"] = fits;
    json["ranks"] = ranks;
    json["parameters"] = parameter_count(hf.model);
    json["recompute"] = recompute[static_cast<int>(runtime.recompute)];
    json["choice"] = worst.choice;
    json["reason"] = worst.reason;
    for (int i = 0; i < kMemoryClasses; ++i) {
      const auto memory_class = static_cast<MemoryClass>(i);
      json["memory"][name_of(memory_class)] = memory.plan.total(memory_class);
    }
    json["memory"]["scratch"] = memory.compute_scratch + memory.communication_scratch;
    json["memory"]["reserved"] = gpu.reserved_bytes;
    json["memory"]["total"] = memory.total() + gpu.reserved_bytes;
    json["memory"]["host"] = memory.host;
    json["fp8_gemm_share"] = fp8_share(hf.model, runtime, mesh.tensor);
    json["traffic_bytes"]["tensor"] = traffic.tensor_bytes;
    json["traffic_bytes"]["context"] = traffic.context_bytes;
    json["traffic_bytes"]["data"] = traffic.data_bytes;
    json["traffic_bytes"]["pipeline"] = traffic.pipeline_bytes;
    for (const StagePlan& stage : stages) {
      nlohmann::ordered_json entry;
      entry["blocks"] = stage.layers;
      entry["recompute"] = recompute[static_cast<int>(stage.recompute)];
      entry["memory"] = stage.memory.total() + gpu.reserved_bytes;
      entry["fits"] = stage.fits;
      json["stages"].push_back(entry);
    }
    json["compute_seconds"] = compute_seconds;
    std::printf("%s\n", json.dump().c_str());
    return fits ? 0 : 1;
  }
  std::printf("%s: %s parameters on %lld x %s: %sdata %d x %stensor %d, zero %d, recompute %s\n",
              config.model.path.c_str(),
              fmt::format("{:.2f}B", static_cast<double>(parameter_count(hf.model)) / 1e9).c_str(),
              static_cast<long long>(ranks), gpu.name.c_str(),
              mesh.pipeline > 1 ? fmt::format("pipeline {} x ", mesh.pipeline).c_str() : "",
              mesh.data, mesh.context > 1 ? fmt::format("context {} x ", mesh.context).c_str() : "",
              mesh.tensor, runtime.params.zero, worst.choice.c_str());
  if (!worst.reason.empty()) std::printf("%s\n", worst.reason.c_str());
  for (const std::string& line : precision_report(config, hf.model, runtime, mesh.tensor)) {
    std::printf("fp8 %s\n", line.c_str());
  }
  if (stages.size() > 1) {
    std::printf("\nstage  blocks                  GiB  recompute\n");
    for (std::size_t i = 0; i < stages.size(); ++i) {
      std::printf("  %-4zu %-18s %8.3f  %s%s\n", i, stages[i].layers.c_str(),
                  gib(static_cast<double>(stages[i].memory.total() + gpu.reserved_bytes)),
                  stages[i].choice.c_str(), stages[i].fits ? "" : ", does not fit");
    }
  }
  std::printf("\nmemory per rank%s                GiB\n",
              stages.size() > 1 ? ", largest stage" : "");
  for (int i = 0; i < kMemoryClasses; ++i) {
    const auto memory_class = static_cast<MemoryClass>(i);
    const std::size_t bytes = memory.plan.total(memory_class);
    if (bytes > 0)
      std::printf("  %-22s %10.3f\n", name_of(memory_class), gib(static_cast<double>(bytes)));
  }
  std::printf("  %-22s %10.3f\n", "scratch",
              gib(static_cast<double>(memory.compute_scratch + memory.communication_scratch)));
  if (gpu.reserved_bytes > 0) {
    std::printf("  %-22s %10.3f\n", "driver, libraries",
                gib(static_cast<double>(gpu.reserved_bytes)));
  }
  std::printf("  %-22s %10.3f", "total",
              gib(static_cast<double>(memory.total() + gpu.reserved_bytes)));
  if (gpu.usable_bytes > 0) {
    std::printf("   of %.1f: %s", gib(static_cast<double>(gpu.usable_bytes + gpu.reserved_bytes)),
                fits ? "fits" : "does not fit");
  }
  if (memory.host > 0) {
    std::printf("\n  %-22s %10.3f   page-locked", "host memory",
                gib(static_cast<double>(memory.host)));
  }
  std::printf("\n\nper step and rank\n");
  std::printf("  %-22s %10.1f   global batch of %lld rows, %lld tokens\n", "tokens",
              tokens / static_cast<double>(ranks), static_cast<long long>(batch.global_batch_size),
              static_cast<long long>(tokens));
  std::printf("  %-22s %10.3f   GiB sent over the tensor group\n", "tensor parallel",
              gib(traffic.tensor_bytes));
  if (mesh.context > 1) {
    std::printf("  %-22s %10.3f   GiB sent over the context group\n", "context parallel",
                gib(traffic.context_bytes));
  }
  std::printf("  %-22s %10.3f   GiB sent over the data%s group\n", "data parallel",
              gib(traffic.data_bytes), mesh.context > 1 ? " x context" : "");
  if (mesh.pipeline > 1) {
    const double units =
        static_cast<double>(batch.gradient_accumulation_steps * runtime.pipeline.chunks);
    const double idle = (mesh.pipeline - 1) / (units + mesh.pipeline - 1);
    std::printf("  %-22s %10.3f   GiB sent to other stages; a stage is idle for %.0f%% of a step\n",
                "pipeline", gib(traffic.pipeline_bytes), 100 * idle);
  }
  if (compute_seconds > 0) {
    std::printf("  %-22s %10.3f   s of matrix work at %.0f TFLOP/s (soaked bf16)\n", "compute",
                compute_seconds, gpu.sustained_bf16_flops / 1e12);
  }
  return fits ? 0 : 1;
}

}  // namespace

void add_plan_command(CLI::App& app, int& code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "plan",
      "Memory by class, traffic and work of a run; needs no GPU; exit 1 if it does not fit");
  command->add_option("config", options->config, "Run configuration")->required();
  command->add_option("--set", options->overrides, "section.key=value, over the file");
  command->add_option("--gpu", options->gpu, "h100-sxm, h200-sxm, a100-80gb, l40s, rtx4090 or cpu")
      ->capture_default_str();
  command
      ->add_option("--gpus-per-node", options->gpus_per_node,
                   "Ranks on a node, where run.ranks is auto")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--nodes", options->nodes, "Nodes")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--max-documents", options->max_documents,
                      "Documents in a micro-batch; an estimate by default");
  command->add_flag("--suggest", options->suggests,
                    "The three fastest layouts that fit, by arithmetic, and what each costs");
  command
      ->add_option("--network-gbps", options->network_gbps, "With --suggest: network of each GPU to other nodes, Gbit/s")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([options, &code] { code = run(*options); });
}

}  // namespace tessera
