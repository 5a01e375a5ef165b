// Prepared data: sources made of token stores, the packed rows over them, and the endless order in
// which the rows are trained on.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/label_alignment.h"
#include "data/packing.h"
#include "data/token_store.h"

namespace tessera {

// A store, and where its records stand in their files.
struct StorePart {
  std::unique_ptr<TokenStore> store;
  std::int64_t row_offset = 0;  // records of the first file that lie before the store's first row
  bool is_text = false;         // whole texts, which may be cut anywhere

  struct Origin {
    const std::string* file = nullptr;
    std::int64_t record = 0;  // in the file, from 0
  };
  Origin origin(std::uint64_t row) const;
};

// The documents of one source, numbered across its stores.
class DocumentSet {
 public:
  explicit DocumentSet(std::vector<StorePart> parts);

  std::int64_t num_documents() const { return first_document_.back(); }
  const std::vector<StorePart>& parts() const { return parts_; }
  void set_alignment(LabelAlignment alignment) { alignment_ = alignment; }
  LabelAlignment alignment() const { return alignment_; }

  struct Place {
    const StorePart* part = nullptr;
    DocumentEntry entry;
  };
  Place find(std::int64_t document) const;

  // (input, target) pairs of the document.
  std::int64_t num_pairs(const DocumentEntry& entry) const;
  // How many of the pairs [begin, begin + count) are trained.
  std::int64_t count_trained(const Place& place, std::int64_t begin, std::int64_t count) const;
  // Writes `piece.length` inputs and targets (kIgnoredTarget where not trained).
  void read(const Piece& piece, std::int32_t* inputs, std::int32_t* targets) const;

 private:
  std::vector<StorePart> parts_;
  std::vector<std::int64_t> first_document_;  // per part, and the total
  LabelAlignment alignment_ = LabelAlignment::kNone;
};

// One source of the mixture.
struct PackedSource {
  std::string name;                              // as the user wrote it
  std::shared_ptr<const DocumentSet> documents;  // shared by the training and the held-out rows
  std::unique_ptr<PackedRows> rows;
  std::optional<double> weight;
};

class Dataset {
 public:
  // At least one source must have a row.
  Dataset(std::vector<PackedSource> sources, std::int64_t sequence_length);

  std::int64_t sequence_length() const { return sequence_length_; }
  const std::vector<PackedSource>& sources() const { return sources_; }

  // Rows are numbered across the sources.
  std::int64_t num_rows() const { return first_row_.back(); }
  std::int64_t max_pieces() const { return max_pieces_; }
  std::span<const Piece> pieces(std::int64_t row) const;
  const PackedSource& source_of(std::int64_t row) const;

  // Rows of one epoch. Without weights every row once. With weights each source has a share of the
  // tokens: sources without a weight are seen once, and the others fill the rest of the shares.
  std::int64_t epoch_rows() const { return first_slot_.back(); }
  std::int64_t epoch_rows_of(std::size_t source) const {
    return first_slot_[source + 1] - first_slot_[source];
  }

  // "an epoch: 5274 rows of 256 in 660 steps of 8, the last one of 2", and where sources are
  // weighted a line for each: how often it is seen and its share of the tokens.
  std::vector<std::string> describe_epoch(std::int64_t rows_per_step) const;

  // The row at `index` (< epoch_rows()) of `epoch`: a pure function of its arguments, at O(1).
  std::int64_t row_at(std::uint64_t seed, std::int64_t epoch, std::int64_t index,
                      bool shuffle) const;

  // Writes a whole row: inputs, targets and positions [sequence_length], padding included. Appends
  // the lengths of its documents, without the padding. Returns the trained targets.
  std::int64_t read_row(std::int64_t row, std::int32_t* inputs, std::int32_t* targets,
                        std::int32_t* positions, std::vector<std::int32_t>& document_lengths) const;

  // "corpus/a.jsonl record 17 tokens 0-255" for every piece of a row. Records count from 0.
  std::vector<std::string> describe_row(std::int64_t row) const;

 private:
  std::size_t source_index(std::int64_t row) const;
  void plan_epoch();

  std::vector<PackedSource> sources_;
  std::int64_t sequence_length_;
  std::int64_t max_pieces_ = 0;
  std::vector<std::int64_t> first_row_;   // per source, and the total
  std::vector<std::int64_t> first_slot_;  // of an epoch, per source, and the total
};

}  // namespace tessera
