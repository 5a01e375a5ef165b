// tessera generate: continues a prompt.
#include <cstdio>
#include <mutex>
#include <optional>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "data/tokenizer/tokenizer.h"
#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/infer/generator.h"
#include "models/weights.h"
#include "tools/commands/command.h"
#include "tools/commands/model_runner.h"

namespace tessera {
namespace {

struct Options {
  std::string model;
  std::string tokenizer;
  std::optional<std::string> prompt;
  std::vector<std::int32_t> prompt_ids;
  std::int64_t max_new_tokens = 256;
  std::int64_t max_length = 0;
  bool ignore_eos = false;
  bool json = false;
  int tensor = 1;
  std::string device = "auto";
  std::string compute = "auto";
  SamplingOptions sampling;
};

int run(const Options& options) {
  const LoadedModel model = open_model(options.model);
  const ModelConfig& config = model.hf.model;
  for (const std::string& warning : model.hf.warnings) log::warning("{}", warning);
  std::filesystem::path tokenizer_path = options.tokenizer;
  if (tokenizer_path.empty() && std::filesystem::exists(model.folder / "tokenizer.json")) {
    tokenizer_path = model.folder;
  }
  std::optional<Tokenizer> tokenizer;
  if (options.tokenizer == "bytes") {
    tokenizer.emplace(Tokenizer::bytes());
  } else if (!tokenizer_path.empty()) {
    tokenizer.emplace(Tokenizer::load(tokenizer_path));
  }
  std::vector<std::int32_t> prompt = options.prompt_ids;
  if (prompt.empty()) {
    CHECK_USER(tokenizer.has_value(),
               "[generate] {} has no tokenizer.json; name one with --tokenizer (or `bytes`), or give "
               "--prompt-ids", options.model);
    prompt = tokenizer->encode(options.prompt.value_or(""), true);
    if (prompt.empty() && config.bos_token_id) prompt.push_back(static_cast<std::int32_t>(*config.bos_token_id));
  }
  std::vector<std::int32_t> stop_tokens;
  if (!options.ignore_eos) {
    for (const std::int64_t id : model.hf.stop_token_ids) stop_tokens.push_back(static_cast<std::int32_t>(id));
    if (tokenizer && tokenizer->special_ids().eos >= 0) stop_tokens.push_back(tokenizer->special_ids().eos);
  }
  GeneratorOptions generator_options;
  const auto wanted = static_cast<std::int64_t>(prompt.size()) + options.max_new_tokens;
  generator_options.max_length = options.max_length > 0 ? options.max_length : std::max<std::int64_t>(2, wanted);
  if (generator_options.max_length > config.max_position_embeddings) {
    log::warning("[generate] {} tokens are asked for; the model was made for {}", generator_options.max_length,
                 config.max_position_embeddings);
  }

  const SafetensorsFolder folder(model.folder);
  const HfNameMap names = match_hf_tensors(config, folder);
  std::vector<std::int32_t> generated;
  run_local_ranks(options.tensor, options.device,
                  [&](int rank, std::unique_ptr<Communicator> world, BackendContext& context) {
                    MeshShape shape;
                    shape.tensor = options.tensor;
                    const ProcessMesh mesh(std::move(world), shape);
                    GeneratorOptions rank_options = generator_options;
                    rank_options.compute = compute_dtype_of(options.compute, context.device());
                    Generator generator(context, mesh, config, rank_options);
                    load_weights(generator.runtime(), folder, names);
                    // The text is printed as far as it can no longer change: a character may be
                    // spread over several tokens.
                    std::vector<std::int32_t> shown;
                    std::size_t printed = 0;
                    const auto show = [&](std::int32_t token) {
                      if (rank != 0 || options.json || !tokenizer) return true;
                      shown.push_back(token);
                      const std::string text = tokenizer->decode(shown, true);
                      if (text.ends_with("\xEF\xBF\xBD")) return true;
                      std::fwrite(text.data() + printed, 1, text.size() - printed, stdout);
                      std::fflush(stdout);
                      printed = text.size();
                      return true;
                    };
                    auto tokens = generator.generate(prompt, options.max_new_tokens, stop_tokens,
                                                     options.sampling, show);
                    if (rank == 0) generated = std::move(tokens);
                  });
  if (options.json) {
    nlohmann::ordered_json json;
    json["prompt_ids"] = prompt;
    json["ids"] = generated;
    if (tokenizer) json["text"] = tokenizer->decode(generated, true);
    std::printf("%s\n", json.dump().c_str());
  } else if (tokenizer) {
    std::printf("\n");
  } else {
    for (const std::int32_t id : generated) std::printf("%d ", id);
    std::printf("\n");
  }
  return 0;
}

}  // namespace

void add_generate_command(CLI::App& app, int& code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("generate", "Continue a prompt with a Hugging Face model folder");
  command->add_option("--model", options->model, "Hugging Face folder")->required();
  command->add_option("--tokenizer", options->tokenizer, "Folder or tokenizer.json, or `bytes`; the model's own by default");
  command->add_option("--prompt", options->prompt, "Text to continue");
  command->add_option("--prompt-ids", options->prompt_ids, "Token ids to continue, instead of a text")->delimiter(',');
  command->add_option("--max-new-tokens", options->max_new_tokens, "Most tokens to add")->capture_default_str()->check(CLI::PositiveNumber);
  command->add_option("--max-length", options->max_length, "Room for prompt and answer; as much as needed by default");
  command->add_option("--temperature", options->sampling.temperature, "0: the most likely token each time")->capture_default_str();
  command->add_option("--top-k", options->sampling.top_k, "Choose among the k most likely tokens; 0: all")->capture_default_str();
  command->add_option("--top-p", options->sampling.top_p, "Choose among the most likely tokens that together have this probability")->capture_default_str();
  command->add_option("--seed", options->sampling.seed, "Of the choices when temperature is above 0")->capture_default_str();
  command->add_flag("--ignore-eos", options->ignore_eos, "Go on past the end token");
  command->add_option("--tensor", options->tensor, "Ranks that share each layer")->capture_default_str()->check(CLI::Range(1, 64));
  command->add_option("--device", options->device, "auto, cuda or cpu")->capture_default_str()->check(CLI::IsMember({"auto", "cuda", "cpu"}));
  command->add_option("--compute", options->compute, "auto, bf16 or fp32")->capture_default_str()->check(CLI::IsMember({"auto", "bf16", "fp32"}));
  command->add_flag("--json", options->json, "Print one JSON object instead of the text");
  command->callback([options, &code] { code = run(*options); });
}

}  // namespace tessera
