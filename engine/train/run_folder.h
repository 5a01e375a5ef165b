// The folder of a run: config.yaml, metrics.jsonl, events.jsonl, logs, checkpoints, exports, final.
// Rank 0 writes; the other ranks only log to logs/rank-NNNNN.log.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/train/quant_monitor.h"
#include "engine/train/tensorboard_writer.h"

namespace tessera {

struct TrainRow {
  std::int64_t step = 0;  // finished updates, from 1
  double epoch = 0;
  double loss = 0;
  double grad_norm = 0;   // before clipping
  double learning_rate = 0;
  std::int64_t target_tokens = 0;
  std::int64_t tokens_total = 0;
  double step_seconds = 0;
  double tokens_per_second = 0;
  double tokens_per_second_per_gpu = 0;
  std::optional<double> mfu;  // share of the device's peak; absent where that is unknown
  // The first rank's. GPU: how much less memory is free on the device than before the run's first
  // allocation, other processes' included. CPU: the arenas as allocated, since they never grow.
  std::uint64_t memory_peak_bytes = 0;
  bool skipped = false;       // the update was not applied
  std::vector<std::pair<std::string, double>> parameter_norms;  // of gradients, where log.per_layer is on
};

struct EvalRow {
  std::int64_t step = 0;
  double loss = 0;
  std::int64_t target_tokens = 0;
  std::string source;
};

class RunFolder {
 public:
  explicit RunFolder(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path checkpoints() const { return path_ / "checkpoints"; }
  std::filesystem::path exports() const { return path_ / "exports"; }
  std::filesystem::path final_model() const { return path_ / "final"; }

  // Rank 0: removes what an earlier run wrote into the folder, and nothing else. kUser if the path is
  // not a folder, kTransient if something cannot be removed.
  void clear() const;
  // Rank 0: creates the folder and opens its files for appending, with `tensorboard` an event file too.
  // kTransient if it cannot be written.
  void open(bool tensorboard = false);
  void write_config(const std::string& yaml);
  void write(const TrainRow& row);
  void write(const EvalRow& row);
  // A row of kind fp8: of each layer the lost shares of its input and of its gradient.
  void write(std::int64_t step, const std::vector<QuantLosses>& losses);
  // A line of events.jsonl: kind, step, text and the time.
  void write_event(const std::string& kind, std::int64_t step, const std::string& text);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  using File = std::unique_ptr<std::FILE, Close>;
  File open_file(const char* name) const;
  void append(std::FILE* file, const char* name, const std::string& line) const;

  std::filesystem::path path_;
  File metrics_;
  File events_;
  std::unique_ptr<TensorboardWriter> tensorboard_;
};

}  // namespace tessera
