// tessera inspect: what a model folder, a checkpoint or the data of a run holds.
#include <algorithm>
#include <cstdio>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/checkpoint_reader.h"
#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/train/run_setup.h"
#include "models/hf/names.h"
#include "tools/commands/command.h"
#include "tools/commands/model_runner.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

bool holds_weights(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename().string().find(".safetensors") != std::string::npos) return true;
  }
  return false;
}

int inspect_model(const std::string& folder, bool as_json) {
  const LoadedModel model = open_model(folder);
  const ModelConfig& config = model.hf.model;
  for (const std::string& warning : model.hf.warnings) log::warning("{}", warning);
  if (as_json) {
    Json json;
    json["model_type"] = name_of(config.architecture);
    json["parameters"] = parameter_count(config);
    json["config"] = Json::parse(format_hf_config(config, model.hf.config_text));
    for (const HfTensor& tensor : hf_tensors(config)) json["tensors"][tensor.name] = tensor.shape;
    std::printf("%s\n", json.dump().c_str());
    return 0;
  }
  std::printf("%s: %s, %lld parameters\n", folder.c_str(),
              std::string(name_of(config.architecture)).c_str(),
              static_cast<long long>(parameter_count(config)));
  const auto row = [](const char* name, const std::string& value) {
    std::printf("  %-24s %s\n", name, value.c_str());
  };
  row("vocab_size", std::to_string(config.vocab_size));
  row("hidden_size", std::to_string(config.hidden_size));
  row("intermediate_size", std::to_string(config.intermediate_size));
  row("num_hidden_layers", std::to_string(config.num_hidden_layers));
  row("heads", fmt::format("{} query, {} key/value of {}", config.num_attention_heads,
                           config.num_key_value_heads, config.head_dim));
  row("max_position_embeddings", std::to_string(config.max_position_embeddings));
  row("rope", fmt::format("{} theta {:g}", name_of(config.rope.kind), config.rope.theta));
  row("tie_word_embeddings", config.tie_word_embeddings ? "true" : "false");
  if (config.has_sliding_window()) row("sliding window", "yes");
  for (const HfTensor& tensor : hf_tensors(config)) {
    std::printf("  %-56s %s\n", tensor.name.c_str(), shape_text(tensor.shape).c_str());
  }
  if (std::filesystem::is_directory(folder) && !holds_weights(folder)) {
    std::printf("  weights: none in this folder; model.init: random makes new ones\n");
  } else if (std::filesystem::is_directory(folder)) {
    const SafetensorsFolder weights(folder);
    const HfNameMap names = match_hf_tensors(config, weights);
    for (const std::string& note : names.notes) std::printf("  %s\n", note.c_str());
    std::printf("  weights: %zu tensors in %zu files, %.1f MB\n", weights.entries().size(),
                weights.files().size(), static_cast<double>(weights.total_bytes()) / 1e6);
  }
  return 0;
}

int inspect_checkpoint(std::filesystem::path path, bool as_json) {
  if (!path.filename().string().starts_with("step-")) {
    const std::filesystem::path root =
        std::filesystem::is_directory(path / "checkpoints") ? path / "checkpoints" : path;
    const auto latest = find_latest_checkpoint(root);
    CHECK_USER(latest.has_value(), "[inspect] {} holds no complete checkpoint", root.string());
    path = *latest;
  }
  const CheckpointReader reader(path);
  if (as_json) {
    Json json;
    json["path"] = path.string();
    json["step"] = reader.step();
    json["ranks"] = reader.ranks();
    json["bytes"] = reader.total_bytes();
    json["tensors"] = reader.tensors().size();
    json["metadata"] = Json::parse(reader.metadata());
    std::printf("%s\n", json.dump().c_str());
    return 0;
  }
  const Json metadata = Json::parse(reader.metadata());
  std::printf("%s: step %lld written by %d ranks, %zu tensors, %.1f MB\n", path.c_str(),
              static_cast<long long>(reader.step()), reader.ranks(), reader.tensors().size(),
              static_cast<double>(reader.total_bytes()) / 1e6);
  for (const auto& [key, value] : metadata.items()) {
    if (!value.is_string()) std::printf("  %-16s %s\n", key.c_str(), value.dump().c_str());
  }
  std::printf("\nconfiguration:\n%s", metadata.at("config").get<std::string>().c_str());
  return 0;
}

