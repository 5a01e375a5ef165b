// tessera diff: where two runs part: configuration, metrics, checkpoints.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <set>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/checkpoint_reader.h"
#include "engine/core/error.h"
#include "engine/device/buffer.h"
#include "engine/train/run_config.h"
#include "tools/commands/command.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// Columns that the same run has again; times and rates are never the same.
constexpr const char* kColumns[] = {"loss", "grad_norm", "learning_rate", "target_tokens", "tokens_total"};

struct Run {
  fs::path path;
  std::map<std::string, std::string> config;
  std::map<std::int64_t, nlohmann::json> train;  // the last row of each step
  std::map<std::int64_t, nlohmann::json> eval;
  std::map<std::int64_t, fs::path> checkpoints;  // complete ones
};

Run read_run(const std::string& folder) {
  Run run;
  run.path = folder;
  CHECK_USER(fs::is_directory(run.path), "[diff] {} is no run folder", folder);
  const fs::path config_file = run.path / "config.yaml";
  CHECK_USER(fs::exists(config_file), "[diff] {} holds no config.yaml: it is no run folder", folder);
  RunConfig config = load_run_config(config_file.string(), {});
  for (const FieldRecord& field : list_fields([&](FieldVisitor& v) { config.visit(v); })) {
    if (field.name != "run.dir") run.config[field.name] = field.value;
  }
  std::ifstream metrics(run.path / "metrics.jsonl");
  int line_number = 0;
  for (std::string line; std::getline(metrics, line);) {
    ++line_number;
    nlohmann::json row = nlohmann::json::parse(line, nullptr, false);
    // The last line of a run that is being written, or was killed, may be cut.
    if (row.is_discarded() && metrics.peek() == std::char_traits<char>::eof()) break;
    CHECK_USER(row.is_object() && row.contains("kind") && row.contains("step"), "[diff] {}: line {} is no row of metrics",
               (run.path / "metrics.jsonl").string(), line_number);
    const std::int64_t step = row.at("step");
    if (row.at("kind") == "train") run.train[step] = row;
    if (row.at("kind") == "eval") run.eval[step] = row;
  }
  for (const CheckpointInfo& info : list_checkpoints(run.path / "checkpoints")) {
    if (info.is_complete()) run.checkpoints.emplace(info.step, info.path);
  }
  return run;
}

std::string text_of(const nlohmann::json& row, const std::string& column) {
  return row.contains(column) ? row.at(column).dump() : "missing";
}

// Of a column: the first step that differs and the largest relative difference; nothing where all is equal.
Json compare_column(const std::map<std::int64_t, nlohmann::json>& a, const std::map<std::int64_t, nlohmann::json>& b,
                    const std::string& column) {
  Json result;
  double largest = 0;
  std::int64_t largest_step = 0;
  for (const auto& [step, row] : a) {
    const auto other = b.find(step);
    if (other == b.end()) continue;
    const std::string left = text_of(row, column);
    const std::string right = text_of(other->second, column);
    if (left == right) continue;
    if (result.is_null()) result = {{"first_step", step}, {"a", left}, {"b", right}};
    const auto number = [&](const nlohmann::json& from) {
      return from.contains(column) && from.at(column).is_number() ? from.at(column).get<double>() : std::nan("");
    };
    const double x = number(row), y = number(other->second);
    const double scale = std::max(std::abs(x), std::abs(y));
    const double difference = scale > 0 ? std::abs(x - y) / scale : 0;
    // What is no number on one side alone differs by more than any number.
    const double shown = std::isnan(difference) ? INFINITY : difference;
    if (shown >= largest) largest = shown, largest_step = step;
  }
  if (!result.is_null()) {
    result["largest_relative"] = std::isinf(largest) ? Json("not a number") : Json(largest);
    result["largest_step"] = largest_step;
  }
  return result;
}

// "model.layers.2.x" before "model.layers.10.x", weights before moments.
std::vector<std::string> in_order(const std::map<std::string, CheckpointTensor, std::less<>>& tensors) {
  const auto key = [](const std::string& name) {
    std::string result = name.starts_with("weight/") ? "0" : "1";
    for (std::size_t i = 0; i < name.size();) {
      std::size_t end = i;
      while (end < name.size() && std::isdigit(static_cast<unsigned char>(name[end]))) ++end;
      if (end > i) {
        result += std::string(8 - std::min<std::size_t>(8, end - i), '0') + name.substr(i, end - i);
        i = end;
      } else {
        result += name[i++];
      }
    }
    return result;
  };
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors) names.push_back(name);
  std::sort(names.begin(), names.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
  return names;
}

