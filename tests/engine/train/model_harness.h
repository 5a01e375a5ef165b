// Runs a model on thread ranks of any mesh and reassembles what it computed, so that every layout
// can be compared with one rank.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "models/model_runtime.h"
#include "parallel/communicator.h"

namespace tessera::test {

// Runs body(rank, communicator) on `size` threads, whose groups work on `device` (thread ranks of
// one GPU share it); the first exception is rethrown when all have ended.
void run_thread_ranks(int size, Device device,
                      const std::function<void(int, std::unique_ptr<Communicator>)>& body);

// One micro-batch on the host, in the form of DeviceBatch.
struct HostBatch {
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> targets;
  std::vector<std::int32_t> positions;
  std::vector<std::int32_t> documents;  // cumulative lengths without tail
  std::int64_t target_tokens() const;
  // Documents of these tokens, one behind the other; a target is the next token of its document.
  static HostBatch from_documents(const std::vector<std::vector<std::int32_t>>& documents);
};

struct ModelSetup {
  ModelConfig config;
  Device device;  // of every rank
  MeshShape mesh;
  bool sequence_parallel = false;
  Recompute recompute = Recompute::kNone;
  int zero = 0;
  std::int64_t bucket_bytes = 0;
  int steps = 1;  // updates over the same batches
  PipelineKind schedule = PipelineKind::k1F1B;
  int chunks = 1;  // per pipeline rank
  DType compute = DType::kF32;
  DType gradients = DType::kF32;
  bool inline_streams = true;
  bool overlap = true;
  bool peer_copies = false;
  int cpu_threads = 1;
  float weight_decay = 0;
  QuantRecipe recipe;
  std::int64_t mlp_chunk_bytes = kMlpChunkBytes;
  bool offloads_inputs = false;
  bool offloads_masters = false;
  bool offloads_moments = false;
  std::int64_t offload_piece = std::int64_t{1} << 23;
  DType moments = DType::kF32;
};

// A parameter or gradient put together from the pieces of all ranks: row-major, without padding.
using GlobalTensors = std::map<std::string, std::vector<double>>;

struct StepResult {
  double loss_sum = 0;
  double target_tokens = 0;
  double grad_norm = 0;        // as StepControl reports it
  GlobalTensors gradients;     // unnormalised sums
  GlobalTensors weights;       // exact values after the update
  std::vector<double> losses;  // mean of each step, as rank 0 has it
  std::string disagreement;  // the first parameter whose copies on two ranks differ; empty if none
  std::vector<float> nll;    // of the last micro-batch of rank 0
};

// Makes the runtime of one rank for micro-batches like `batches`, fills the weights by `load`.
using LoadWeights = std::function<void(ModelRuntime&)>;

// One training step over `batches`, dealt to the data-parallel ranks in turn (micro-batch i to rank
// i % dp; a missing one is replaced by an empty batch), with the update of AdamW at
// `learning_rate`.
StepResult train_step(const ModelSetup& setup, const std::vector<HostBatch>& batches,
                      const LoadWeights& load, double learning_rate = 0, double max_grad_norm = 0);

// Uploads `batch`, padded to the runtime's geometry, to its batch() or to `target`.
void upload(const HostBatch& batch, ModelRuntime& runtime);
void upload(const HostBatch& batch, ModelRuntime& runtime, const DeviceBatch& target);

// Random values for every parameter of `config` (norms around 1, everything else around 0).
GlobalTensors random_weights(const ModelConfig& config, std::uint64_t seed, double std);
// Sets this rank's pieces to these values.
void set_weights(ModelRuntime& runtime, const GlobalTensors& weights);

double norm_of(const std::vector<double>& values);

// A small model of sizes that few numbers of ranks divide, vocabulary 37; a tied one has q/k norms,
// an untied one biases.
ModelConfig uneven_config(int layers, int kv_heads, bool is_tied);
// Micro-batches of random tokens of that vocabulary; `lengths(i)` are the documents of the i-th.
std::vector<HostBatch> random_batches(int count, std::uint64_t seed,
                                      const std::function<std::vector<int>(int)>& lengths);

// Five steps that learned, copies that agree, losses within `loss_tolerance` of each other
// (relative), the first step's gradients within 1e-5 of their tensor's norm.
void expect_same_training(const StepResult& got, const StepResult& wanted, double loss_tolerance);

}  // namespace tessera::test
