#include "data/tokenize.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <future>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "data/batch.h"
#include "engine/core/error.h"
#include "engine/core/text.h"

namespace tessera {
namespace {

constexpr std::size_t kBatchBytes = std::size_t{1} << 20;
// Beyond this a text is tokenised in pieces: keeps memory bounded for files of any size.
constexpr std::size_t kMaxPiece = std::size_t{4} << 20;

struct EncodedDocument {
  std::int64_t begin = 0;  // in EncodedBatch::ids
  std::int64_t length = 0;
  std::int64_t row = 0;
  std::int32_t last_label = -1;
  bool has_labels = false;
  bool ends = true;  // false: the next piece continues it
};

struct EncodedBatch {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> trained;  // as long as ids where any record carries labels
  std::vector<EncodedDocument> documents;
  StoreCounts counts;
  std::int64_t position = 0;
};

struct RawBatch {
  std::size_t file = 0;  // in the shard
  std::vector<RawRecord> records;
  std::int64_t first_row = 0;
  std::int64_t position = 0;
};

class BatchEncoder {
 public:
  BatchEncoder(const FileRange& range, std::size_t file, const TokenizeSettings& settings)
      : range_(range), file_(static_cast<std::int64_t>(file)), settings_(settings) {
    const FileFormat format = range.file.format;
    is_json_ = format == FileFormat::kJsonLines || format == FileFormat::kJsonArray ||
               format == FileFormat::kJsonObject || format == FileFormat::kParquet;
  }

  EncodedBatch encode(const RawBatch& batch) const {
    EncodedBatch out;
    out.position = batch.position;
    std::int64_t row = batch.first_row;
    Record record;
    for (const RawRecord& raw : batch.records) {
      const std::size_t ids_before = out.ids.size();
      const std::size_t documents_before = out.documents.size();
      try {
        if (is_json_) {
          parse_record(raw.bytes, settings_.columns, record);
        } else {
          check_utf8(raw);
          record.kind = Record::Kind::kText;
        }
        if (record.kind == Record::Kind::kTokens) {
          add_tokens(record, raw, row, out);
        } else {
          add_text(is_json_ ? record.text : raw.bytes, raw, row, out);
        }
      } catch (const RecordProblem& problem) {
        out.ids.resize(ids_before);
        out.documents.resize(documents_before);
        const std::string text = fmt::format("{}: {}", place_of(range_, raw.line), problem.what());
        CHECK_USER(settings_.skip_bad_rows,
                   "[data] {}. Mend the record, or leave such records out with data.bad_rows: skip",
                   text);
        ++out.counts.rows_bad;
        if (out.counts.first_bad.empty()) out.counts.first_bad = text;
        // A piece of a longer text is left out, the text itself still has to end.
        if (raw.ends_document && !raw.starts_document) end_text(row, out);
      }
      if (raw.ends_document) {
        ++out.counts.rows_read;
        ++row;
      }
    }
    if (!out.trained.empty()) out.trained.resize(out.ids.size(), 1);
    return out;
  }

 private:
  void check_utf8(const RawRecord& raw) const {
    const std::size_t bad = find_invalid_utf8(raw.bytes);
    if (bad == std::string::npos) return;
    const auto lines =
        std::count(raw.bytes.begin(), raw.bytes.begin() + static_cast<std::ptrdiff_t>(bad), '\n');
    throw RecordProblem(fmt::format("byte 0x{:02x} {}is not UTF-8",
                                    static_cast<unsigned char>(raw.bytes[bad]),
                                    lines > 0 ? fmt::format("{} lines further down ", lines) : ""));
  }

  void add_text(const std::string& text, const RawRecord& raw, std::int64_t row,
                EncodedBatch& out) const {
    CHECK_USER(settings_.encoder != nullptr,
               "[data] {} is text and no tokenizer is given; set data.tokenizer",
               place_of(range_, raw.line));
    if (text.empty() && raw.starts_document && raw.ends_document) {
      ++out.counts.rows_empty;
      return;
    }
    const TextEncoder& encoder = *settings_.encoder;
    const auto begin = static_cast<std::int64_t>(out.ids.size());
    if (raw.starts_document) {
      out.ids.insert(out.ids.end(), encoder.document_start.begin(), encoder.document_start.end());
    }
    encoder.encode(text, out.ids);
    if (raw.ends_document) {
      out.ids.insert(out.ids.end(), encoder.document_end.begin(), encoder.document_end.end());
    }
    EncodedDocument document;
    document.begin = begin;
    document.length = static_cast<std::int64_t>(out.ids.size()) - begin;
    document.row = row;
    document.ends = raw.ends_document;
    check_ids(out, begin, raw);
    out.documents.push_back(document);
  }