struct DataView {
  std::string config;
  std::vector<std::string> overrides;
  std::int64_t rows = 3;
  std::string step = "1";
  bool ranks = false;
  bool ids = false;
  bool json = false;
};

// Where the configuration leaves the global batch to the number of ranks, the run that it belongs
// to knows: its folder holds the resolved configuration.
void take_batch_of_run(RunConfig& config) {
  if (config.run.ranks || config.train.global_batch_size || !config.run.dir) return;
  const std::filesystem::path path = std::filesystem::path(*config.run.dir) / "config.yaml";
  if (!std::filesystem::exists(path)) return;
  const RunConfig resolved = load_run_config(path.string(), {});
  config.run.ranks = resolved.run.ranks;
  config.train.global_batch_size = resolved.train.global_batch_size;
  config.train.gradient_accumulation_steps = resolved.train.gradient_accumulation_steps;
  config.parallel = resolved.parallel;
}

std::string numbers_text(const std::vector<std::int64_t>& numbers) {
  return fmt::format("{}", fmt::join(numbers, " "));
}

// The rows of each micro-batch, rank by rank, as the ranks' own loaders give them.
std::vector<std::vector<std::vector<std::int64_t>>> rows_of_ranks(
    const std::shared_ptr<const Dataset>& dataset, LoaderSettings settings, const BatchShape& batch,
    int dp_size, std::int64_t step) {
  std::vector<std::vector<std::vector<std::int64_t>>> ranks;
  settings.micro_batch_size = batch.micro_batch_size;
  settings.gradient_accumulation = batch.gradient_accumulation_steps;
  settings.dp_size = dp_size;
  for (int rank = 0; rank < dp_size; ++rank) {
    settings.dp_rank = rank;
    DataLoader loader(dataset, settings);
    ranks.emplace_back();
    for (std::int64_t i = 0; i < loader.used_micro_batches(step); ++i) {
      ranks.back().push_back(loader.load(step, i).row_ids);
    }
  }
  return ranks;
}

