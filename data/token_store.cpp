#include "data/token_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kKind = "tessera tokens 1";

fs::path with_suffix(const fs::path& path, const char* suffix) {
  fs::path result = path;
  result += suffix;
  return result;
}

json to_json(const RecordPlace& place) { return {place.file, place.line}; }

RecordPlace place_from(const json& j) { return {j.at(0), j.at(1)}; }

json to_json(const LabelEvidence& e) {
  return {{"labelled_rows", e.labelled_rows},
          {"trained", e.trained},
          {"aligned_conflicts", e.aligned_conflicts},
          {"shifted_conflicts", e.shifted_conflicts},
          {"first_aligned_conflict", to_json(e.first_aligned_conflict)},
          {"first_shifted_conflict", to_json(e.first_shifted_conflict)}};
}

LabelEvidence evidence_from(const json& j) {
  LabelEvidence e;
  e.labelled_rows = j.at("labelled_rows");
  e.trained = j.at("trained");
  e.aligned_conflicts = j.at("aligned_conflicts");
  e.shifted_conflicts = j.at("shifted_conflicts");
  e.first_aligned_conflict = place_from(j.at("first_aligned_conflict"));
  e.first_shifted_conflict = place_from(j.at("first_shifted_conflict"));
  return e;
}

class MappedStore : public TokenStore {
 public:
  MappedStore(const fs::path& path, const json& description)
      : wide_(description.at("token_bytes") == 4),
        tokens_(with_suffix(path, ".tokens")),
        docs_(with_suffix(path, ".docs")) {
    counts_.rows_read = description.at("rows_read");
    counts_.rows_bad = description.at("rows_bad");
    counts_.rows_empty = description.at("rows_empty");
    counts_.documents = description.at("documents");
    counts_.tokens = description.at("tokens");
    counts_.bytes_read = description.at("bytes_read");
    counts_.first_bad = description.at("first_bad");
    counts_.max_id = description.at("max_id");
    counts_.max_id_place = place_from(description.at("max_id_place"));
    for (const json& file : description.at("files")) {
      files_.push_back({file.at("path"), file.at("first_row")});
    }
    counts_.labels = evidence_from(description.at("labels"));
    if (description.at("mask")) mask_ = MappedFile(with_suffix(path, ".mask"));
    const std::int64_t token_bytes = counts_.tokens * (wide_ ? 4 : 2);
    const auto doc_bytes = counts_.documents * static_cast<std::int64_t>(sizeof(DocumentEntry));
    const std::int64_t mask_bytes = description.at("mask") ? (counts_.tokens + 7) / 8 : 0;
    if (tokens_.size() != token_bytes || docs_.size() != doc_bytes || mask_.size() != mask_bytes) {
      TESSERA_FAIL(
          ErrorKind::kUser,
          "[data] {}.tokens, .docs and .mask hold {}, {} and {} bytes, expected {}, {} and "
          "{}; remove them to prepare them anew",
          path.string(), tokens_.size(), docs_.size(), mask_.size(), token_bytes, doc_bytes,
          mask_bytes);
    }
  }

  std::int64_t num_documents() const override { return counts_.documents; }
  DocumentEntry document(std::int64_t index) const override {
    return docs_.as<DocumentEntry>()[static_cast<std::size_t>(index)];
  }
  void read(std::uint64_t begin, std::int64_t count, std::int32_t* out) const override {
    CHECK(count >= 0 && begin + static_cast<std::uint64_t>(count) <=
                            static_cast<std::uint64_t>(counts_.tokens),
          "[data] tokens {} + {} are past the store's {}", begin, count, counts_.tokens);
    if (wide_) {
      const auto* source = reinterpret_cast<const std::int32_t*>(tokens_.data()) + begin;
      std::copy(source, source + count, out);
    } else {
      const auto* source = reinterpret_cast<const std::uint16_t*>(tokens_.data()) + begin;
      std::copy(source, source + count, out);
    }
  }
  bool label_is_trained(std::uint64_t index) const override {
    if (mask_.size() == 0) return true;
    return ((static_cast<unsigned char>(mask_.data()[index / 8]) >> (index % 8)) & 1) != 0;
  }
  const StoreCounts& counts() const override { return counts_; }
  const std::vector<StoreFile>& files() const override { return files_; }

 private:
  bool wide_;
  MappedFile tokens_;
  MappedFile docs_;
  MappedFile mask_;
  StoreCounts counts_;
  std::vector<StoreFile> files_;
};

}  // namespace

void LabelEvidence::add(const LabelEvidence& next) {
  labelled_rows += next.labelled_rows;
  trained += next.trained;
  aligned_conflicts += next.aligned_conflicts;
  shifted_conflicts += next.shifted_conflicts;
  if (first_aligned_conflict.line == 0) first_aligned_conflict = next.first_aligned_conflict;
  if (first_shifted_conflict.line == 0) first_shifted_conflict = next.first_shifted_conflict;
}