  void end_text(std::int64_t row, EncodedBatch& out) const {
    const auto& end = settings_.encoder->document_end;
    EncodedDocument document;
    document.begin = static_cast<std::int64_t>(out.ids.size());
    document.length = static_cast<std::int64_t>(end.size());
    document.row = row;
    out.ids.insert(out.ids.end(), end.begin(), end.end());
    out.documents.push_back(document);
  }

  void add_tokens(const Record& record, const RawRecord& raw, std::int64_t row,
                  EncodedBatch& out) const {
    if (record.ids.empty()) {
      ++out.counts.rows_empty;
      return;
    }
    const auto begin = static_cast<std::int64_t>(out.ids.size());
    out.ids.insert(out.ids.end(), record.ids.begin(), record.ids.end());
    check_ids(out, begin, raw);
    const bool has_labels = !record.labels.empty();
    if (has_labels) {
      out.trained.resize(static_cast<std::size_t>(begin), 1);
      for (const std::int32_t label : record.labels) {
        out.trained.push_back(label == kIgnoredTarget ? 0 : 1);
      }
      add_label_evidence(record, {file_, raw.line}, out.counts.labels);
    }
    const auto length = static_cast<std::int64_t>(record.ids.size());
    for (std::size_t i = 0; i < record.starts.size(); ++i) {
      const std::int64_t end = i + 1 < record.starts.size() ? record.starts[i + 1] : length;
      EncodedDocument document;
      document.begin = begin + record.starts[i];
      document.length = end - record.starts[i];
      document.row = row;
      document.has_labels = has_labels;
      if (has_labels) {
        const std::int32_t last = record.labels[static_cast<std::size_t>(end) - 1];
        document.last_label = last == kIgnoredTarget ? -1 : last;
        check_id(document.last_label, raw);
        note_id(document.last_label, raw, out);
      }
      out.documents.push_back(document);
    }
  }

  void check_id(std::int32_t id, const RawRecord& raw) const {
    if (settings_.vocab_size == 0 || id < settings_.vocab_size) return;
    const std::string token = settings_.encoder != nullptr && id < settings_.encoder->vocab_size
                                  ? fmt::format(" ({})", settings_.encoder->token_text(id))
                                  : "";
    TESSERA_FAIL(ErrorKind::kUser,
                 "[data] {}: token id {}{} is outside of the model's vocabulary of {}; use the "
                 "tokenizer of this model, or give its embeddings more rows with data.add_tokens",
                 place_of(range_, raw.line), id, token, settings_.vocab_size);
  }

  void check_ids(EncodedBatch& out, std::int64_t begin, const RawRecord& raw) const {
    if (begin == static_cast<std::int64_t>(out.ids.size())) return;
    const std::int32_t highest = *std::max_element(out.ids.begin() + begin, out.ids.end());
    check_id(highest, raw);
    note_id(highest, raw, out);
  }

  void note_id(std::int32_t id, const RawRecord& raw, EncodedBatch& out) const {
    if (id <= out.counts.max_id) return;
    out.counts.max_id = id;
    out.counts.max_id_place = {file_, raw.line};
  }

  const FileRange& range_;
  std::int64_t file_;
  const TokenizeSettings& settings_;
  bool is_json_ = false;
};

// Batches of raw records, file after file. A batch never crosses files.
class BatchReader {
 public:
  BatchReader(const Shard& shard, const TokenizeSettings& settings)
      : shard_(shard), columns_(settings.columns), max_rows_(settings.max_rows) {}

