// Cuts a file into raw records without looking into them, so that workers can parse and tokenise
// them in parallel and in order.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "data/readers/record.h"
#include "data/readers/source_files.h"

namespace tessera {

struct RawRecord {
  std::string bytes;      // a JSON object, or text
  std::int64_t line = 0;  // where it starts, from 1 at the start of the range
  // Long texts come in pieces, cut at a line end where there is one.
  bool starts_document = true;
  bool ends_document = true;
};

// Part of a plain file: the lines whose first byte is in [begin, end), or the row groups of a
// Parquet file. Only these, JSON lines and `lines` can be cut into ranges; every other file is one
// range.
struct FileRange {
  SourceFile file;
  std::int64_t begin = 0;
  std::int64_t end = 0;  // file size for the last one
};

class RecordReader {
 public:
  virtual ~RecordReader() = default;
  virtual bool next(RawRecord& record) = 0;   // false at the end
  virtual std::int64_t position() const = 0;  // stored bytes read so far, for progress
};

// Texts longer than `max_piece` bytes come in pieces. `columns` are those of the records: files
// that store columns apart read no others.
std::unique_ptr<RecordReader> open_records(const FileRange& range, std::size_t max_piece,
                                           const ColumnNames& columns = {});

// "rows.jsonl:17" for a line of the range, "rows.parquet row 17" for a row. Counts what lies before
// the range: for messages only.
std::string place_of(const FileRange& range, std::int64_t line);

}  // namespace tessera