std::vector<float> read_tensor(const CheckpointReader& reader, const std::string& name, const CheckpointTensor& tensor,
                               Stream& stream) {
  std::vector<float> values(static_cast<std::size_t>(tensor.shape.numel()));
  NamedState state;
  state.name = name;
  state.dtype = tensor.dtype;
  state.shape = tensor.shape;
  StatePiece piece;
  piece.rows = tensor.rows();
  piece.cols = tensor.cols();
  piece.data = Tensor(values.data(), DType::kF32, Shape{tensor.shape.numel()}, Device{});
  state.pieces.push_back(piece);
  reader.read(state, stream);
  return values;
}

// Tensor by tensor, in fp32: exact for the formats that a checkpoint holds.
Json compare_checkpoints(const fs::path& left, const fs::path& right) {
  const CheckpointReader a(left), b(right);
  const auto context = make_context(Device{});
  const auto stream = context->make_stream("diff");
  Json result = {{"step", a.step()}, {"tensors", 0}, {"different", Json::array()}, {"only_a", Json::array()},
                 {"only_b", Json::array()}};
  int compared = 0;
  for (const std::string& name : in_order(a.tensors())) {
    const CheckpointTensor& tensor = a.tensors().find(name)->second;
    const auto other = b.tensors().find(name);
    if (other == b.tensors().end()) {
      result["only_a"].push_back(name);
      continue;
    }
    ++compared;
    if (!(other->second.shape == tensor.shape)) {
      result["different"].push_back({{"name", name}, {"shapes", to_string(tensor.shape) + " | " + to_string(other->second.shape)}});
      continue;
    }
    const std::vector<float> x = read_tensor(a, name, tensor, *stream);
    const std::vector<float> y = read_tensor(b, name, other->second, *stream);
    std::int64_t count = 0;
    std::int64_t first = -1;
    double largest = 0, squares = 0, size = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      size += static_cast<double>(x[i]) * x[i];
      if (x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i]))) continue;
      if (first < 0) first = static_cast<std::int64_t>(i);
      ++count;
      const double difference = std::abs(static_cast<double>(x[i]) - y[i]);
      largest = std::isnan(difference) ? INFINITY : std::max(largest, difference);
      squares += difference * difference;
    }
    if (count == 0) continue;
    const auto finite = [](double value) { return std::isfinite(value) ? Json(value) : Json("not a number"); };
    result["different"].push_back({{"name", name},
                                   {"elements", count},
                                   {"of", tensor.shape.numel()},
                                   {"first_row", first / tensor.cols()},
                                   {"first_column", first % tensor.cols()},
                                   {"largest", finite(largest)},
                                   {"relative_norm", finite(size > 0 ? std::sqrt(squares / size) : std::sqrt(squares))}});
  }
  for (const auto& [name, tensor] : b.tensors()) {
    if (!a.contains(name)) result["only_b"].push_back(name);
  }
  result["tensors"] = compared;
  return result;
}

Json compare(const Run& a, const Run& b) {
  Json json;
  json["config"] = Json::array();
  std::set<std::string> names;
  for (const auto& [name, value] : a.config) names.insert(name);
  for (const auto& [name, value] : b.config) names.insert(name);
  const auto value_of = [](const Run& run, const std::string& name) {
    const auto found = run.config.find(name);
    return found == run.config.end() || found->second.empty() ? std::string("unset") : found->second;
  };
  for (const std::string& name : names) {
    if (value_of(a, name) == value_of(b, name)) continue;
    json["config"].push_back({{"key", name}, {"a", value_of(a, name)}, {"b", value_of(b, name)}});
  }
  std::int64_t common = 0, last = 0;
  for (const auto& [step, row] : a.train) {
    if (!b.train.contains(step)) continue;
    ++common;
    last = step;
  }
  json["steps"] = {{"common", common},
                   {"last_common", last},
                   {"only_a", static_cast<std::int64_t>(a.train.size()) - common},
                   {"only_b", static_cast<std::int64_t>(b.train.size()) - common}};
  json["train"] = Json::object();
  for (const char* column : kColumns) {
    const Json difference = compare_column(a.train, b.train, column);
    if (!difference.is_null()) json["train"][column] = difference;
  }
  const Json eval = compare_column(a.eval, b.eval, "loss");
  if (!eval.is_null()) json["eval"] = eval;
  for (auto it = a.checkpoints.rbegin(); it != a.checkpoints.rend(); ++it) {
    const auto other = b.checkpoints.find(it->first);
    if (other == b.checkpoints.end()) continue;
    json["checkpoint"] = compare_checkpoints(it->second, other->second);
    break;
  }
  const bool same_weights = !json.contains("checkpoint") ||
                            (json["checkpoint"]["different"].empty() && json["checkpoint"]["only_a"].empty() &&
                             json["checkpoint"]["only_b"].empty());
  json["equal"] = json["train"].empty() && !json.contains("eval") && same_weights;
  return json;
}

