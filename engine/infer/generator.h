// Generator: continues a sequence of tokens with a KV cache. One sequence at a time; under tensor
// parallelism every rank makes the same calls and gets the same tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/infer/sampling.h"
#include "models/model_runtime.h"

namespace tessera {

struct GeneratorOptions {
  std::int64_t max_length = 2048;  // prompt and answer together: the capacity of the cache
  DType compute = DType::kBF16;
  bool deterministic = true;
};

class Generator {
 public:
  // Plans and allocates; the weights are then loaded into runtime(). The context and the mesh (tensor
  // parallel only) must outlive it.
  Generator(BackendContext& context, const ProcessMesh& mesh, const ModelConfig& config,
            const GeneratorOptions& options);

  ModelRuntime& runtime() { return *runtime_; }

  // The tokens that follow `prompt` (at least one token): at most `max_new_tokens`, fewer where a stop
  // token comes (not included) or the cache is full. `on_token` sees each as it is chosen; returning
  // false ends the generation.
  std::vector<std::int32_t> generate(std::span<const std::int32_t> prompt, std::int64_t max_new_tokens,
                                     std::span<const std::int32_t> stop_tokens,
                                     const SamplingOptions& sampling,
                                     const std::function<bool(std::int32_t)>& on_token = {});

 private:
  // Appends tokens behind the `cached` ones; the logits of the last are left in host_logits_.
  void append(std::span<const std::int32_t> tokens, std::int64_t cached);

  BackendContext* context_;
  ModelConfig config_;
  GeneratorOptions options_;
  std::int64_t prefill_ = 0;  // tokens per pass over a prompt
  std::unique_ptr<ModelRuntime> runtime_;
  std::unique_ptr<Arena> arena_;
  std::vector<LayerCache> caches_;
  Tensor logits_;  // [1, vocab]
  Tensor logits_fp32_;
  Tensor keys_;    // [2] int32
  std::vector<float> host_logits_;
};

}  // namespace tessera
