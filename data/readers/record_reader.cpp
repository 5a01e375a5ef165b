#include "data/readers/record_reader.h"

#include <fmt/format.h>

#include <algorithm>

#include "data/readers/line_reader.h"
#include "data/readers/parquet_reader.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

constexpr std::size_t kMaxRecord = std::size_t{1} << 30;
constexpr std::string_view kEndOfText = "<|endoftext|>";

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r\n\v\f") == std::string_view::npos;
}

LineReader open_lines(const FileRange& range) {
  const bool to_end = range.end >= range.file.bytes || range.file.is_compressed;
  return LineReader(range.file.path, range.begin, to_end ? LineReader::kToEnd : range.end);
}

// One record a line; blank lines are none.
class LineRecords : public RecordReader {
 public:
  explicit LineRecords(const FileRange& range) : range_(range), lines_(open_lines(range)) {}

  bool next(RawRecord& record) override {
    record.starts_document = record.ends_document = true;
    while (lines_.next(record.bytes, kMaxRecord)) {
      CHECK_USER(!lines_.is_continued(), "[data] {} is longer than 1 GiB",
                 place_of(range_, lines_.line_number()));
      if (is_blank(record.bytes)) continue;
      record.line = lines_.line_number();
      return true;
    }
    return false;
  }
  std::int64_t position() const override { return lines_.stored_position(); }

 private:
  FileRange range_;
  LineReader lines_;
};

// Whole texts: the file, the parts between <|endoftext|> marks, or paragraphs. Line ends become
// "\n".
class TextRecords : public RecordReader {
 public:
  TextRecords(const FileRange& range, std::size_t max_piece, bool by_paragraph)
      : lines_(open_lines(range)), max_piece_(max_piece), by_paragraph_(by_paragraph) {}

  bool next(RawRecord& record) override {
    record.bytes.clear();
    record.starts_document = at_document_start_;
    record.ends_document = false;
    record.line = 0;
    while (take_line()) {
      if (record.line == 0) record.line = lines_.line_number();
      if (by_paragraph_ && is_blank(pending_) && !lines_.is_continued()) {
        pending_.clear();
        if (record.bytes.empty() && at_document_start_) {
          record.line = 0;
          continue;
        }
        return end_document(record);
      }
      if (const std::size_t mark = pending_.find(kEndOfText);
          !by_paragraph_ && mark != std::string::npos) {
        record.bytes.append(pending_, 0, mark);
        pending_.erase(0, mark + kEndOfText.size());
        // The line end right behind a mark belongs to the mark.
        if (pending_ == "\n") pending_.clear();
        if (is_blank(record.bytes) && at_document_start_) {
          record.bytes.clear();
          record.line = 0;
          continue;
        }
        return end_document(record);
      }
      record.bytes += pending_;
      pending_.clear();
      if (record.bytes.size() >= max_piece_) {
        at_document_start_ = false;
        return true;
      }
    }
    if (is_blank(record.bytes) && at_document_start_) return false;
    return end_document(record);
  }
  std::int64_t position() const override { return lines_.stored_position(); }

 private:
  // A line with its end into pending_, unless something is left there.
  bool take_line() {
    if (!pending_.empty()) return true;
    if (!lines_.next(pending_, max_piece_)) return false;
    if (lines_.is_continued()) {
      // A mark or a character must not be cut apart: keep its beginning for the next round.
      carry_over();
    } else if (lines_.had_newline()) {
      pending_ += '\n';
    }
    return true;
  }

  // Completes a line that was cut at max_piece_ up to the next blank, within reason.
  void carry_over() {
    std::string more;
    for (int i = 0; i < 4096 && lines_.is_continued(); ++i) {
      lines_.next(more, 1);
      pending_ += more;
      if (more == " ") break;
    }
    if (!lines_.is_continued() && lines_.had_newline()) pending_ += '\n';
    while (lines_.is_continued() && (static_cast<unsigned char>(pending_.back()) & 0x80) != 0) {
      lines_.next(more, 1);
      pending_ += more;
      if (!lines_.is_continued() && lines_.had_newline()) pending_ += '\n';
    }
  }

  bool end_document(RawRecord& record) {
    record.ends_document = true;
    at_document_start_ = true;
    // A paragraph ends with its last line, without the line end that only separates.
    if (by_paragraph_ && !record.bytes.empty() && record.bytes.back() == '\n') {
      record.bytes.pop_back();
    }
    return true;
  }

  LineReader lines_;
  std::size_t max_piece_;
  bool by_paragraph_;
  std::string pending_;
  bool at_document_start_ = true;
};

// The elements of a top-level array, or a single object over several lines, by counting brackets
// outside of strings. What is inside an element is checked when it is parsed.
class ObjectRecords : public RecordReader {
 public:
  ObjectRecords(const FileRange& range, bool is_array)
      : range_(range), lines_(open_lines(range)), is_array_(is_array) {}

