// Token ids of documents, memory-mapped. All offsets are 64-bit. On disk a store is
//   NAME.tokens   ids, uint16 or uint32, little-endian
//   NAME.docs     DocumentEntry per document
//   NAME.mask     only where records carry labels: one bit per token, set where labels[i] >= 0
//   NAME.json     description and counts; written last: without it the store does not exist
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "data/mapped_file.h"

namespace tessera {

struct DocumentEntry {
  std::uint64_t begin = 0;   // first token in the store
  std::uint64_t length = 0;  // tokens
  std::uint64_t row = 0;     // record of the store, from 0, that it comes from
  // The label given for the last token, where labels are shifted: the token that follows it.
  std::int32_t last_label = -1;
  std::uint32_t has_labels = 0;  // 0: every next token is trained
};
static_assert(sizeof(DocumentEntry) == 32);

// A record: the number of its file in the store and its line there, from 1 at the start of the
// range that was read. Line 0: none.
struct RecordPlace {
  std::int64_t file = 0;
  std::int64_t line = 0;
};

// How labels relate to ids. Both readings are checked for every labelled record; the choice is made
// over the whole source.
struct LabelEvidence {
  std::int64_t labelled_rows = 0;
  std::int64_t trained = 0;            // labels that are not ignored
  std::int64_t aligned_conflicts = 0;  // labels[i] != input_ids[i]
  std::int64_t shifted_conflicts = 0;  // labels[i] != input_ids[i + 1] inside a document
  RecordPlace first_aligned_conflict;
  RecordPlace first_shifted_conflict;

  void add(const LabelEvidence& next);  // `next` comes behind this one in the file
};

struct StoreCounts {
  std::int64_t rows_read = 0;
  std::int64_t rows_bad = 0;    // skipped under bad_rows: skip
  std::int64_t rows_empty = 0;  // no token
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
  std::int64_t bytes_read = 0;
  std::string first_bad;  // place and reason
  std::int32_t max_id = -1;
  RecordPlace max_id_place;
  LabelEvidence labels;

  void add(const StoreCounts& next);
};

// A file that a store was made from. Its records are the rows from first_row on.
struct StoreFile {
  std::string path;
  std::int64_t first_row = 0;
};

// Tokens and documents, however they are held.
class TokenStore {
 public:
  virtual ~TokenStore() = default;

  virtual std::int64_t num_documents() const = 0;
  virtual DocumentEntry document(std::int64_t index) const = 0;
  // Tokens [begin, begin + count) of the store.
  virtual void read(std::uint64_t begin, std::int64_t count, std::int32_t* out) const = 0;
  // Whether the label given for token `index` is not ignored; true without labels.
  virtual bool label_is_trained(std::uint64_t index) const = 0;
  virtual const StoreCounts& counts() const = 0;
  virtual const std::vector<StoreFile>& files() const = 0;  // ascending first_row, from 0
};

class TokenStoreWriter {
 public:
  // `path` is the name without suffix. Ids must be below `vocab_size` if they are to fit two bytes.
  TokenStoreWriter(const std::filesystem::path& path, bool wide);

  // Appends to the document that is open, opening one if none is.
  void append(const std::int32_t* ids, std::int64_t count);
  // One byte per token that was appended to the open document: trained or not.
  void set_labels(const std::uint8_t* trained, std::int64_t count, std::int32_t last_label);
  void end_document(std::uint64_t row);
  // Makes the store visible. `counts` holds all but documents and tokens.
  void commit(StoreCounts counts, const std::vector<StoreFile>& files);

 private:
  void put_mask_bits(const std::uint8_t* trained, std::int64_t count);

  std::filesystem::path path_;
  bool wide_;
  AtomicFile tokens_;
  AtomicFile docs_;
  std::unique_ptr<AtomicFile> mask_;
  std::uint8_t mask_byte_ = 0;
  std::uint64_t mask_bits_ = 0;
  std::uint64_t num_tokens_ = 0;
  std::int64_t num_documents_ = 0;
  DocumentEntry open_;
  std::vector<std::uint16_t> narrow_;
};

bool token_store_exists(const std::filesystem::path& path);
// Opens NAME (without suffix) and checks the sizes of its files against the description.
std::unique_ptr<TokenStore> open_token_store(const std::filesystem::path& path);

}  // namespace tessera