void print_column(const std::string& name, const Json& difference) {
  std::printf("%-14s parts at step %lld: %s | %s; by %s at most (relative, step %lld)\n", name.c_str(),
              static_cast<long long>(difference["first_step"].get<std::int64_t>()), difference["a"].get<std::string>().c_str(),
              difference["b"].get<std::string>().c_str(), difference["largest_relative"].dump().c_str(),
              static_cast<long long>(difference["largest_step"].get<std::int64_t>()));
}

void print(const Json& json) {
  for (const Json& key : json["config"]) {
    std::printf("config         %s: %s | %s\n", key["key"].get<std::string>().c_str(), key["a"].get<std::string>().c_str(),
                key["b"].get<std::string>().c_str());
  }
  const Json& steps = json["steps"];
  std::printf("steps          %s in both (to %s), %s in the first alone, %s in the second alone\n", steps["common"].dump().c_str(),
              steps["last_common"].dump().c_str(), steps["only_a"].dump().c_str(), steps["only_b"].dump().c_str());
  for (const auto& [column, difference] : json["train"].items()) print_column(column, difference);
  if (json.contains("eval")) print_column("eval loss", json["eval"]);
  if (json.contains("checkpoint")) {
    const Json& checkpoint = json["checkpoint"];
    const Json& different = checkpoint["different"];
    std::printf("checkpoint     step %s: %zu of %s tensors differ\n", checkpoint["step"].dump().c_str(), different.size(),
                checkpoint["tensors"].dump().c_str());
    constexpr std::size_t kShown = 5;
    for (std::size_t i = 0; i < std::min(kShown, different.size()); ++i) {
      const Json& tensor = different[i];
      if (tensor.contains("shapes")) {
        std::printf("  %s: %s\n", tensor["name"].get<std::string>().c_str(), tensor["shapes"].get<std::string>().c_str());
        continue;
      }
      std::printf("  %s: %s of %s elements, the first at [%s, %s], by %s at most (relative norm %s)\n",
                  tensor["name"].get<std::string>().c_str(), tensor["elements"].dump().c_str(), tensor["of"].dump().c_str(),
                  tensor["first_row"].dump().c_str(), tensor["first_column"].dump().c_str(), tensor["largest"].dump().c_str(),
                  tensor["relative_norm"].dump().c_str());
    }
    if (different.size() > kShown) std::printf("  and %zu more\n", different.size() - kShown);
    for (const char* side : {"only_a", "only_b"}) {
      if (checkpoint[side].empty()) continue;
      std::printf("  %zu tensors in the %s alone, such as %s\n", checkpoint[side].size(),
                  std::string(side) == "only_a" ? "first" : "second", checkpoint[side][0].get<std::string>().c_str());
    }
  } else {
    std::printf("checkpoint     none of a common step\n");
  }
  std::printf("%s\n", json["equal"].get<bool>() ? "the runs are equal" : "the runs differ");
}

}  // namespace

void add_diff_command(CLI::App& app, int& code) {
  struct Options {
    std::string a, b;
    bool json = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "diff", "Where two runs part: configuration, metrics, tensors of the newest common checkpoint; exit 1 if they do");
  command->add_option("first", options->a, "Run folder")->required();
  command->add_option("second", options->b, "Run folder")->required();
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([options, &code] {
    const Json json = compare(read_run(options->a), read_run(options->b));
    if (options->json) {
      std::printf("%s\n", json.dump().c_str());
    } else {
      print(json);
    }
    code = json["equal"].get<bool>() ? 0 : 1;
  });
}

}  // namespace tessera
