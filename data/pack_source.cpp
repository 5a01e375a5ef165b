#include "data/pack_source.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "data/permutation.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

// A part of a document that is to become rows: pairs [begin, begin + length).
struct Span {
  std::int64_t document = 0;
  std::int64_t begin = 0;
  std::int64_t length = 0;
};

// One of the two destinations: trained or held out.
class RowSink {
 public:
  RowSink(const DocumentSet& documents, const PackSettings& settings,
          const std::filesystem::path& path)
      : documents_(documents),
        settings_(settings),
        writer_(path),
        packer_(settings.sequence_length, max_pieces_per_row(settings.sequence_length),
                settings.packing, [this](std::span<const Piece> row) { writer_.add(row); }) {}

  // The spans of one record.
  void add(const std::vector<Span>& record) {
    std::int64_t total = 0;
    bool has_labels = false;
    for (const Span& span : record) {
      total += span.length;
      has_labels |= documents_.find(span.document).entry.has_labels != 0;
    }
    const std::int64_t row_length = settings_.sequence_length;
    bool used = false;
    if (total <= row_length) {
      used = add_unit(record);
    } else {
      std::string policy = settings_.overlong;
      // Splitting an answer from its prompt would train it without its reason: labelled rows are
      // cut.
      if (policy == "auto") policy = has_labels ? "cut" : "split";
      if (policy == "drop") {
        ++counts_.dropped;
        return;
      }
      if (policy == "cut") {
        ++counts_.cut;
        counts_.cut_pairs += total - row_length;
        used = add_unit(first_pairs(record, row_length));
      } else {
        ++counts_.split;
        for (const Span& span : record) {
          for (std::int64_t done = 0; done < span.length; done += row_length) {
            const std::int64_t length = std::min(row_length, span.length - done);
            used |= add_unit({{span.document, span.begin + done, length}});
          }
        }
      }
    }
    if (used) ++counts_.records;
  }

  void count_too_short() { ++counts_.too_short; }
  void count_skipped() { ++counts_.skipped; }

  void commit() {
    packer_.finish();
    writer_.commit(counts_);
  }

 private:
  static std::vector<Span> first_pairs(const std::vector<Span>& record, std::int64_t count) {
    std::vector<Span> kept;
    for (Span span : record) {
      span.length = std::min(span.length, count);
      count -= span.length;
      if (span.length > 0) kept.push_back(span);
    }
    return kept;
  }

  // False if nothing in it is trained: such a unit is left out and counted.
  bool add_unit(const std::vector<Span>& spans) {
    std::int64_t trained = 0;
    std::vector<Piece> pieces;
    for (const Span& span : spans) {
      trained += documents_.count_trained(documents_.find(span.document), span.begin, span.length);
      pieces.push_back({static_cast<std::uint64_t>(span.document),
                        static_cast<std::uint64_t>(span.begin),
                        static_cast<std::uint32_t>(span.length), 0});
    }
    if (trained == 0) {
      ++counts_.without_target;
      return false;
    }
    counts_.target_tokens += trained;
    packer_.add(pieces);
    return true;
  }

  const DocumentSet& documents_;
  const PackSettings& settings_;
  PackedRowsWriter writer_;
  Packer packer_;
  PackingCounts counts_;
};

// Which records are held out, or that the end of each is.
class HeldOutChoice {
 public:
  HeldOutChoice(const DocumentSet& documents, double fraction, std::int64_t max_records)
      : records_(count_records(documents, max_records)),
        order_(records_, derive_key(0, RandomPurpose::kShuffle, 0, 0x686f6c64)) {
    if (fraction <= 0) return;
    const auto& parts = documents.parts();
    const bool all_text =
        std::all_of(parts.begin(), parts.end(), [](const StorePart& part) { return part.is_text; });
    const double expected = fraction * static_cast<double>(records_);
    ends_only_ = records_ < 2 || (all_text && expected < 4);
    if (!ends_only_) count_ = std::clamp<std::int64_t>(std::llround(expected), 1, records_ - 1);
  }
  bool contains(std::int64_t record) const { return count_ > 0 && order_(record) < count_; }
  bool ends_only() const { return ends_only_; }

 private:
  static std::int64_t count_records(const DocumentSet& documents, std::int64_t max_records) {
    std::int64_t records = 0;
    for (const StorePart& part : documents.parts()) records += part.store->counts().rows_read;
    if (max_records > 0) records = std::min(records, max_records);
    return records;
  }

  std::int64_t records_;
  Permutation order_;
  std::int64_t count_ = 0;
  bool ends_only_ = false;
};

}  // namespace

std::int64_t max_pieces_per_row(std::int64_t sequence_length) {
  return std::max<std::int64_t>(32, sequence_length / 32);
}

void pack_source(const DocumentSet& documents, const PackSettings& settings,
                 const std::filesystem::path& kept,
                 const std::optional<std::filesystem::path>& held_out) {
  CHECK(settings.sequence_length <= std::numeric_limits<std::int32_t>::max(),
        "[data] sequence_length {} is too long", settings.sequence_length);
  RowSink train(documents, settings, kept);
  std::unique_ptr<RowSink> eval;
  if (held_out) eval = std::make_unique<RowSink>(documents, settings, *held_out);
  const double fraction = held_out ? settings.held_out_fraction : 0;

  const HeldOutChoice choice(documents, fraction, settings.max_records);

  std::int64_t records_before = 0;  // of all parts so far
  std::int64_t document = 0;
  std::vector<Span> record;
  for (const StorePart& part : documents.parts()) {
    const std::int64_t end = document + part.store->num_documents();
    while (document < end) {
      record.clear();
      const std::uint64_t row = documents.find(document).entry.row;
      const auto row_number = static_cast<std::int64_t>(row);
      if (settings.max_records > 0 && records_before + row_number >= settings.max_records) {
        document = end;
        break;
      }
      for (; document < end; ++document) {
        const DocumentEntry entry = documents.find(document).entry;
        if (entry.row != row) break;
        const std::int64_t pairs = documents.num_pairs(entry);
        if (pairs == 0) {
          train.count_too_short();
        } else {
          record.push_back({document, 0, pairs});
        }
      }
      if (record.empty()) continue;
      if (settings.skip_list != nullptr) {
        const StorePart::Origin origin = part.origin(row);
        if (settings.skip_list->contains(*origin.file, origin.record)) {
          train.count_skipped();
          continue;
        }
      }
      if (choice.ends_only()) {
        std::vector<Span> tail;
        for (Span& span : record) {
          const auto held =
              static_cast<std::int64_t>(std::llround(fraction * static_cast<double>(span.length)));
          if (held > 0) tail.push_back({span.document, span.begin + span.length - held, held});
          span.length -= held;
        }
        std::erase_if(record, [](const Span& span) { return span.length == 0; });
        if (!tail.empty()) eval->add(tail);
        if (!record.empty()) train.add(record);
      } else if (choice.contains(records_before + row_number)) {
        eval->add(record);
      } else {
        train.add(record);
      }
    }
    records_before += part.store->counts().rows_read;
  }
  train.commit();
  if (eval) eval->commit();
}

}  // namespace tessera
