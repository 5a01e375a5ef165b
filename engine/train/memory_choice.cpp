#include "engine/train/memory_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "engine/core/error.h"
#include "engine/train/precision.h"
#include "engine/train/run_setup.h"

namespace tessera {
namespace {

struct Candidate {
  Recompute recompute = Recompute::kNone;
  bool inputs = false;
  bool moments = false;
  bool masters = false;
};

std::string readable(std::size_t bytes) {
  const auto size = static_cast<double>(bytes);
  if (bytes < 10240) return fmt::format("{} bytes", bytes);
  if (bytes < std::size_t{1} << 20) return fmt::format("{:.1f} KiB", size / (1 << 10));
  if (bytes < std::size_t{1} << 30) return fmt::format("{:.1f} MiB", size / (1 << 20));
  return fmt::format("{:.2f} GiB", size / (1 << 30));
}

bool lists(const MemoryOptions& options, const char* what) {
  return std::find(options.offload.begin(), options.offload.end(), what) != options.offload.end();
}

// In the order in which they are tried: what costs least time first.
std::vector<Candidate> candidates(const MemoryOptions& options, const RuntimeOptions& runtime) {
  std::vector<Candidate> result;
  for (const auto& [name, recompute] : {std::pair{"none", Recompute::kNone},
                                        {"selective", Recompute::kSelective},
                                        {"full", Recompute::kFull}}) {
    if (options.recompute != "auto" && options.recompute != name) continue;
    Candidate candidate;
    candidate.recompute = recompute;
    candidate.inputs = recompute == Recompute::kFull && lists(options, "activations");
    candidate.moments = lists(options, "optimizer");
    candidate.masters = lists(options, "masters");
    result.push_back(candidate);
  }
  if (!lists(options, "auto")) return result;
  const auto add = [&](bool Candidate::*what, bool is_there) {
    if (!is_there || result.back().*what) return;
    Candidate next = result.back();
    next.*what = true;
    result.push_back(next);
  };
  add(&Candidate::inputs, result.back().recompute == Recompute::kFull);
  add(&Candidate::moments, true);
  add(&Candidate::masters,
      runtime.params.fp32_masters && runtime.params.compute == DType::kBF16);
  return result;
}

void apply(const Candidate& candidate, RuntimeOptions& options) {
  options.recompute = candidate.recompute;
  options.offloads_inputs = candidate.inputs;
  options.params.offloads_moments = candidate.moments;
  options.params.offloads_masters = candidate.masters;
}

class Measure {
 public:
  Measure(const RunConfig& config, const ModelConfig& model, const MeshShape& mesh, int rank,
          const Capabilities& target)
      : model_(model),
        mesh_(mesh),
        rank_(rank),
        target_(target),
        adamw_(adamw_settings(config.optimizer)) {}
  RuntimeMemory operator()(const RuntimeOptions& options) const {
    return measure_runtime(target_, mesh_, rank_, model_, options,
                           [&](ModelRuntime& runtime) { dry_run_step(runtime, adamw_); });
  }

 private:
  const ModelConfig& model_;
  const MeshShape& mesh_;
  int rank_;
  const Capabilities& target_;
  AdamWSettings adamw_;
};

}  // namespace

bool chooses_memory(const MemoryOptions& options) {
  return options.recompute == "auto" || lists(options, "auto");
}

std::string describe_memory_choice(const RuntimeOptions& options) {
  const char* recompute[] = {"none", "selective", "full"};
  std::string moved;
  const auto add = [&](bool is_moved, const char* name) {
    if (is_moved) moved += fmt::format("{}{}", moved.empty() ? " offload " : ", ", name);
  };
  add(options.offloads_inputs, "activations");
  add(options.params.offloads_moments, "optimizer");
  add(options.params.offloads_masters, "masters");
  return recompute[static_cast<int>(options.recompute)] + moved;
}

MemoryChoice plan_memory(const RunConfig& config, const ModelConfig& model, const MeshShape& mesh,
                         int rank, const Capabilities& target, const MemoryLimits& limits,
                         RuntimeOptions& options) {
  check_precision(config, target);
  const Measure measure(config, model, mesh, rank, target);
  MemoryChoice choice;
  std::string tried;
  bool is_host_full = false;
  for (const Candidate& candidate : candidates(config.memory, options)) {
    apply(candidate, options);
    choice.memory = measure(options);
    const std::string name = describe_memory_choice(options);
    const std::size_t bytes = choice.memory.total();
    is_host_full = limits.host > 0 && choice.memory.host > limits.host;
    if (!is_host_full && (limits.device == 0 || bytes <= limits.device)) {
      if (!chooses_memory(config.memory)) return choice;
      choice.reason =
          limits.device == 0
              ? fmt::format("recompute {}: how much memory is free is not known", name)
              : fmt::format("recompute {}: {}{} of {} are taken", name,
                            tried.empty() ? "" : tried + " would be needed, ", readable(bytes),
                            readable(limits.device));
      return choice;
    }
    tried += fmt::format("{}{} {}", tried.empty() ? "with " : ", with ", name, readable(bytes));
  }
  CHECK(!tried.empty(), "[memory] no value of memory.recompute is {}", config.memory.recompute);
  if (is_host_full) {
    TESSERA_FAIL(ErrorKind::kAnswerNo,
                 "[memory] rank {} moves {} to host memory, {} are available there; "
                 "list less in memory.offload, or use precision.optimizer_states bf16 or int8",
                 rank, readable(choice.memory.host), readable(limits.host));
  }
  TESSERA_FAIL(ErrorKind::kAnswerNo,
               "[memory] rank {} needs {} with memory.recompute {} and parallel.zero {}, "
               "{} are available, {} too few; "
               "lower train.micro_batch_size or train.sequence_length, raise parallel.tensor or "
               "parallel.pipeline, use parallel.zero 3 with more ranks{}",
               rank, readable(choice.memory.total()), describe_memory_choice(options),
               options.params.zero, readable(limits.device), readable(choice.memory.total() - limits.device),
               config.memory.offload.empty() ? ", or allow memory.offload: auto" : "");
}

MemoryChoice plan_least_memory(const RunConfig& config, const ModelConfig& model,
                               const MeshShape& mesh, int rank, const Capabilities& target,
                               RuntimeOptions& options) {
  check_precision(config, target);
  apply(candidates(config.memory, options).back(), options);
  MemoryChoice choice;
  choice.memory = Measure(config, model, mesh, rank, target)(options);
  return choice;
}

}  // namespace tessera