void StoreCounts::add(const StoreCounts& next) {
  rows_read += next.rows_read;
  rows_bad += next.rows_bad;
  rows_empty += next.rows_empty;
  documents += next.documents;
  tokens += next.tokens;
  bytes_read += next.bytes_read;
  if (first_bad.empty()) first_bad = next.first_bad;
  if (next.max_id > max_id) {
    max_id = next.max_id;
    max_id_place = next.max_id_place;
  }
  labels.add(next.labels);
}

TokenStoreWriter::TokenStoreWriter(const fs::path& path, bool wide)
    : path_(path),
      wide_(wide),
      tokens_(with_suffix(path, ".tokens")),
      docs_(with_suffix(path, ".docs")) {}

void TokenStoreWriter::append(const std::int32_t* ids, std::int64_t count) {
  open_.length += static_cast<std::uint64_t>(count);
  num_tokens_ += static_cast<std::uint64_t>(count);
  if (wide_) {
    tokens_.write(ids, static_cast<std::size_t>(count) * 4);
    return;
  }
  narrow_.resize(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    CHECK(ids[i] >= 0 && ids[i] <= 0xFFFF, "[data] token id {} does not fit two bytes", ids[i]);
    narrow_[static_cast<std::size_t>(i)] = static_cast<std::uint16_t>(ids[i]);
  }
  tokens_.write(narrow_.data(), narrow_.size() * 2);
}

void TokenStoreWriter::put_mask_bits(const std::uint8_t* trained, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const bool bit = trained == nullptr || trained[i] != 0;
    mask_byte_ = static_cast<std::uint8_t>(mask_byte_ | (bit ? 1u << (mask_bits_ % 8) : 0u));
    if (++mask_bits_ % 8 == 0) {
      mask_->write(&mask_byte_, 1);
      mask_byte_ = 0;
    }
  }
}

void TokenStoreWriter::set_labels(const std::uint8_t* trained, std::int64_t count,
                                  std::int32_t last_label) {
  CHECK(static_cast<std::uint64_t>(count) == open_.length, "[data] {} labels for {} tokens", count,
        open_.length);
  if (mask_ == nullptr) mask_ = std::make_unique<AtomicFile>(with_suffix(path_, ".mask"));
  // Documents without labels so far are trained throughout.
  put_mask_bits(nullptr, static_cast<std::int64_t>(open_.begin - mask_bits_));
  put_mask_bits(trained, count);
  open_.has_labels = 1;
  open_.last_label = last_label;
}

void TokenStoreWriter::end_document(std::uint64_t row) {
  open_.row = row;
  docs_.write(&open_, sizeof(open_));
  ++num_documents_;
  open_ = DocumentEntry{};
  open_.begin = num_tokens_;
}

void TokenStoreWriter::commit(StoreCounts counts, const std::vector<StoreFile>& files) {
  CHECK(open_.length == 0, "[data] the last document was not ended");
  counts.documents = num_documents_;
  counts.tokens = static_cast<std::int64_t>(num_tokens_);
  if (mask_ != nullptr) {
    put_mask_bits(nullptr, static_cast<std::int64_t>(num_tokens_ - mask_bits_));
    if (mask_bits_ % 8 != 0) mask_->write(&mask_byte_, 1);
    mask_->commit();
  }
  tokens_.commit();
  docs_.commit();
  json file_list = json::array();
  for (const StoreFile& file : files) {
    file_list.push_back({{"path", file.path}, {"first_row", file.first_row}});
  }
  const json description = {{"kind", kKind},
                            {"token_bytes", wide_ ? 4 : 2},
                            {"mask", mask_ != nullptr},
                            {"rows_read", counts.rows_read},
                            {"rows_bad", counts.rows_bad},
                            {"rows_empty", counts.rows_empty},
                            {"documents", counts.documents},
                            {"tokens", counts.tokens},
                            {"bytes_read", counts.bytes_read},
                            {"first_bad", counts.first_bad},
                            {"max_id", counts.max_id},
                            {"max_id_place", to_json(counts.max_id_place)},
                            {"labels", to_json(counts.labels)},
                            {"files", file_list}};
  AtomicFile manifest(with_suffix(path_, ".json"));
  // A damaged name in a message must not make the whole store unreadable.
  manifest.write(description.dump(2, ' ', false, json::error_handler_t::replace) + "\n");
  manifest.commit();
}

bool token_store_exists(const fs::path& path) { return fs::exists(with_suffix(path, ".json")); }

std::unique_ptr<TokenStore> open_token_store(const fs::path& path) {
  const fs::path manifest = with_suffix(path, ".json");
  CHECK_USER(fs::exists(manifest), "[data] {} is missing: {}.tokens has no description",
             manifest.string(), path.string());
  try {
    const json description = json::parse(read_small_file(manifest));
    CHECK_USER(description.at("kind") == kKind, "[data] {} is not the description of a token store",
               manifest.string());
    return std::make_unique<MappedStore>(path, description);
  } catch (const json::exception& problem) {
    TESSERA_FAIL(ErrorKind::kUser, "[data] {} is damaged: {}", manifest.string(), problem.what());
  }
}

}  // namespace tessera
