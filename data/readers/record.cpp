#include "data/readers/record.h"

#include <fmt/format.h>

#include <algorithm>

#include "data/batch.h"
#include "data/readers/json_reader.h"
#include "engine/core/error.h"
#include "engine/core/text.h"

namespace tessera {
namespace {

const std::vector<std::string>& known_columns() {
  static const std::vector<std::string> names = {"text", "input_ids", "labels", "position_ids",
                                                 "attention_mask"};
  return names;
}

std::string_view file_name_of(const ColumnNames& columns, const char* ours) {
  const auto found = columns.find(ours);
  return found == columns.end() ? std::string_view(ours) : std::string_view(found->second);
}

void check_length(const Record& record, const std::vector<std::int32_t>& values,
                  std::string_view name) {
  if (values.size() != record.ids.size()) {
    throw RecordProblem(fmt::format("{} has {} entries, expected {} as input_ids", name,
                                    values.size(), record.ids.size()));
  }
}

// Removes padding at either end and notes where documents start.
void apply_masks(Record& record, std::vector<std::int32_t>& positions,
                 std::vector<std::int32_t>& attention) {
  if (!attention.empty()) {
    const auto is_used = [](std::int32_t value) { return value != 0; };
    const auto first = std::find_if(attention.begin(), attention.end(), is_used);
    const auto last = std::find_if(attention.rbegin(), attention.rend(), is_used).base();
    if (std::find(first, last, 0) != last && first < last) {
      throw RecordProblem(
          fmt::format("attention_mask is 0 at position {} between used positions; only padding at "
                      "the ends can be left out",
                      std::find(first, last, 0) - attention.begin()));
    }
    const auto begin = first - attention.begin();
    const auto end = std::max(last - attention.begin(), begin);
    const auto keep = [&](std::vector<std::int32_t>& values) {
      if (values.empty()) return;
      values.erase(values.begin() + end, values.end());
      values.erase(values.begin(), values.begin() + begin);
    };
    keep(record.ids);
    keep(record.labels);
    keep(positions);
    keep(attention);
  }
  for (std::size_t i = 0; i < record.ids.size(); ++i) {
    const bool is_start = i == 0 || (!positions.empty() && positions[i] != positions[i - 1] + 1) ||
                          (!attention.empty() && attention[i] != attention[i - 1]);
    if (is_start) record.starts.push_back(static_cast<std::int64_t>(i));
  }
}

}  // namespace

void check_columns(const ColumnNames& columns) {
  for (const auto& [ours, theirs] : columns) {
    const auto& known = known_columns();
    if (std::find(known.begin(), known.end(), ours) != known.end()) continue;
    const auto near = nearest_name(ours, known);
    TESSERA_FAIL(ErrorKind::kUser,
                 "[data] columns names \"{}\" (for \"{}\" in the file), expected {}{}", ours,
                 theirs, join_choices(known), near ? fmt::format("; did you mean {}?", *near) : "");
  }
}

bool is_record_field(const ColumnNames& columns, std::string_view name) {
  const auto& known = known_columns();
  return std::any_of(known.begin(), known.end(), [&](const std::string& ours) {
    return file_name_of(columns, ours.c_str()) == name;
  });
}

void parse_record(std::string_view json, const ColumnNames& columns, Record& out) {
  out.text.clear();
  out.ids.clear();
  out.labels.clear();
  out.starts.clear();
  if (const std::size_t bad = find_invalid_utf8(json); bad != std::string_view::npos) {
    throw RecordProblem(fmt::format("byte {} (0x{:02x}) is not UTF-8", bad + 1,
                                    static_cast<unsigned char>(json[bad])));
  }
  const std::string_view text_name = file_name_of(columns, "text");
  const std::string_view ids_name = file_name_of(columns, "input_ids");
  const std::string_view labels_name = file_name_of(columns, "labels");
  const std::string_view positions_name = file_name_of(columns, "position_ids");
  const std::string_view attention_name = file_name_of(columns, "attention_mask");
  bool has_text = false;
  bool has_ids = false;
  bool has_labels = false;
  bool is_conversation = false;
  std::string other_keys;
  std::string reading;  // the field that a problem is in
  std::vector<std::int32_t> positions;
  std::vector<std::int32_t> attention;
  JsonReader reader(json);
  try {
    if (reader.peek() != '{') throw RecordProblem("a record must be an object: {\"text\": ...}");
    reader.read_object([&](const std::string& key) {
      reading = key;
      if (key == text_name && !has_ids && reader.peek() == '"') {
        out.text = reader.read_string();
        has_text = true;
      } else if (key == ids_name) {
        reader.read_integers(out.ids);
        has_ids = true;
      } else if (key == labels_name && reader.peek() == '[') {
        reader.read_integers(out.labels);
        has_labels = true;
      } else if (key == positions_name && reader.peek() == '[') {
        reader.read_integers(positions);
      } else if (key == attention_name && reader.peek() == '[') {
        reader.read_integers(attention);
      } else {
        if (key == text_name && !has_ids && reader.peek() != 'n') {
          // A list or object named text is another format; null is a missing text.
          throw RecordProblem(fmt::format("{} must be a string", key));
        }
        is_conversation |= key == "messages" || key == "conversations" || key == "instruction" ||
                           key == "prompt" || key == "chosen";
        if (other_keys.size() < 200) other_keys += (other_keys.empty() ? "" : ", ") + key;
        reader.skip_value();
      }
      reading.clear();
    });
    if (!reader.at_end()) throw JsonProblem(reader.offset(), "expected the end after the record");
  } catch (const JsonProblem& problem) {
    const std::string where = reading.empty() ? "" : fmt::format(", in {}", reading);
    throw RecordProblem(
        fmt::format("not valid JSON at byte {}{}: {}", problem.offset + 1, where, problem.what()));
  }
  if (has_ids) {
    out.kind = Record::Kind::kTokens;
    out.text.clear();
    if (has_labels) check_length(out, out.labels, labels_name);
    if (!positions.empty()) check_length(out, positions, positions_name);
    if (!attention.empty()) check_length(out, attention, attention_name);
    apply_masks(out, positions, attention);
    for (std::size_t i = 0; i < out.ids.size(); ++i) {
      if (out.ids[i] < 0) {
        throw RecordProblem(fmt::format("{}[{}] is {}, expected a token id of at least 0", ids_name,
                                        i, out.ids[i]));
      }
    }
    for (std::size_t i = 0; i < out.labels.size(); ++i) {
      if (out.labels[i] < 0 && out.labels[i] != kIgnoredTarget) {
        throw RecordProblem(fmt::format("{}[{}] is {}, expected a token id or {} for not trained",
                                        labels_name, i, out.labels[i], kIgnoredTarget));
      }
    }
    return;
  }
  out.kind = Record::Kind::kText;
  if (!has_text) {
    if (is_conversation) {
      throw RecordProblem(fmt::format(
          "this is a conversation ({}), which this version does not read; give texts or token ids",
          other_keys));
    }
    throw RecordProblem(fmt::format(
        "neither \"{}\" nor \"{}\" is there (found: {}); name the field with data.*.columns: "
        "{{text: ...}}",
        text_name, ids_name, other_keys.empty() ? "no keys" : other_keys));
  }
}

}  // namespace tessera
