// The layouts of a run that fit a number of GPUs, fastest first by arithmetic: what `tessera plan --suggest` prints.
// docs/parallelism.md has the formulas.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/plan/gpu_model.h"
#include "engine/plan/traffic.h"
#include "engine/train/run_config.h"
#include "models/model_runtime.h"

namespace tessera {

struct Cluster {
  GpuModel gpu;
  std::int64_t ranks = 1;
  std::int64_t gpus_per_node = 8;
  double network_bytes_per_second = 0;  // of each GPU, to other nodes
};

struct SuggestedLayout {
  MeshShape mesh;
  int zero = 0;
  bool sequence_parallel = false;
  std::int64_t micro_batch_size = 1;
  std::int64_t micro_batches = 1;  // of a rank in a step
  std::string recompute;           // as describe_memory_choice has it
  std::size_t memory = 0;          // of the largest stage, driver and libraries included
  // Seconds of a step. The step is their sum.
  double products = 0;      // matrix products, those of a recompute included
  double attention_and_passes = 0;
  double tensor = 0;        // messages that nothing hides
  double context = 0;
  double data = 0;
  double bubble = 0;        // of the pipeline
  double tokens = 0;        // of a step, all ranks
  double seconds() const { return products + attention_and_passes + tensor + context + data + bubble; }
  double tokens_per_second_per_gpu(std::int64_t ranks) const {
    return tokens / seconds() / static_cast<double>(ranks);
  }
  // The keys that make a run of it: "parallel.tensor=2", ...
  std::vector<std::string> overrides() const;
};

struct LayoutSearch {
  std::vector<SuggestedLayout> best;  // at most `wanted`, fastest first; all fit
  int considered = 0;                 // layouts that are possible, whatever they need
  // Where none fits: the one that needs least, and how much.
  SuggestedLayout smallest;
};

// Keeps the run's global batch, sequence length and number formats; chooses data, tensor, pipeline and context
// parallelism, ZeRO, the micro-batch, and recompute. kUser where no layout divides the model and the ranks.
LayoutSearch search_layouts(const RunConfig& config, const ModelConfig& model, const Cluster& cluster, int wanted);

}  // namespace tessera