  bool next(RawRecord& record) override {
    record.starts_document = record.ends_document = true;
    if (is_closed_) return false;
    char c = next_char();
    if (is_array_) {
      if (!is_opened_) {
        CHECK_USER(c == '[', "[data] {} must begin with '['", range_.file.path.string());
        is_opened_ = true;
        c = next_char();
      } else if (c != ']') {
        CHECK_USER(c == ',' || c == '\0', "[data] {}: expected ',' or ']' after a record", here());
        c = next_char();
        CHECK_USER(c != ']', "[data] {}: the array ends behind a comma", here());
      }
      CHECK_USER(c != '\0', "[data] {} ends before its array is closed", range_.file.path.string());
      if (c == ']') {
        is_closed_ = true;
        CHECK_USER(next_char() == '\0', "[data] {}: more text follows the end of the array",
                   here());
        return false;
      }
    } else if (c == '\0') {
      is_closed_ = true;
      return false;
    }
    record.line = lines_.line_number();
    read_element(record, c);
    return true;
  }
  std::int64_t position() const override { return lines_.stored_position(); }

 private:
  std::string here() { return place_of(range_, lines_.line_number()); }

  // The next character that is no blank; '\0' at the end.
  char next_char() {
    while (true) {
      const std::size_t first = line_.find_first_not_of(" \t\r\n", next_);
      if (first != std::string::npos) {
        next_ = first + 1;
        return line_[first];
      }
      if (!next_line()) return '\0';
    }
  }

  bool next_line() {
    next_ = 0;
    if (!lines_.next(line_, std::size_t{1} << 24)) {
      line_.clear();
      return false;
    }
    if (!lines_.is_continued()) line_ += '\n';
    return true;
  }

  void read_element(RawRecord& record, char c) {
    if (c != '{' && c != '[') {
      // A scalar: up to the next comma or bracket. Parsing it will name the fault.
      --next_;
      const std::size_t end = std::min(line_.find_first_of(",]\n", next_ + 1), line_.size());
      record.bytes = line_.substr(next_, end - next_);
      next_ = end;
      return;
    }
    record.bytes = c;
    int depth = 1;
    bool in_string = false;
    bool escaped = false;
    while (depth > 0) {
      const std::size_t from = next_;
      for (; next_ < line_.size() && depth > 0; ++next_) {
        const char d = line_[next_];
        if (escaped) {
          escaped = false;
        } else if (in_string) {
          if (d == '\\') escaped = true;
          if (d == '"') in_string = false;
        } else if (d == '"') {
          in_string = true;
        } else if (d == '{' || d == '[') {
          ++depth;
        } else if (d == '}' || d == ']') {
          --depth;
        }
      }
      record.bytes.append(line_, from, next_ - from);
      CHECK_USER(record.bytes.size() <= kMaxRecord, "[data] {}: the record is longer than 1 GiB",
                 place_of(range_, record.line));
      if (depth > 0 && !next_line()) {
        TESSERA_FAIL(ErrorKind::kUser, "[data] {}: the record that starts here does not end",
                     place_of(range_, record.line));
      }
    }
  }

  FileRange range_;
  LineReader lines_;
  bool is_array_;
  std::string line_;
  std::size_t next_ = 0;
  bool is_opened_ = false;
  bool is_closed_ = false;
};

}  // namespace

std::unique_ptr<RecordReader> open_records(const FileRange& range, std::size_t max_piece,
                                           const ColumnNames& columns) {
  switch (range.file.format) {
    case FileFormat::kLines:
    case FileFormat::kJsonLines:
      return std::make_unique<LineRecords>(range);
    case FileFormat::kText:
      return std::make_unique<TextRecords>(range, max_piece, false);
    case FileFormat::kParagraphs:
      return std::make_unique<TextRecords>(range, max_piece, true);
    case FileFormat::kJsonArray:
      return std::make_unique<ObjectRecords>(range, true);
    case FileFormat::kJsonObject:
      return std::make_unique<ObjectRecords>(range, false);
    case FileFormat::kParquet:
      return open_parquet(range, columns);
    case FileFormat::kTokens:
    case FileFormat::kMegatron:
      break;
  }
  TESSERA_FAIL(ErrorKind::kInternal, "[data] {} is not read record by record",
               range.file.path.string());
}

std::string place_of(const FileRange& range, std::int64_t line) {
  if (range.file.format == FileFormat::kParquet) {
    return fmt::format("{} row {}", range.file.path.string(), parquet_rows_before(range) + line);
  }
  // The first line of a range follows the first line end at or behind the byte before the range.
  const std::int64_t before =
      range.begin > 0 ? count_lines(range.file.path, range.begin - 1) + 1 : 0;
  return fmt::format("{}:{}", range.file.path.string(), before + line);
}

}  // namespace tessera
