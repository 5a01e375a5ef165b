// tessera eval: the loss of a model on data.
#include <cmath>
#include <cstdio>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "data/prepare.h"
#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/train/evaluator.h"
#include "engine/train/run_setup.h"
#include "models/weights.h"
#include "tools/commands/command.h"
#include "tools/commands/model_runner.h"

namespace tessera {
namespace {

struct Options {
  std::string config;
  std::vector<std::string> overrides;
  std::string model;
  std::vector<std::string> data;
  std::string tokenizer;
  std::string labels = "auto";
  std::int64_t sequence_length = 0;
  std::int64_t micro_batch_size = 1;
  int tensor = 1;
  int context = 1;
  int data_parallel = 1;
  std::string device = "auto";
  std::string compute = "auto";
  bool token_losses = false;
  bool json = false;
};

// The options as a run configuration, so that data and model are read exactly as by `train`.
RunConfig config_of(const Options& options) {
  if (!options.config.empty()) return load_run_config(options.config, options.overrides);
  CHECK_USER(!options.model.empty() && !options.data.empty(),
             "[eval] give a configuration file, or --model DIR and --data FILE");
  RunConfig config;
  config.model.path = options.model;
  config.data.tokenizer = options.tokenizer;
  for (const std::string& path : options.data) {
    DataSource source;
    source.path = path;
    source.labels = options.labels;
    config.data.eval.push_back(source);
  }
  config.run.device = options.device;
  config.precision.compute = options.compute;
  config.parallel.tensor = options.tensor;
  config.parallel.context = options.context;
  config.train.micro_batch_size = options.micro_batch_size;
  config.train.sequence_length = options.sequence_length;
  return config;
}

int run(const Options& options) {
  RunConfig config = config_of(options);
  const RunTokenizer tokenizer = load_run_tokenizer(config);
  const HfConfig hf = load_run_model(config, tokenizer);
  if (config.train.sequence_length == 0)
    config.train.sequence_length = hf.model.max_position_embeddings;
  PrepareSettings settings;
  settings.sequence_length = config.train.sequence_length;
  settings.vocab_size = hf.model.vocab_size;
  settings.encoder = tokenizer.encoder ? &*tokenizer.encoder : nullptr;
  settings.fallback_cache_dir = std::filesystem::temp_directory_path() / "tessera-cache";
  CHECK_USER(!config.data.eval.empty() || config.data.eval_fraction > 0,
             "[eval] {} names no evaluation data; set data.eval or data.eval_fraction",
             config.source);
  std::vector<std::string> report;
  std::shared_ptr<const Dataset> dataset;
  if (config.data.eval.empty()) {
    PreparedData prepared = prepare_data(config.data, settings);
    dataset = prepared.eval;
    report = prepared.report;
  } else {
    dataset = prepare_sources(config.data.eval, config.data, settings, &report);
  }
  for (const std::string& line : report) log::info("{}", line);

  // Only the layers are split here: a run's stages would wait for each other.
  config.parallel.pipeline = config.parallel.virtual_stages = 1;
  config.parallel.pipeline_schedule = "auto";
  const int tensor = static_cast<int>(config.parallel.tensor);
  const int ranks = tensor * static_cast<int>(config.parallel.context) * options.data_parallel;
  EvaluationResult result;
  run_local_ranks(
      ranks, config.run.device,
      [&](int rank, std::unique_ptr<Communicator> world, BackendContext& context) {
        RunConfig resolved = config;
        resolve(resolved, ranks, context.device().kind == DeviceKind::kCuda);
        const MeshShape shape = mesh_shape(resolved, ranks);
        const ProcessMesh mesh(std::move(world), shape);
        LoaderSettings loader_settings;
        loader_settings.micro_batch_size = resolved.train.micro_batch_size;
        loader_settings.dp_rank = mesh.data().rank();
        loader_settings.dp_size = mesh.data().size();
        loader_settings.shuffle = false;
        loader_settings.vocab_size = hf.model.vocab_size;
        DataLoader loader(dataset, loader_settings);
        RuntimeOptions runtime_settings = runtime_options(resolved, shape, loader.max_documents());
        runtime_settings.params.trains = false;
        runtime_settings.params.zero = 0;
        runtime_settings.overlap = false;
        const RuntimeMemory memory =
            measure_runtime(context.capabilities(), shape, mesh.world().rank(), hf.model,
                            runtime_settings, [](ModelRuntime& dry) { dry_run_evaluation(dry); });
        ModelRuntime runtime(context, mesh, hf.model, runtime_settings, memory);
        load_pretrained_weights(runtime, config, tokenizer, rank == 0);
        BatchUploader uploader(runtime);
        const EvaluationResult mine = evaluate(runtime, uploader, loader, {}, options.token_losses);
        if (rank == 0) result = mine;
      });
  if (options.json) {
    nlohmann::ordered_json json;
    json["loss"] = result.loss();
    json["target_tokens"] = result.target_tokens;
    json["perplexity"] = std::exp(result.loss());
    if (options.token_losses) json["token_losses"] = result.token_losses;
    std::printf("%s\n", json.dump().c_str());
  } else {
    std::printf("loss %.6f  perplexity %.4f  target tokens %lld\n", result.loss(),
                std::exp(result.loss()), static_cast<long long>(result.target_tokens));
  }
  return 0;
}

}  // namespace

void add_eval_command(CLI::App& app, int& code) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("eval", "Loss, target tokens and perplexity of a model on data");
  command->add_option("config", options->config, "Run configuration (its model and data.eval)");
  command->add_option("--set", options->overrides, "section.key=value, over the file");
  command->add_option("--model", options->model, "Hugging Face folder, instead of a configuration");
  command->add_option("--data", options->data, "Files, folders or patterns to evaluate on");
  command->add_option("--tokenizer", options->tokenizer,
                      "Folder or tokenizer.json, or `bytes`; the model's own by default");
  command
      ->add_option("--labels", options->labels, "Of pre-tokenised rows: auto, aligned or shifted")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "aligned", "shifted"}));
  command->add_option("--sequence-length", options->sequence_length,
                      "Tokens in a row; the model's longest by default");
  command->add_option("--micro-batch-size", options->micro_batch_size, "Rows at once")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--tensor", options->tensor, "Ranks that share each layer")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  command->add_option("--context", options->context, "Ranks that share the tokens of each row")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  command
      ->add_option("--data-parallel", options->data_parallel,
                   "Copies of the model that share the rows")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  command->add_option("--device", options->device, "auto, cuda or cpu")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "cuda", "cpu"}));
  command->add_option("--compute", options->compute, "auto, bf16 or fp32")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "bf16", "fp32"}));
  command->add_flag("--token-losses", options->token_losses,
                    "With --json: the loss of every token, row by row");
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([options, &code] { code = run(*options); });
}

}  // namespace tessera
