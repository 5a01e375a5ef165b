// From the documents of a source to its packed rows: overlong records, masked ones, and the part
// that is held out for evaluation.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "data/dataset.h"
#include "data/skip_list.h"

namespace tessera {

struct PackSettings {
  std::int64_t sequence_length = 0;
  bool packing = true;
  std::string overlong = "auto";  // auto, split, cut, drop
  std::int64_t max_records = 0;   // 0: all
  double held_out_fraction = 0;
  const RecordSkipList* skip_list = nullptr;  // records to leave out, or null
};

// Pieces per packed row at most: documents of 32 tokens on average still fill it.
std::int64_t max_pieces_per_row(std::int64_t sequence_length);

// Writes the rows to `kept`, and those held out to `held_out`: whole records chosen by a fixed
// pseudo-random order (at least one, and not all). Where that would be fewer than four texts, or
// there is but one record, the end of each is held out instead: one book gives training and
// evaluation rows. Split records lose no pair: chunk k starts at input k * sequence_length.
void pack_source(const DocumentSet& documents, const PackSettings& settings,
                 const std::filesystem::path& kept,
                 const std::optional<std::filesystem::path>& held_out);

}  // namespace tessera
