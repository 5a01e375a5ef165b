#include "engine/train/run_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "engine/core/error.h"
#include "engine/core/text.h"
#include "engine/train/availability.h"
#include "engine/train/config_problems.h"

namespace tessera {
namespace {

// Visiting only reads through a const config, but `visit` hands out references to the members.
VisitFunction visitor_of(const RunConfig& config) {
  return [&config](FieldVisitor& v) { const_cast<RunConfig&>(config).visit(v); };
}

RunConfig read_run_config(ConfigNode root, const std::string& name,
                          const std::vector<std::string>& overrides, std::vector<std::string>* notes) {
  for (const std::string& assignment : overrides) apply_override(root, assignment);

  RunConfig config;
  ConfigReading reading = collect_config(
      root, [&config](FieldVisitor& v) { config.visit(v); }, unavailable_keys());
  config.source = name;
  config.places = std::move(reading.places);

  // One report: what could not be read, and what is wrong with the rest.
  std::vector<ConfigMistake> mistakes = std::move(reading.mistakes);
  for (ConfigMistake& mistake : find_config_problems(config, reading.unreadable)) {
    mistakes.push_back(std::move(mistake));
  }
  throw_config_mistakes(std::move(mistakes));

  if (!config.run.dir) {
    config.run.dir = (std::filesystem::path("runs") / std::filesystem::path(name).stem()).string();
  }
  if (notes != nullptr) *notes = std::move(reading.notes);
  return config;
}

std::string help_of(const std::string& help, const std::vector<std::string>& choices) {
  return fmt::format("{} ({})", help, fmt::join(choices, " | "));
}

// The help of a key without the choices in `refused`: neither in its list of choices nor as a clause
// "choice: what it does" between semicolons.
std::string help_without(std::string help, const std::vector<std::string>& choices,
                         const std::vector<std::string>& refused) {
  std::vector<std::string> left;
  for (const std::string& choice : choices) {
    if (std::find(refused.begin(), refused.end(), choice) == refused.end()) left.push_back(choice);
  }
  for (const std::string& choice : refused) {
    const std::size_t begin = help.find("; " + choice + ": ");
    if (begin != std::string::npos) help.erase(begin, help.find("; ", begin + 2) - begin);
  }
  return help_of(help, left);
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

// The commented form offers only what would be accepted.
std::string without_unavailable_values(const std::string& text) {
  const RunConfig defaults;
  std::vector<std::string> lines = split_lines(text);
  for (const FieldRecord& record : describe_fields(visitor_of(defaults))) {
    const auto& choices = record.options.choices;
    std::vector<std::string> refused;
    for (const std::string& choice : choices) {
      if (is_unavailable(record.name, choice)) refused.push_back(choice);
    }
    if (refused.empty()) continue;
    const std::string before = help_of(record.help, choices);
    const std::string after = help_without(record.help, choices, refused);
    const std::string key = record.name.substr(record.name.rfind('.') + 1) + ":";
    for (std::size_t i = 0; i < lines.size(); ++i) {
      const std::size_t indent = lines[i].find_first_not_of(' ');
      if (indent == std::string::npos || lines[i].compare(indent, key.size(), key) != 0) continue;
      // Beside the key, or on comment lines of its own above it.
      if (const auto at = lines[i].find("# " + before); at != std::string::npos) {
        lines[i].replace(at + 2, before.size(), after);
        continue;
      }
      std::string joined;
      for (std::size_t first = i; first-- > 0 && joined.size() < before.size();) {
        if (lines[first].compare(0, indent + 2, std::string(indent, ' ') + "# ") != 0) break;
        const std::string part = lines[first].substr(indent + 2);
        joined = joined.empty() ? part : part + " " + joined;
        if (joined != before) continue;
        lines[first] = std::string(indent, ' ') + "# " + after;
        lines.erase(lines.begin() + static_cast<std::ptrdiff_t>(first) + 1,
                    lines.begin() + static_cast<std::ptrdiff_t>(i));
        i = first + 1;
        break;
      }
    }
  }
  return fmt::format("{}\n", fmt::join(lines, "\n"));
}

}  // namespace

void RunConfig::visit(FieldVisitor& v) {
  v.section("run", run, "The process: where it writes and what it runs on");
  v.section("model", model, "The model and its first weights");
  v.section("train", train, "What is trained, and how much");
  v.section("optimizer", optimizer, "The update rule");
  v.section("schedule", schedule, "The learning rate over the run");
  v.section("precision", precision, "Number formats");
  v.section("parallel", parallel, "How the ranks share the work");
  v.section("memory", memory, "What is kept and what is computed again");
  v.section("data", data, "What is trained on");
  v.section("eval", eval, "When the loss on held-out data is measured");
  v.section("checkpoint", checkpoint, "When and where the state is saved");
  v.section("faults", faults, "What happens when something goes wrong");
  v.section("log", log, "What is recorded");
}

std::string RunConfig::locate(const std::string& key) const {
  const auto found = places.find(key);
  return fmt::format("{} {}", found == places.end() ? source : found->second.where, key);
}

RunConfig load_run_config(const std::string& path, const std::vector<std::string>& overrides,
                          std::vector<std::string>* notes) {
  return read_run_config(parse_config_file(path), path, overrides, notes);
}

RunConfig parse_run_config(std::string_view text, const std::string& name,
                           const std::vector<std::string>& overrides, std::vector<std::string>* notes) {
  return read_run_config(parse_config_text(text, name), name, overrides, notes);
}

std::string write_run_config(const RunConfig& config, bool with_help) {
  const std::string text = write_config(visitor_of(config), with_help);
  return with_help ? without_unavailable_values(text) : text;
}

void validate(const RunConfig& config) { throw_config_mistakes(find_config_problems(config, {})); }

std::int64_t data_parallel_size(const RunConfig& config, std::int64_t ranks) {
  const ParallelOptions& p = config.parallel;
  const std::int64_t model_ranks = p.tensor * p.pipeline * p.context;
  CHECK_USER(ranks >= model_ranks && ranks % model_ranks == 0,
             "[config] {} is {}, pipeline {} and context {}: one copy of the model takes {} ranks, and {} "
             "ranks are no multiple of it. Use ranks in multiples of {}, or change the layout",
             config.locate("parallel.tensor"), p.tensor, p.pipeline, p.context, model_ranks, ranks,
             model_ranks);
  return ranks / model_ranks;
}

BatchShape batch_shape(const RunConfig& config, std::int64_t data_parallel) {
  const TrainOptions& train = config.train;
  BatchShape shape;
  shape.micro_batch_size = train.micro_batch_size;
  shape.data_parallel = data_parallel;
  const std::int64_t at_once = shape.micro_batch_size * data_parallel;
  if (train.global_batch_size) {
    CHECK_USER(*train.global_batch_size % at_once == 0,
               "[config] {} is {}; it must be a multiple of {}: train.micro_batch_size {} on {} "
               "data-parallel ranks", config.locate("train.global_batch_size"), *train.global_batch_size,
               at_once, shape.micro_batch_size, data_parallel);
    shape.gradient_accumulation_steps = *train.global_batch_size / at_once;
  } else {
    shape.gradient_accumulation_steps = train.gradient_accumulation_steps.value_or(1);
  }
  shape.global_batch_size = at_once * shape.gradient_accumulation_steps;
  return shape;
}

std::int64_t total_steps(const TrainOptions& train, std::int64_t global_batch_size,
                         std::optional<std::int64_t> rows_per_epoch) {
  CHECK(global_batch_size >= 1, "[config] a global batch of {} rows", global_batch_size);
  auto divide_up = [](std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 ? 1 : 0); };
  if (train.max_steps) return *train.max_steps;
  if (train.max_tokens) {
    // Row by row: the product of batch and length could pass 64 bits.
    return divide_up(divide_up(*train.max_tokens, train.sequence_length), global_batch_size);
  }
  CHECK(train.epochs && rows_per_epoch, "[config] the length of the run was not validated");
  CHECK_USER(*rows_per_epoch >= 1, "[config] train.epochs is set, but the training data has no rows");
  const std::int64_t steps_per_epoch = divide_up(*rows_per_epoch, global_batch_size);
  const double whole = std::floor(*train.epochs);
  const double part = *train.epochs - whole;
  const double steps = whole * static_cast<double>(steps_per_epoch) +
                       std::ceil(part * static_cast<double>(steps_per_epoch) * (1 - 1e-12));
  CHECK_USER(steps < 0x1p53, "[config] train.epochs is {}: that is more than 2^53 steps",
             format_number(*train.epochs));
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(steps));
}

void resolve(RunConfig& config, std::int64_t ranks, bool on_gpu) {
  const std::int64_t data_parallel = data_parallel_size(config, ranks);
  config.train.global_batch_size = batch_shape(config, data_parallel).global_batch_size;
  config.train.gradient_accumulation_steps.reset();
  if (config.precision.compute == "auto") config.precision.compute = on_gpu ? "bf16" : "fp32";
  if (!config.parallel.sequence_parallel) {
    config.parallel.sequence_parallel = config.parallel.tensor > 1;
  }
  if (!config.parallel.zero) {
    config.parallel.zero = data_parallel * config.parallel.context > 1 ? 1 : 0;
  }
}

}  // namespace tessera
