#include "data/dataset.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "data/batch.h"
#include "data/permutation.h"
#include "engine/core/error.h"

namespace tessera {

StorePart::Origin StorePart::origin(std::uint64_t row) const {
  const auto& files = store->files();
  const auto number = static_cast<std::int64_t>(row);
  const auto after = std::upper_bound(
      files.begin(), files.end(), number,
      [](std::int64_t value, const StoreFile& file) { return value < file.first_row; });
  CHECK(after != files.begin(), "[data] row {} of a store has no file", row);
  const StoreFile& file = *(after - 1);
  const bool is_first = after - 1 == files.begin();
  return {&file.path, number - file.first_row + (is_first ? row_offset : 0)};
}

DocumentSet::DocumentSet(std::vector<StorePart> parts) : parts_(std::move(parts)) {
  first_document_.push_back(0);
  for (const StorePart& part : parts_) {
    first_document_.push_back(first_document_.back() + part.store->num_documents());
  }
}

DocumentSet::Place DocumentSet::find(std::int64_t document) const {
  CHECK(document >= 0 && document < num_documents(), "[data] document {} of {}", document,
        num_documents());
  const auto after = std::upper_bound(first_document_.begin(), first_document_.end(), document);
  const auto part = static_cast<std::size_t>(after - first_document_.begin()) - 1;
  return {&parts_[part], parts_[part].store->document(document - first_document_[part])};
}

std::int64_t DocumentSet::num_pairs(const DocumentEntry& entry) const {
  const auto length = static_cast<std::int64_t>(entry.length);
  if (length == 0) return 0;
  const bool has_more = alignment_ == LabelAlignment::kShifted && entry.last_label >= 0;
  return has_more ? length : length - 1;
}

std::int64_t DocumentSet::count_trained(const Place& place, std::int64_t begin,
                                        std::int64_t count) const {
  if (place.entry.has_labels == 0 || alignment_ == LabelAlignment::kNone) return count;
  const std::uint64_t shift = alignment_ == LabelAlignment::kAligned ? 1 : 0;
  std::int64_t trained = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t token = place.entry.begin + static_cast<std::uint64_t>(begin + i) + shift;
    trained += place.part->store->label_is_trained(token) ? 1 : 0;
  }
  return trained;
}

void DocumentSet::read(const Piece& piece, std::int32_t* inputs, std::int32_t* targets) const {
  const Place place = find(static_cast<std::int64_t>(piece.document));
  const DocumentEntry& entry = place.entry;
  const auto length = static_cast<std::int64_t>(piece.length);
  CHECK(piece.begin + piece.length <= static_cast<std::uint64_t>(num_pairs(entry)),
        "[data] pairs {} + {} of a document with {}", piece.begin, length, num_pairs(entry));
  const TokenStore& store = *place.part->store;
  const std::uint64_t first = entry.begin + piece.begin;
  store.read(first, length, inputs);
  std::copy(inputs + 1, inputs + length, targets);
  // The last target is the next token, or the label behind the end of the document.
  if (piece.begin + piece.length == entry.length) {
    targets[length - 1] = entry.last_label;
  } else {
    store.read(first + piece.length, 1, targets + length - 1);
  }
  if (entry.has_labels == 0 || alignment_ == LabelAlignment::kNone) return;
  const std::uint64_t shift = alignment_ == LabelAlignment::kAligned ? 1 : 0;
  for (std::int64_t i = 0; i < length; ++i) {
    if (!store.label_is_trained(first + static_cast<std::uint64_t>(i) + shift)) {
      targets[i] = kIgnoredTarget;
    }
  }
}

Dataset::Dataset(std::vector<PackedSource> sources, std::int64_t sequence_length)
    : sources_(std::move(sources)), sequence_length_(sequence_length) {
  first_row_.push_back(0);
  for (const PackedSource& source : sources_) {
    first_row_.push_back(first_row_.back() + source.rows->size());
    max_pieces_ = std::max(max_pieces_, source.rows->counts().max_pieces);
  }
  CHECK(num_rows() > 0, "[data] a dataset without rows");
  plan_epoch();
}

void Dataset::plan_epoch() {
  double weights = 0;       // of the sources that have one
  double plain_tokens = 0;  // of those that have none: each seen once
  double all_tokens = 0;
  bool all_weighted = true;
  for (const PackedSource& source : sources_) {
    const auto tokens = static_cast<double>(source.rows->counts().target_tokens);
    all_tokens += tokens;
    if (source.weight) {
      CHECK_USER(source.rows->size() > 0, "[data] {} has weight {} but no rows", source.name,
                 *source.weight);
      weights += *source.weight;
    } else {
      plain_tokens += tokens;
      all_weighted = false;
    }
  }
  CHECK_USER(
      all_weighted || weights < 1,
      "[data] the weights add up to {} and other sources have none; a weight is a share of the "
      "tokens, so give all sources a weight or keep the sum below 1",
      weights);
  // All weighted: an epoch has about as many tokens as there are; else the unweighted ones set it.
  const double epoch_tokens = all_weighted ? all_tokens : plain_tokens / (1 - weights);
  const double unit = all_weighted ? weights : 1;
  first_slot_ = {0};
  for (const PackedSource& source : sources_) {
    std::int64_t rows = source.rows->size();
    if (source.weight) {
      const auto counts = source.rows->counts();
      const double tokens_per_row =
          static_cast<double>(counts.target_tokens) / static_cast<double>(counts.rows);
      rows = std::max<std::int64_t>(
          1, std::llround(*source.weight / unit * epoch_tokens / tokens_per_row));
    }
    first_slot_.push_back(first_slot_.back() + rows);
  }
}

