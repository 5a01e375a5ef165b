// A record of a JSON file: text, or a row that is tokenised already.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct Record {
  enum class Kind { kText, kTokens };
  Kind kind = Kind::kText;

  std::string text;

  // kTokens. Padding (attention_mask 0) is removed. `starts` holds the first position of each
  // document in the row: position_ids that do not continue, or another number in attention_mask,
  // start one.
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> labels;  // empty: no labels given
  std::vector<std::int64_t> starts;  // ascending from 0; empty only for an empty row
};

// The reason why a record cannot be used; whoever knows file and line makes it a message.
struct RecordProblem : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Our field names -> the file's: text, input_ids, labels, position_ids, attention_mask.
using ColumnNames = std::map<std::string, std::string>;

// Throws kUser for a column that we do not know.
void check_columns(const ColumnNames& columns);

// Whether the file's field `name` is one that records are made of.
bool is_record_field(const ColumnNames& columns, std::string_view name);

// Parses one object. input_ids win over text, since tools that tokenise often keep the text beside
// them. `out` is reused. Throws RecordProblem.
void parse_record(std::string_view json, const ColumnNames& columns, Record& out);

}  // namespace tessera
