// From the configuration to data that can be loaded: files are tokenised once into a cache that all
// processes of a job share, and packed rows are indexed beside them. Every step is keyed by what it
// depends on (file, tokenizer, settings), so a second run, a resumed one and a changed one do only
// what is not there yet. A killed preparation repeats at most the file or file range it was in.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/data_options.h"
#include "data/dataset.h"
#include "data/encoder.h"

namespace tessera {

struct PrepareProgress {
  std::string phase;      // "tokenising corpus/a.jsonl", "packing", "waiting for another process"
  std::int64_t done = 0;  // bytes of the input files; 0 of 0 where unknown
  std::int64_t total = 0;
};

struct PrepareSettings {
  std::int64_t sequence_length = 0;
  std::int64_t vocab_size = 0;  // of the model; ids at or above it are refused; 0: unchecked
  const TextEncoder* encoder = nullptr;  // may be null where all records are tokenised already
  std::filesystem::path
      fallback_cache_dir;  // used when neither cache_dir nor a home folder is there
  int threads = 0;         // 0: all cores
  // Called by the thread that prepares. What it throws ends the preparation; what is complete is
  // kept.
  std::function<void(const PrepareProgress&)> progress;
};

struct PreparedData {
  std::shared_ptr<const Dataset> train;  // null without training sources
  std::shared_ptr<const Dataset> eval;   // null without evaluation data
  // What was read, skipped, cut and split, and how full the rows are: a line or two per source.
  std::vector<std::string> report;
};

// Every process (or thread) of a job calls this with the same arguments; on shared storage one
// works and the others wait for it. Throws kUser for bad input, unclear labels, and data without a
// row or without a target.
PreparedData prepare_data(const DataOptions& options, const PrepareSettings& settings);

// Evaluation sources alone: for `tessera eval --data`.
std::shared_ptr<const Dataset> prepare_sources(const std::vector<DataSource>& sources,
                                               const DataOptions& options,
                                               const PrepareSettings& settings,
                                               std::vector<std::string>* report = nullptr);

// The documents of each source, tokenised but not packed (settings.sequence_length is not used).
std::vector<std::shared_ptr<const DocumentSet>> prepare_documents(
    const std::vector<DataSource>& sources, const DataOptions& options,
    const PrepareSettings& settings, std::vector<std::string>* report = nullptr);

// data.cache_dir, else $XDG_CACHE_HOME/tessera, else ~/.cache/tessera, else `fallback`.
std::filesystem::path data_cache_dir(const DataOptions& options,
                                     const std::filesystem::path& fallback);

}  // namespace tessera