std::vector<std::string> Dataset::describe_epoch(std::int64_t rows_per_step) const {
  const auto tokens_of = [this](std::size_t source) {
    const PackingCounts& counts = sources_[source].rows->counts();
    if (counts.rows == 0) return 0.0;
    return static_cast<double>(counts.target_tokens) / static_cast<double>(counts.rows) *
           static_cast<double>(epoch_rows_of(source));
  };
  double tokens = 0;
  bool has_weights = false;
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    tokens += tokens_of(i);
    has_weights |= sources_[i].weight.has_value();
  }
  const std::int64_t steps = (epoch_rows() + rows_per_step - 1) / rows_per_step;
  const std::int64_t last = epoch_rows() - (steps - 1) * rows_per_step;
  std::vector<std::string> lines = {fmt::format(
      "an epoch: {} row{} of {} in {} step{} of {}{}, {}{:.0f} target tokens", epoch_rows(),
      epoch_rows() == 1 ? "" : "s", sequence_length_, steps, steps == 1 ? "" : "s", rows_per_step,
      last < rows_per_step ? fmt::format(", the last one of {}", last) : "",
      has_weights ? "about " : "", tokens)};
  for (std::size_t i = 0; has_weights && i < sources_.size(); ++i) {
    const std::int64_t rows = sources_[i].rows->size();
    if (rows == 0) continue;
    lines.push_back(
        fmt::format("{}: {} of its {} rows an epoch, seen {:.2f} times, {:.1f}% of the tokens",
                    sources_[i].name, epoch_rows_of(i), rows,
                    static_cast<double>(epoch_rows_of(i)) / static_cast<double>(rows),
                    100 * tokens_of(i) / tokens));
  }
  return lines;
}

std::size_t Dataset::source_index(std::int64_t row) const {
  CHECK(row >= 0 && row < num_rows(), "[data] row {} of {}", row, num_rows());
  const auto after = std::upper_bound(first_row_.begin(), first_row_.end(), row);
  return static_cast<std::size_t>(after - first_row_.begin()) - 1;
}

std::span<const Piece> Dataset::pieces(std::int64_t row) const {
  const std::size_t source = source_index(row);
  return (*sources_[source].rows)[row - first_row_[source]];
}

const PackedSource& Dataset::source_of(std::int64_t row) const {
  return sources_[source_index(row)];
}

std::int64_t Dataset::row_at(std::uint64_t seed, std::int64_t epoch, std::int64_t index,
                             bool shuffle) const {
  CHECK(epoch >= 0 && index >= 0 && index < epoch_rows(), "[data] row {} of epoch {}", index,
        epoch);
  const auto key = [seed](std::int64_t round, std::uint64_t stream) {
    return derive_key(seed, RandomPurpose::kShuffle, static_cast<std::uint64_t>(round), stream);
  };
  const std::int64_t slot = shuffle ? Permutation(epoch_rows(), key(epoch, 0))(index) : index;
  const auto after = std::upper_bound(first_slot_.begin(), first_slot_.end(), slot);
  const auto source = static_cast<std::size_t>(after - first_slot_.begin()) - 1;
  const std::int64_t within = slot - first_slot_[source];
  if (!sources_[source].weight) return first_row_[source] + within;
  // A weighted source has epochs of its own, which run on from one epoch of the whole to the next.
  const std::int64_t size = sources_[source].rows->size();
  const std::int64_t draw = epoch * epoch_rows_of(source) + within;
  const std::int64_t position = draw % size;
  return first_row_[source] +
         (shuffle ? Permutation(size, key(draw / size, source + 1))(position) : position);
}

std::int64_t Dataset::read_row(std::int64_t row, std::int32_t* inputs, std::int32_t* targets,
                               std::int32_t* positions,
                               std::vector<std::int32_t>& document_lengths) const {
  const DocumentSet& documents = *source_of(row).documents;
  std::int64_t used = 0;
  for (const Piece& piece : pieces(row)) {
    CHECK(used + piece.length <= sequence_length_, "[data] row {} is longer than {}", row,
          sequence_length_);
    documents.read(piece, inputs + used, targets + used);
    for (std::uint32_t i = 0; i < piece.length; ++i) {
      positions[used + i] = static_cast<std::int32_t>(i);
    }
    document_lengths.push_back(static_cast<std::int32_t>(piece.length));
    used += piece.length;
  }
  const std::int64_t trained = used - std::count(targets, targets + used, kIgnoredTarget);
  std::fill(inputs + used, inputs + sequence_length_, 0);
  std::fill(targets + used, targets + sequence_length_, kIgnoredTarget);
  for (std::int64_t i = used; i < sequence_length_; ++i) {
    positions[i] = static_cast<std::int32_t>(i - used);
  }
  return trained;
}

std::vector<std::string> Dataset::describe_row(std::int64_t row) const {
  const DocumentSet& documents = *source_of(row).documents;
  std::vector<std::string> lines;
  for (const Piece& piece : pieces(row)) {
    const DocumentSet::Place place = documents.find(static_cast<std::int64_t>(piece.document));
    const StorePart::Origin origin = place.part->origin(place.entry.row);
    lines.push_back(fmt::format("{} record {} tokens {}-{}", *origin.file, origin.record,
                                piece.begin, piece.begin + piece.length - 1));
  }
  return lines;
}

}  // namespace tessera
