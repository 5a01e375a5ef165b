#include "engine/infer/generator.h"

#include <algorithm>
#include <numeric>

#include "engine/core/error.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

// Prompt tokens per pass: enough to keep GEMMs efficient, few enough that activations stay small.
constexpr std::int64_t kPrefillTokens = 512;

}  // namespace

Generator::Generator(BackendContext& context, const ProcessMesh& mesh, const ModelConfig& config,
                     const GeneratorOptions& options)
    : context_(&context), config_(config), options_(options) {
  CHECK_USER(options.max_length >= 2, "[generate] the longest text is {} tokens, expected at least 2",
             options.max_length);
  prefill_ = std::min(kPrefillTokens, options.max_length);
  RuntimeOptions runtime_options;
  runtime_options.geometry =
      batch_geometry(1, prefill_, 1, options.compute, mesh.tensor().size(), false);
  runtime_options.geometry.max_length = options.max_length;
  runtime_options.params.compute = options.compute;
  runtime_options.params.trains = false;
  runtime_options.deterministic = options.deterministic;
  runtime_options.overlap = false;

  const QkvLayout layout = local_qkv_layout(config, mesh.tensor().size());
  const auto plan = [&](Arena& arena) {
    caches_.clear();
    for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
      const auto take = [&](const char* what) {
        return arena.allocate(fmt::format("cache {} {}", layer, what), options.compute,
                              Shape{options.max_length, layout.kv_cols()}, MemoryClass::kActivations);
      };
      LayerCache cache;
      cache.k = take("k");
      cache.v = take("v");
      caches_.push_back(cache);
    }
    const Shape row{1, config.vocab_size};
    logits_ = arena.allocate("logits", options.compute, row, MemoryClass::kActivations);
    logits_fp32_ = arena.allocate("logits fp32", DType::kF32, row, MemoryClass::kActivations);
    keys_ = arena.allocate("keys", DType::kI32, Shape{2}, MemoryClass::kInput);
  };
  MeshShape shape;
  shape.tensor = mesh.tensor().size();
  std::size_t cache_bytes = 0;
  const RuntimeMemory memory = measure_runtime(
      context.capabilities(), shape, mesh.tensor().rank(), config, runtime_options,
      [&](ModelRuntime& dry) {
        Arena arena(dry.context(), 0);
        plan(arena);
        cache_bytes = arena.used();
        LayerContext layer = dry.layer_context();
        dry.model().decode(dry.batch(), caches_, 0, keys_, prefill_ - 1, logits_, layer);
        scale(Scale{logits_, logits_fp32_}, dry.compute());
      });
  runtime_ = std::make_unique<ModelRuntime>(context, mesh, config, runtime_options, memory);
  arena_ = std::make_unique<Arena>(context, cache_bytes);
  plan(*arena_);
  host_logits_.resize(static_cast<std::size_t>(config.vocab_size));
}

void Generator::append(std::span<const std::int32_t> tokens, std::int64_t cached) {
  Stream& stream = runtime_->compute();
  const auto count = static_cast<std::int64_t>(tokens.size());
  std::vector<std::int32_t> positions(tokens.size());
  std::iota(positions.begin(), positions.end(), static_cast<std::int32_t>(cached));
  const std::int32_t documents[2] = {0, static_cast<std::int32_t>(count)};
  const std::int32_t keys[2] = {0, static_cast<std::int32_t>(cached + count)};
  DeviceBatch batch = runtime_->batch();
  batch.tokens = batch.tokens.flat_slice(0, count);
  batch.positions = batch.positions.flat_slice(0, count);
  stream.copy_bytes(batch.tokens.data, tokens.data(), batch.tokens.bytes());
  stream.copy_bytes(batch.positions.data, positions.data(), batch.positions.bytes());
  stream.copy_bytes(batch.documents.data, documents, sizeof documents);
  stream.copy_bytes(keys_.data, keys, sizeof keys);
  LayerContext layer = runtime_->layer_context();
  runtime_->model().decode(batch, caches_, cached, keys_, count - 1, logits_, layer);
  scale(Scale{logits_, logits_fp32_}, stream);
  stream.copy_bytes(host_logits_.data(), logits_fp32_.data, logits_fp32_.bytes());
  stream.synchronize();
}

std::vector<std::int32_t> Generator::generate(std::span<const std::int32_t> prompt,
                                              std::int64_t max_new_tokens,
                                              std::span<const std::int32_t> stop_tokens,
                                              const SamplingOptions& sampling,
                                              const std::function<bool(std::int32_t)>& on_token) {
  validate(sampling);
  const auto length = static_cast<std::int64_t>(prompt.size());
  CHECK_USER(length >= 1, "[generate] the prompt has no token; give a prompt or a model with a BOS token");
  CHECK_USER(length < options_.max_length,
             "[generate] the prompt has {} tokens and the longest text is {}; raise --max-length", length,
             options_.max_length);
  for (const std::int32_t token : prompt) {
    CHECK_USER(token >= 0 && token < config_.vocab_size,
               "[generate] the prompt holds token id {}, the model's vocabulary has {}", token,
               config_.vocab_size);
  }
  std::int64_t cached = 0;
  while (cached < length) {
    const std::int64_t count = std::min(prefill_, length - cached);
    append(prompt.subspan(static_cast<std::size_t>(cached), static_cast<std::size_t>(count)), cached);
    cached += count;
  }
  std::vector<std::int32_t> generated;
  while (static_cast<std::int64_t>(generated.size()) < max_new_tokens) {
    const std::int32_t token = sample_token(host_logits_, sampling, generated.size());
    if (std::find(stop_tokens.begin(), stop_tokens.end(), token) != stop_tokens.end()) break;
    generated.push_back(token);
    if (on_token && !on_token(token)) break;
    if (cached == options_.max_length ||
        static_cast<std::int64_t>(generated.size()) == max_new_tokens) {
      break;
    }
    append(std::span(&generated.back(), 1), cached);
    ++cached;
  }
  return generated;
}

}  // namespace tessera