  // Nothing at the end.
  std::optional<RawBatch> next() {
    while (file_ < shard_.size() && (max_rows_ == 0 || row_ < max_rows_)) {
      if (reader_ == nullptr) {
        reader_ = open_records(shard_[file_], kMaxPiece, columns_);
        files_.push_back({shard_[file_].file.path.string(), row_});
      }
      RawBatch batch;
      batch.file = file_;
      batch.first_row = row_;
      std::size_t bytes = 0;
      RawRecord record;
      bool any = true;
      while (bytes < kBatchBytes && (max_rows_ == 0 || row_ < max_rows_) &&
             (any = reader_->next(record))) {
        bytes += record.bytes.size() + 64;
        if (record.ends_document) ++row_;
        batch.records.push_back(std::move(record));
        record = RawRecord{};
      }
      batch.position = position_before_ + reader_->position();
      if (!any || batch.records.empty()) {
        position_before_ += reader_->position();
        reader_.reset();
        ++file_;
      }
      if (!batch.records.empty()) return batch;
    }
    return std::nullopt;
  }

  std::int64_t position() const { return position_before_; }      // of all files that are done
  const std::vector<StoreFile>& files() const { return files_; }  // opened so far

 private:
  const Shard& shard_;
  const ColumnNames& columns_;
  std::int64_t max_rows_;
  std::size_t file_ = 0;
  std::unique_ptr<RecordReader> reader_;
  std::int64_t row_ = 0;
  std::int64_t position_before_ = 0;
  std::vector<StoreFile> files_;
};

void write_batch(const EncodedBatch& batch, TokenStoreWriter& writer) {
  for (const EncodedDocument& document : batch.documents) {
    writer.append(batch.ids.data() + document.begin, document.length);
    if (document.has_labels) {
      writer.set_labels(batch.trained.data() + document.begin, document.length,
                        document.last_label);
    }
    if (document.ends) writer.end_document(static_cast<std::uint64_t>(document.row));
  }
}

}  // namespace

void add_label_evidence(const Record& record, const RecordPlace& place, LabelEvidence& evidence) {
  ++evidence.labelled_rows;
  const auto& ids = record.ids;
  const auto& labels = record.labels;
  const auto note = [&place](std::int64_t& conflicts, RecordPlace& first) {
    ++conflicts;
    if (first.line == 0) first = place;
  };
  std::size_t next_start = 1;  // index in starts
  for (std::size_t i = 0; i < labels.size(); ++i) {
    while (next_start < record.starts.size() &&
           record.starts[next_start] <= static_cast<std::int64_t>(i)) {
      ++next_start;
    }
    if (labels[i] == kIgnoredTarget) continue;
    ++evidence.trained;
    if (labels[i] != ids[i]) note(evidence.aligned_conflicts, evidence.first_aligned_conflict);
    // The last position of a document may predict anything: its next token is not in the row.
    const bool is_last =
        i + 1 == labels.size() || (next_start < record.starts.size() &&
                                   record.starts[next_start] == static_cast<std::int64_t>(i) + 1);
    if (!is_last && labels[i] != ids[i + 1]) {
      note(evidence.shifted_conflicts, evidence.first_shifted_conflict);
    }
  }
}

bool needs_wide_tokens(const TokenizeSettings& settings) {
  std::int64_t highest = settings.vocab_size;
  if (settings.encoder != nullptr) highest = std::max(highest, settings.encoder->vocab_size);
  return highest == 0 || highest > 65536;
}

void tokenize_shard(const Shard& shard, const TokenizeSettings& settings,
                    const std::filesystem::path& path) {
  BatchReader reader(shard, settings);
  TokenStoreWriter writer(path, needs_wide_tokens(settings));
  StoreCounts counts;
  bool more = true;
  // Futures in order: what is written, and which error is reported, does not depend on timing.
  std::deque<std::future<EncodedBatch>> running;
  const auto limit = static_cast<std::size_t>(std::max(1, settings.threads));
  while (more || !running.empty()) {
    while (more && running.size() < limit) {
      std::optional<RawBatch> batch = reader.next();
      if (!batch) {
        more = false;
        break;
      }
      const auto policy = limit > 1 ? std::launch::async : std::launch::deferred;
      running.push_back(std::async(policy, [&shard, &settings, batch = std::move(*batch)] {
        return BatchEncoder(shard[batch.file], batch.file, settings).encode(batch);
      }));
    }
    if (running.empty()) break;
    const EncodedBatch encoded = running.front().get();
    running.pop_front();
    write_batch(encoded, writer);
    counts.add(encoded.counts);
    if (settings.progress) settings.progress(encoded.position);
  }
  counts.bytes_read = reader.position();
  writer.commit(std::move(counts), reader.files());
}

}  // namespace tessera
