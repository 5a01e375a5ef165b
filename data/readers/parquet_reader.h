// Parquet files as records: the columns that a record can have (data/readers/record.h), written as
// the JSON object that a JSON lines file would hold, so that both are checked and tokenised alike.
// Needs the Arrow libraries at build time; has_parquet() says whether they were there.
#pragma once

#include <cstdint>
#include <memory>

#include "data/readers/record.h"
#include "data/readers/record_reader.h"

namespace tessera {

bool has_parquet();

// Throws kUser, naming what to install, where this build has no Parquet.
void require_parquet(const std::filesystem::path& path);

// The rows of the row groups whose first byte lies in the range. RawRecord::line counts rows
// from 1. Memory is bounded by the pages of the columns that are read. Throws kUser for damaged
// files and for columns of a type that is neither text nor a list of integers.
std::unique_ptr<RecordReader> open_parquet(const FileRange& range, const ColumnNames& columns);

// The number of rows that lie before the range.
std::int64_t parquet_rows_before(const FileRange& range);

}  // namespace tessera
