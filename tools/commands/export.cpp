// tessera export: a checkpoint, or a model in another number format, as a Hugging Face folder.
// Works tensor by tensor in host memory, so a model of any size can be exported on any machine.
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/safetensors_writer.h"
#include "engine/core/error.h"
#include "engine/core/log.h"
#include "engine/device/stream.h"
#include "data/tokenizer/tokenizer_files.h"
#include "engine/train/run_setup.h"
#include "models/hf/names.h"
#include "models/weights.h"
#include "tools/commands/command.h"
#include "tools/commands/model_runner.h"

namespace tessera {
namespace {

struct Options {
  std::string checkpoint;
  std::string model;
  std::string output;
  std::string dtype;
};

std::optional<DType> dtype_option(const std::string& name) {
  if (name == "bf16") return DType::kBF16;
  if (name == "fp16") return DType::kF16;
  if (name == "fp32") return DType::kF32;
  return std::nullopt;
}

// Fills `values` with the whole tensor as `dtype`.
using ReadTensor = std::function<void(const HfTensor&, DType, std::vector<char>&)>;

void write_folder(const Options& options, const HfConfig& hf, DType dtype,
                  const TokenizerFiles& tokenizer, const ReadTensor& read) {
  create_folders(options.output, "export");
  SafetensorsFolderWriter writer(options.output, export_specs(hf.model, dtype));
  std::vector<char> values;
  for (const HfTensor& tensor : hf_tensors(hf.model)) {
    read(tensor, dtype, values);
    writer.write(tensor.name, values.data(), values.size());
  }
  write_hf_config(options.output, hf.model, &hf);
  write_tokenizer_files(tokenizer, options.output);
  writer.commit();
  log::info("{} holds {} tensors as {}", options.output, hf_tensors(hf.model).size(),
            name_of(dtype));
}

std::int64_t elements_of(const HfTensor& tensor) {
  std::int64_t count = 1;
  for (const std::int64_t dim : tensor.shape) count *= dim;
  return count;
}

// The tokenizer of the run, with the tokens that it added; no files where there was none.
TokenizerFiles tokenizer_of(const nlohmann::json& metadata) {
  const auto source = metadata.at("tokenizer").get<std::string>();
  if (source.empty()) return {};
  if (source != "bytes" && !std::filesystem::exists(source)) {
    log::warning("[export] the tokenizer {} is no longer there; the folder gets none", source);
    return {};
  }
  return load_tokenizer(source, metadata.value("add_tokens", std::vector<std::string>{}))
      .tokenizer->files();
}

int export_checkpoint(const Options& options) {
  std::filesystem::path path = options.checkpoint;
  if (!path.filename().string().starts_with("step-")) {
    const std::filesystem::path root =
        std::filesystem::is_directory(path / "checkpoints") ? path / "checkpoints" : path;
    const auto latest = find_latest_checkpoint(root);
    CHECK_USER(latest.has_value(), "[export] {} holds no complete checkpoint", root.string());
    path = *latest;
  }
  const CheckpointReader reader(path);
  const auto metadata = nlohmann::json::parse(reader.metadata());
  const HfConfig hf =
      parse_hf_config(metadata.at("model_config").get<std::string>(),
                      metadata.at("generation_config").get<std::string>(), path.string());
  const auto context = make_context(Device{});
  const auto stream = context->make_stream("export");
  const DType dtype =
      dtype_option(options.dtype)
          .value_or(metadata.at("compute").get<std::string>() == "fp32" ? DType::kF32
                                                                        : DType::kBF16);
  write_folder(options, hf, dtype, tokenizer_of(metadata),
               [&](const HfTensor& tensor, DType wanted, std::vector<char>& values) {
                 const std::int64_t count = elements_of(tensor);
                 values.resize(static_cast<std::size_t>(count) * size_of(wanted));
                 NamedState state;
                 state.name = "weight/" + tensor.name;
                 state.dtype = wanted;
                 const std::int64_t rows = tensor.shape[0];
                 const std::int64_t cols = tensor.shape.size() == 2 ? tensor.shape[1] : 1;
                 state.shape = tensor.shape.size() == 2 ? Shape{rows, cols} : Shape{rows};
                 state.pieces.push_back(
                     {0, rows, 0, cols, Tensor(values.data(), wanted, Shape{count}, Device{})});
                 reader.read(state, *stream);
               });
  return 0;
}

int export_folder(const Options& options) {
  const LoadedModel model = open_model(options.model);
  std::error_code error;
  CHECK_USER(!std::filesystem::equivalent(options.model, options.output, error),
             "[export] --output {} is the model's own folder; choose another", options.output);
  const SafetensorsFolder folder(model.folder);
  const HfNameMap names = match_hf_tensors(model.hf.model, folder);
  const DType dtype =
      dtype_option(options.dtype).value_or(model.hf.model.file_dtype.value_or(DType::kBF16));
  const TokenizerFiles tokenizer = std::filesystem::exists(model.folder / "tokenizer.json")
                                       ? read_tokenizer_files(model.folder)
                                       : TokenizerFiles{};
  write_folder(
      options, model.hf, dtype, tokenizer,
      [&](const HfTensor& tensor, DType wanted, std::vector<char>& values) {
        const SafetensorsFolder::Entry& entry = folder.get(names.file_name_of.at(tensor.name));
        const std::int64_t count = elements_of(tensor);
        std::vector<char> raw(static_cast<std::size_t>(count) * size_of(*entry.tensor->dtype));
        entry.file->read_elements(*entry.tensor, 0, count, raw.data());
        values.resize(static_cast<std::size_t>(count) * size_of(wanted));
        convert_elements(raw.data(), *entry.tensor->dtype, values.data(), wanted, count);
      });
  return 0;
}

}  // namespace

void add_export_command(CLI::App& app, int& code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "export", "Write a Hugging Face folder from a checkpoint or another model folder");
  CLI::Option* checkpoint = command->add_option("--checkpoint", options->checkpoint,
                                                "Checkpoint step-*, or a run folder (its latest)");
  CLI::Option* model = command->add_option("--model", options->model, "Hugging Face folder");
  checkpoint->excludes(model);
  command->add_option("--output", options->output, "Folder to write")->required();
  command
      ->add_option("--dtype", options->dtype, "bf16, fp16 or fp32; as trained or stored by default")
      ->check(CLI::IsMember({"bf16", "fp16", "fp32"}));
  command->callback([options, &code] {
    CHECK_USER(!options->checkpoint.empty() || !options->model.empty(),
               "[export] say what to export: --checkpoint DIR or --model DIR");
    code = options->checkpoint.empty() ? export_folder(*options) : export_checkpoint(*options);
  });
}

}  // namespace tessera