int inspect_data(const DataView& view) {
  RunConfig config = load_run_config(view.config, view.overrides);
  const std::vector<StepRange> steps = parse_step_ranges({view.step});
  take_batch_of_run(config);
  const RunTokenizer tokenizer = load_run_tokenizer(config);
  const HfConfig hf = load_run_model(config, tokenizer);
  PrepareSettings settings;
  settings.sequence_length = config.train.sequence_length;
  settings.vocab_size = hf.model.vocab_size;
  settings.encoder = tokenizer.encoder ? &*tokenizer.encoder : nullptr;
  settings.fallback_cache_dir = std::filesystem::temp_directory_path() / "tessera-cache";
  const PreparedData data = prepare_data(config.data, settings);
  CHECK_USER(data.train != nullptr, "[inspect] {} names no training data", view.config);
  const std::int64_t ranks = config.run.ranks.value_or(
      config.parallel.tensor * config.parallel.pipeline * config.parallel.context);
  resolve(config, ranks, false);
  const auto dp_size = static_cast<int>(data_parallel_size(config, ranks));
  const BatchShape batch = batch_shape(config, dp_size);
  LoaderSettings loader_settings;
  loader_settings.micro_batch_size = batch.global_batch_size;
  loader_settings.seed = static_cast<std::uint64_t>(config.train.seed);
  loader_settings.prefetch = 0;
  loader_settings.vocab_size = hf.model.vocab_size;
  loader_settings.skipped_steps = parse_step_ranges(config.data.skip_steps);
  DataLoader loader(data.train, loader_settings);
  const MicroBatch rows = loader.load(steps[0].begin, 0);
  Json json;
  if (view.json) {
    json["report"] = data.report;
    json["epoch"] = data.train->describe_epoch(batch.global_batch_size);
    json["rows_per_epoch"] = data.train->epoch_rows();
    json["steps_per_epoch"] = loader.steps_per_epoch();
  } else {
    for (const std::string& line : data.report) std::printf("%s\n", line.c_str());
    for (const std::string& line : data.train->describe_epoch(batch.global_batch_size)) {
      std::printf("%s\n", line.c_str());
    }
  }
  for (std::int64_t step = steps[0].begin; step < steps[0].end; ++step) {
    const std::vector<std::string> lines = loader.describe_step(step);
    const auto of_ranks = view.ranks
                              ? rows_of_ranks(data.train, loader_settings, batch, dp_size, step)
                              : decltype(rows_of_ranks({}, {}, {}, 0, 0)){};
    if (view.json) {
      Json entry = {{"step", step + 1},
                    {"epoch", loader.epoch_of(step) + 1},
                    {"rows", loader.rows_of_step(step)},
                    {"provenance", lines}};
      if (view.ranks) entry["ranks"] = of_ranks;
      json["steps"].push_back(std::move(entry));
      continue;
    }
    std::printf("\nstep %lld, epoch %lld: rows %s\n", static_cast<long long>(step + 1),
                static_cast<long long>(loader.epoch_of(step) + 1),
                numbers_text(loader.rows_of_step(step)).c_str());
    for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
      for (std::size_t i = 0; i < of_ranks[rank].size(); ++i) {
        std::printf("  data-parallel rank %zu, micro-batch %zu: rows %s\n", rank, i,
                    numbers_text(of_ranks[rank][i]).c_str());
      }
    }
    for (const std::string& line : lines) std::printf("  %s\n", line.c_str());
  }
  const auto width = static_cast<std::size_t>(config.train.sequence_length);
  for (std::int64_t row = 0; row < std::min(view.rows, rows.rows); ++row) {
    const std::span<const std::int32_t> ids(
        rows.inputs.data() + static_cast<std::size_t>(row) * width, width);
    const std::span<const std::int32_t> targets(
        rows.targets.data() + static_cast<std::size_t>(row) * width, width);
    const auto trained =
        std::count_if(targets.begin(), targets.end(), [](std::int32_t t) { return t >= 0; });
    if (view.json) {
      Json entry;
      entry["ids"] = ids;
      entry["targets"] = targets;
      if (tokenizer.encoder) entry["text"] = tokenizer.encoder->decode(ids);
      json["rows"].push_back(entry);
      continue;
    }
    std::printf("\nrow %lld: %lld of %zu tokens are targets\n", static_cast<long long>(row),
                static_cast<long long>(trained), width);
    if (tokenizer.encoder) std::printf("%s\n", tokenizer.encoder->decode(ids).c_str());
    if (!view.ids && tokenizer.encoder) continue;
    for (std::size_t i = 0; i < width; ++i) {
      std::printf("%d>%d%c", ids[i], targets[i], i % 12 == 11 ? '\n' : ' ');
    }
    std::printf("\n");
  }
  if (view.json)
    std::printf("%s\n", json.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
  return 0;
}

}  // namespace

void add_inspect_command(CLI::App& app, int& code) {
  CLI::App* command =
      app.add_subcommand("inspect", "Show what a model, a checkpoint or the data of a run holds");
  command->require_subcommand(1);
  auto path = std::make_shared<std::string>();
  auto json = std::make_shared<bool>(false);

  CLI::App* model =
      command->add_subcommand("model", "Sizes and tensors of a Hugging Face folder or config.json");
  model->add_option("path", *path, "Folder or config.json")->required();
  model->add_flag("--json", *json, "Print one JSON object");
  model->callback([path, json, &code] { code = inspect_model(*path, *json); });

  CLI::App* checkpoint =
      command->add_subcommand("checkpoint", "Step, size and configuration of a checkpoint");
  checkpoint->add_option("path", *path, "Checkpoint step-*, or a run folder (its latest)")
      ->required();
  checkpoint->add_flag("--json", *json, "Print one JSON object");
  checkpoint->callback([path, json, &code] { code = inspect_checkpoint(*path, *json); });

  auto view = std::make_shared<DataView>();
  CLI::App* data = command->add_subcommand(
      "data", "Counts of the data of a run, and the rows of a step as the model sees them");
  data->add_option("config", view->config, "Run configuration")->required();
  data->add_option("--set", view->overrides, "section.key=value, over the file");
  data->add_option("--rows", view->rows, "Rows to show")->capture_default_str();
  data->add_option(
          "--step", view->step,
          "Step whose documents are listed, or several: 1200-1210; rows are shown of the first")
      ->capture_default_str();
  data->add_flag("--ranks", view->ranks,
                 "List what each data-parallel rank takes, -1 for an empty row");
  data->add_flag("--ids", view->ids, "Show token ids and targets, too");
  data->add_flag("--json", view->json, "Print one JSON object");
  data->callback([view, &code] { code = inspect_data(*view); });
}

}  // namespace tessera
