#include "engine/train/run_setup.h"

#include <algorithm>
#include <filesystem>

#include "data/content_hash.h"
#include "data/tokenizer_encoder.h"
#include "engine/core/error.h"
#include "engine/core/text.h"
#include "engine/train/precision.h"
#include "kernels/step_control.h"
#include "models/hf/names.h"
#include "models/weights.h"

namespace tessera {
namespace {

DType dtype_of(const std::string& name) {
  if (name == "int8") return DType::kU8;
  return name == "bf16" ? DType::kBF16 : DType::kF32;
}

PipelineOptions pipeline_options(const RunConfig& config, const MeshShape& mesh) {
  PipelineOptions options;
  options.chunks = static_cast<int>(config.parallel.virtual_stages);
  options.micro_batches =
      static_cast<int>(batch_shape(config, mesh.data).gradient_accumulation_steps);
  const std::string& schedule = config.parallel.pipeline_schedule;
  if (mesh.pipeline == 1) return options;
  if (schedule == "gpipe") options.kind = PipelineKind::kGPipe;
  if (schedule == "interleaved" || (schedule == "auto" && options.chunks > 1)) {
    options.kind = PipelineKind::kInterleaved;
  }
  return options;
}

}  // namespace

std::int64_t guessed_documents(const RunConfig& config) {
  const std::int64_t in_row =
      config.data.packing ? std::max<std::int64_t>(1, config.train.sequence_length / 64) : 1;
  return config.train.micro_batch_size * in_row;
}

RunTokenizer load_tokenizer(const std::string& source, const std::vector<std::string>& add_tokens) {
  RunTokenizer result;
  result.source = source;
  if (source == "bytes" && add_tokens.empty()) {
    result.tokenizer = std::make_shared<const Tokenizer>(Tokenizer::bytes());
    result.known_size = result.tokenizer->vocab_size();
    result.encoder = byte_encoder();
    return result;
  }
  auto tokenizer =
      std::make_shared<Tokenizer>(source == "bytes" ? Tokenizer::bytes() : Tokenizer::load(source));
  result.known_size = tokenizer->vocab_size();
  std::vector<AddedToken> tokens;
  for (const std::string& text : add_tokens) {
    AddedToken token;
    token.content = text;
    token.normalized = false;
    token.special = true;
    tokens.push_back(std::move(token));
  }
  if (!tokens.empty()) {
    for (const std::int32_t id : tokenizer->add_tokens(tokens)) {
      if (id >= result.known_size) result.new_ids.push_back(id);
    }
  }
  std::sort(result.new_ids.begin(), result.new_ids.end());
  result.new_ids.erase(std::unique(result.new_ids.begin(), result.new_ids.end()),
                       result.new_ids.end());
  result.tokenizer = std::move(tokenizer);
  result.encoder = make_text_encoder(result.tokenizer, source == "bytes" ? "" : source);
  if (!add_tokens.empty()) {
    ContentHash hash;
    hash.add(result.encoder->fingerprint);
    for (const std::string& text : add_tokens) hash.add(text);
    result.encoder->fingerprint = hash.hex();
  }
  return result;
}

RunTokenizer load_run_tokenizer(const RunConfig& config) {
  const std::vector<std::string>& add_tokens = config.data.add_tokens;
  std::string source = config.data.tokenizer;
  if (source.empty()) {
    std::filesystem::path folder = config.model.path;
    if (!std::filesystem::is_directory(folder)) folder = folder.parent_path();
    if (std::filesystem::exists(folder / "tokenizer.json")) source = folder.string();
  }
  CHECK_USER(!source.empty() || add_tokens.empty(),
             "[config] {}: there is no tokenizer to add to; name one with data.tokenizer",
             config.locate("data.add_tokens"));
  return source.empty() ? RunTokenizer{} : load_tokenizer(source, add_tokens);
}

HfConfig load_run_model(const RunConfig& config, const RunTokenizer& tokenizer) {
  CHECK_USER(!config.model.path.empty(),
             "[config] {} is not set; give a Hugging Face folder, or a config.json with "
             "model.init: random",
             config.locate("model.path"));
  HfConfig hf = load_hf_config(config.model.path);
  if (!tokenizer.new_ids.empty()) {
    hf.model.vocab_size = std::max(hf.model.vocab_size, tokenizer.new_ids.back() + 1);
  }
  validate(hf.model, config.model.path);
  return hf;
}

std::vector<std::string> load_pretrained_weights(ModelRuntime& runtime, const RunConfig& config,
                                                 const RunTokenizer& tokenizer,
                                                 bool checks_duplicates) {
  const ModelConfig in_file = load_hf_config(config.model.path).model;
  const SafetensorsFolder folder(config.model.path);
  const HfNameMap names = match_hf_tensors(
      in_file, folder, checks_duplicates ? TiedDuplicate::kCompare : TiedDuplicate::kTrust);
  AddedRows added;
  added.rows_in_file = in_file.vocab_size;
  added.known_rows = std::min(in_file.vocab_size, tokenizer.known_size);
  added.rows = tokenizer.new_ids;
  load_weights(runtime, folder, names, added.rows.empty() ? nullptr : &added);
  return names.notes;
}

MeshShape mesh_shape(const RunConfig& config, std::int64_t ranks, std::int64_t ranks_per_node) {
  MeshShape shape;
  shape.tensor = static_cast<int>(config.parallel.tensor);
  shape.pipeline = static_cast<int>(config.parallel.pipeline);
  shape.context = static_cast<int>(config.parallel.context);
  shape.data = static_cast<int>(data_parallel_size(config, ranks));
  if (config.parallel.shard_group != "node" || ranks_per_node == 0) return shape;
  // Tensor-parallel ranks are neighbours, so a node holds this many of a data-parallel group.
  const std::int64_t group = std::int64_t{shape.data} * shape.context;
  const std::int64_t on_node = std::min(group, ranks_per_node / shape.tensor);
  CHECK_USER(
      on_node >= 1 && ranks_per_node % shape.tensor == 0 && group % on_node == 0,
      "[config] {} is node: {} data-parallel ranks of tensor groups of {} cannot be shared out "
      "equally over nodes of {} ranks; write all",
      config.locate("parallel.shard_group"), group, shape.tensor, ranks_per_node);
  shape.shard = static_cast<int>(on_node);
  return shape;
}

RuntimeOptions runtime_options(const RunConfig& config, const MeshShape& mesh,
                               std::int64_t max_documents) {
  RuntimeOptions options;
  options.sequence_parallel = config.parallel.sequence_parallel.value_or(false);
  options.recipe = quant_recipe(config.precision);
  options.params.compute = dtype_of(config.precision.compute);
  options.params.fp32_masters = config.precision.master_weights == "fp32";
  options.params.gradients = dtype_of(config.precision.gradients);
  options.params.moments = dtype_of(config.precision.optimizer_states);
  options.params.zero = static_cast<int>(config.parallel.zero.value_or(0));
  options.params.weight_decay = static_cast<float>(config.optimizer.weight_decay);
  options.deterministic = config.run.reproducible;
  options.overlap = config.parallel.overlap;
  options.peer_copies = config.parallel.peer_copies;
  if (config.memory.mlp_chunk) {
    options.mlp_chunk_bytes = parse_bytes(*config.memory.mlp_chunk).value();
  }
  options.pipeline = pipeline_options(config, mesh);
  options.geometry =
      batch_geometry(config.train.micro_batch_size, config.train.sequence_length, max_documents,
                     options.params.compute, mesh.tensor, options.sequence_parallel, mesh.context);
  return options;
}

void dry_run_step(ModelRuntime& runtime, const AdamWSettings& adamw) {
  runtime.params().begin_step();
  // Every micro-batch makes the same calls; the first of a step and the others differ under ZeRO 2.
  const int count = std::min(2, runtime.options().pipeline.micro_batches);
  runtime.run_micro_batches(count, [](int, const DeviceBatch&) {});
  runtime.sum_totals();
  runtime.sync().finish_gradients();
  optimizer_step(runtime, adamw);
  runtime.evaluate(true);
}

AdamWSettings adamw_settings(const OptimizerOptions& options) {
  return AdamWSettings{static_cast<float>(options.betas.at(0)),
                       static_cast<float>(options.betas.at(1)), static_cast<float>(options.eps)};
}

double flops_per_token(const ModelConfig& model, std::int64_t sequence_length) {
  const double hidden = static_cast<double>(model.hidden_size);
  const double q = static_cast<double>(model.query_size());
  const double kv = static_cast<double>(model.key_value_size());
  const double layer =
      hidden * (2 * q + 2 * kv) + 3 * hidden * static_cast<double>(model.intermediate_size);
  const double layers = static_cast<double>(model.num_hidden_layers);
  const double matrices = layers * layer + hidden * static_cast<double>(model.vocab_size);
  return 6 * matrices + 6 * static_cast<double>(sequence_length) * q * layers;
}

}  // namespace tessera
