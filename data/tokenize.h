// From files to a token store: records are read by one thread, parsed and tokenised by
// others, and written in order, so the store is the same for any number of threads.
#pragma once

#include <cstdint>
#include <functional>

#include "data/encoder.h"
#include "data/readers/record.h"
#include "data/readers/record_reader.h"
#include "data/token_store.h"

namespace tessera {

struct TokenizeSettings {
  const TextEncoder* encoder = nullptr;  // may be null where every record is tokenised already
  ColumnNames columns;
  bool skip_bad_rows = false;
  std::int64_t vocab_size = 0;  // of the model: an id at or above it is an error; 0: not checked
  std::int64_t max_rows = 0;    // of the shard; stop after this many records; 0: all
  int threads = 1;
  std::function<void(std::int64_t stored_bytes)> progress;  // of the shard, now and then
};

// Whether the ids need four bytes in a store.
bool needs_wide_tokens(const TokenizeSettings& settings);

// What becomes one store: a range of a large file, or several small files.
using Shard = std::vector<FileRange>;

// Writes the store `path` (without suffix) and commits it. Throws kUser with file:line for a bad
// record and for token ids outside of the vocabulary.
void tokenize_shard(const Shard& shard, const TokenizeSettings& settings,
                    const std::filesystem::path& path);

// Adds what `record` says about its labels.
void add_label_evidence(const Record& record, const RecordPlace& place, LabelEvidence& evidence);

}  // namespace tessera
