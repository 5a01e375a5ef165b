// tessera tokenize: data prepared ahead of a run, or written as token files.
#include <cstdio>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "data/export_tokens.h"
#include "data/prepare.h"
#include "data/progress_display.h"
#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/train/run_setup.h"
#include "tools/commands/command.h"

namespace tessera {
namespace {

struct Options {
  std::string config;
  std::vector<std::string> overrides;
  std::string tokenizer;
  std::vector<std::string> input;
  std::string input_format = "auto";
  std::string output;
  std::string format = "tokens";
  std::string cache_dir;
  int threads = 0;
  bool json = false;
};

RunConfig config_of(const Options& options) {
  if (!options.config.empty()) {
    CHECK_USER(options.input.empty() && options.tokenizer.empty(),
               "[tokenize] give a configuration file, or --tokenizer and --input, not both");
    return load_run_config(options.config, options.overrides);
  }
  CHECK_USER(
      !options.input.empty() && !options.output.empty(),
      "[tokenize] give a configuration file, or --tokenizer DIR --input FILES --output PREFIX");
  RunConfig config;
  config.data.tokenizer = options.tokenizer;
  for (const std::string& path : options.input) {
    DataSource source;
    source.path = path;
    source.format = options.input_format;
    config.data.train.push_back(source);
  }
  return config;
}

int run(const Options& options) {
  RunConfig config = config_of(options);
  if (!options.cache_dir.empty()) config.data.cache_dir = options.cache_dir;
  const RunTokenizer tokenizer = load_run_tokenizer(config);
  PrepareSettings settings;
  settings.encoder = tokenizer.encoder ? &*tokenizer.encoder : nullptr;
  settings.threads = options.threads;
  settings.fallback_cache_dir = std::filesystem::temp_directory_path() / "tessera-cache";
  settings.sequence_length = config.train.sequence_length;
  if (!config.model.path.empty())
    settings.vocab_size = load_run_model(config, tokenizer).model.vocab_size;
  nlohmann::ordered_json json;
  std::vector<std::string> report;
  {
    ProgressDisplay display;
    settings.progress = [&display](const PrepareProgress& progress) { display(progress); };
    if (options.output.empty()) {
      report = prepare_data(config.data, settings).report;
      json["cache_dir"] = data_cache_dir(config.data, settings.fallback_cache_dir).string();
    } else {
      const auto documents = prepare_documents(config.data.train, config.data, settings, &report);
      const TokenFileKind kind =
          options.format == "megatron" ? TokenFileKind::kMegatron : TokenFileKind::kTessera;
      const ExportCounts counts = export_tokens(documents, options.output, kind);
      json["output"] = options.output;
      json["documents"] = counts.documents;
      json["tokens"] = counts.tokens;
    }
  }
  for (const std::string& line : report) log::info("{}", line);
  if (options.json) {
    json["report"] = report;
    std::printf("%s\n",
                json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  } else if (options.output.empty()) {
    std::printf("prepared in %s\n", json["cache_dir"].get<std::string>().c_str());
  } else {
    std::printf("%s: %lld documents, %lld tokens\n", options.output.c_str(),
                json["documents"].get<long long>(), json["tokens"].get<long long>());
  }
  return 0;
}

}  // namespace

void add_tokenize_command(CLI::App& app, int& code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "tokenize", "Prepare the data of a run ahead of it, or write files of tokens");
  command->add_option("config", options->config,
                      "Run configuration; without --output its data is prepared in the cache");
  command->add_option("--set", options->overrides, "section.key=value, over the file");
  command->add_option("--tokenizer", options->tokenizer, "Folder or tokenizer.json, or `bytes`");
  command->add_option("--input", options->input,
                      "Files, folders or patterns, instead of a configuration");
  command->add_option("--input-format", options->input_format, "As data.train[].format")
      ->capture_default_str()
      ->check(CLI::IsMember(
          {"auto", "text", "lines", "paragraphs", "json", "parquet", "tokens", "megatron"}));
  command->add_option("--output", options->output, "Files PREFIX.* to write");
  command
      ->add_option("--format", options->format,
                   "tokens: files of Tessera, labels included; megatron: .bin and .idx")
      ->capture_default_str()
      ->check(CLI::IsMember({"tokens", "megatron"}));
  command->add_option("--cache-dir", options->cache_dir, "Where tokenised shards are kept");
  command->add_option("--threads", options->threads, "Threads; 0 takes all cores")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([options, &code] { code = run(*options); });
}

}  // namespace tessera
