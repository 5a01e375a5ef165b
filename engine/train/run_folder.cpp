#include "engine/train/run_folder.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>

#include <nlohmann/json.hpp>

#include "checkpoint/posix_file.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no NaN; null marks a value that was not finite.
Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

std::string utc_now() {
  char text[32];
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  std::strftime(text, sizeof text, "%FT%TZ", &parts);
  return text;
}

}  // namespace

RunFolder::RunFolder(std::filesystem::path path) : path_(std::move(path)) {}

void RunFolder::clear() const {
  std::error_code error;
  if (!std::filesystem::exists(path_, error)) return;
  CHECK_USER(std::filesystem::is_directory(path_, error),
             "[run] run.dir {} is there and is not a folder; choose another", path_.string());
  for (const char* name : {"metrics.jsonl", "events.jsonl", "config.yaml", "log.txt", "logs", "tensorboard",
                           "checkpoints", "exports", "final"}) {
    std::filesystem::remove_all(path_ / name, error);
    if (error) {
      TESSERA_FAIL(ErrorKind::kTransient, "[run] {} cannot be removed: {}", (path_ / name).string(),
                   error.message());
    }
  }
}

void RunFolder::open(bool tensorboard) {
  std::error_code error;
  std::filesystem::create_directories(path_ / "logs", error);
  if (error) {
    TESSERA_FAIL(ErrorKind::kTransient, "[run] the run folder {} cannot be created: {}; set run.dir to a "
                 "folder that can be written to", path_.string(), error.message());
  }
  metrics_ = open_file("metrics.jsonl");
  events_ = open_file("events.jsonl");
  if (tensorboard) tensorboard_ = std::make_unique<TensorboardWriter>(path_ / "tensorboard");
}

RunFolder::File RunFolder::open_file(const char* name) const {
  const std::filesystem::path file = path_ / name;
  File opened(std::fopen(file.c_str(), "a"));
  if (!opened) {
    TESSERA_FAIL(ErrorKind::kTransient, "[run] {} cannot be written: {}", file.string(), std::strerror(errno));
  }
  return opened;
}

void RunFolder::append(std::FILE* file, const char* name, const std::string& line) const {
  if (std::fputs((line + "\n").c_str(), file) < 0 || std::fflush(file) != 0) {
    TESSERA_FAIL(ErrorKind::kTransient, "[run] {} cannot be written: {}", (path_ / name).string(),
                 std::strerror(errno));
  }
}

void RunFolder::write_config(const std::string& yaml) { replace_file(path_ / "config.yaml", yaml, "run"); }

void RunFolder::write(const TrainRow& row) {
  Json json;
  json["kind"] = "train";
  json["step"] = row.step;
  json["epoch"] = number(row.epoch);
  json["loss"] = number(row.loss);
  json["grad_norm"] = number(row.grad_norm);
  json["learning_rate"] = row.learning_rate;
  json["target_tokens"] = row.target_tokens;
  json["tokens_total"] = row.tokens_total;
  json["step_seconds"] = row.step_seconds;
  json["tokens_per_second"] = number(row.tokens_per_second);
  json["tokens_per_second_per_gpu"] = number(row.tokens_per_second_per_gpu);
  json["mfu"] = row.mfu ? number(*row.mfu) : Json(nullptr);
  json["memory_peak_bytes"] = row.memory_peak_bytes;
  if (row.skipped) json["skipped"] = true;
  for (const auto& [name, norm] : row.parameter_norms) json["grad_norms"][name] = number(norm);
  append(metrics_.get(), "metrics.jsonl", json.dump());
  if (!tensorboard_) return;
  TensorboardWriter::Scalars scalars{{"train/loss", row.loss},
                                     {"train/grad_norm", row.grad_norm},
                                     {"train/learning_rate", row.learning_rate},
                                     {"train/tokens_per_second", row.tokens_per_second}};
  if (row.mfu) scalars.emplace_back("train/mfu", *row.mfu);
  for (const auto& [name, norm] : row.parameter_norms) scalars.emplace_back("grad_norm/" + name, norm);
  tensorboard_->write(row.step, scalars);
}

void RunFolder::write(const EvalRow& row) {
  Json json;
  json["kind"] = "eval";
  json["step"] = row.step;
  json["loss"] = number(row.loss);
  json["target_tokens"] = row.target_tokens;
  json["perplexity"] = number(std::exp(row.loss));
  json["source"] = row.source;
  append(metrics_.get(), "metrics.jsonl", json.dump());
  if (tensorboard_) tensorboard_->write(row.step, {{"eval/loss", row.loss}, {"eval/perplexity", std::exp(row.loss)}});
}

void RunFolder::write(std::int64_t step, const std::vector<QuantLosses>& losses) {
  Json json;
  json["kind"] = "fp8";
  json["step"] = step;
  QuantLosses worst;
  for (const QuantLosses& layer : losses) {
    worst.input = std::max(worst.input, layer.input);
    worst.gradient = std::max(worst.gradient, layer.gradient);
    json["lost"][layer.layer] = {{"input", layer.input}, {"gradient", layer.gradient}};
  }
  append(metrics_.get(), "metrics.jsonl", json.dump());
  if (!tensorboard_) return;
  tensorboard_->write(step, {{"fp8/worst_input_lost", worst.input}, {"fp8/worst_gradient_lost", worst.gradient}});
}

void RunFolder::write_event(const std::string& kind, std::int64_t step, const std::string& text) {
  Json json;
  json["time"] = utc_now();
  json["kind"] = kind;
  json["step"] = step;
  json["text"] = text;
  append(events_.get(), "events.jsonl", json.dump());
}

}  // namespace tessera
