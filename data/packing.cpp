#include "data/packing.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kKind = "tessera rows 1";

fs::path with_suffix(const fs::path& path, const char* suffix) {
  fs::path result = path;
  result += suffix;
  return result;
}

// Every count with its name, for writing and reading alike.
template <typename Counts, typename Function>
void for_each_count(Counts& counts, Function&& function) {
  function("rows", counts.rows);
  function("pieces", counts.pieces);
  function("max_pieces", counts.max_pieces);
  function("pairs", counts.pairs);
  function("target_tokens", counts.target_tokens);
  function("records", counts.records);
  function("too_short", counts.too_short);
  function("without_target", counts.without_target);
  function("split", counts.split);
  function("cut", counts.cut);
  function("cut_pairs", counts.cut_pairs);
  function("dropped", counts.dropped);
  function("skipped", counts.skipped);
}

}  // namespace

Packer::Packer(std::int64_t row_length, std::int64_t max_pieces, bool packing, EmitRow emit)
    : row_length_(row_length),
      max_pieces_(static_cast<std::size_t>(max_pieces)),
      packing_(packing),
      emit_(std::move(emit)) {
  CHECK(row_length > 0 && max_pieces > 0, "[packing] rows of {} with {} pieces", row_length,
        max_pieces);
}

void Packer::add(std::span<const Piece> unit) {
  Unit added{pieces_.size(), unit.size(), 0};
  for (const Piece& piece : unit) added.length += piece.length;
  CHECK(added.length > 0 && added.length <= row_length_, "[packing] a unit of {} in rows of {}",
        added.length, row_length_);
  if (!packing_ || added.length == row_length_ || unit.size() >= max_pieces_) {
    emit_(unit);
    return;
  }
  pieces_.insert(pieces_.end(), unit.begin(), unit.end());
  units_.push_back(added);
  if (units_.size() == kWindow) pack_window();
}

void Packer::pack_window() {
  // Longest first; equal ones in their order, so that the result is one and the same everywhere.
  std::stable_sort(units_.begin(), units_.end(),
                   [](const Unit& a, const Unit& b) { return a.length > b.length; });
  for (const Unit& unit : units_) place(unit);
  units_.clear();
  pieces_.clear();

  // Keep the open rows with most room, in order of their making; all others are done.
  std::size_t kept = 0;
  std::vector<bool> keep(rows_.size(), false);
  for (auto entry = by_room_.rbegin(); entry != by_room_.rend() && kept < kCarried; ++entry) {
    for (const std::size_t row : entry->second) {
      if (kept == kCarried) break;
      keep[row] = true;
      ++kept;
    }
  }
  std::vector<Row> carried;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (keep[i]) {
      carried.push_back(std::move(rows_[i]));
    } else if (!rows_[i].pieces.empty()) {
      emit(rows_[i]);
    }
  }
  rows_ = std::move(carried);
  by_room_.clear();
  for (std::size_t i = 0; i < rows_.size(); ++i) by_room_[rows_[i].room].insert(i);
}

void Packer::place(const Unit& unit) {
  const auto first = pieces_.begin() + static_cast<std::ptrdiff_t>(unit.first);
  const auto last = first + static_cast<std::ptrdiff_t>(unit.count);
  for (auto entry = by_room_.lower_bound(unit.length); entry != by_room_.end(); ++entry) {
    // The oldest row of this room that can take the unit's pieces.
    auto& candidates = entry->second;
    const auto found = std::find_if(candidates.begin(), candidates.end(), [&](std::size_t row) {
      return rows_[row].pieces.size() + unit.count <= max_pieces_;
    });
    if (found == candidates.end()) continue;
    const std::size_t index = *found;
    candidates.erase(found);
    if (candidates.empty()) by_room_.erase(entry);
    Row& row = rows_[index];
    row.pieces.insert(row.pieces.end(), first, last);
    row.room -= unit.length;
    if (row.room > 0 && row.pieces.size() < max_pieces_) by_room_[row.room].insert(index);
    return;
  }
  rows_.push_back(Row{std::vector<Piece>(first, last), row_length_ - unit.length});
  by_room_[rows_.back().room].insert(rows_.size() - 1);
}

void Packer::emit(Row& row) {
  // Pieces in the order of the source: neighbours in the file are read together.
  std::stable_sort(row.pieces.begin(), row.pieces.end(), [](const Piece& a, const Piece& b) {
    return a.document != b.document ? a.document < b.document : a.begin < b.begin;
  });
  emit_(row.pieces);
}

void Packer::finish() {
  pack_window();
  for (Row& row : rows_) emit(row);
  rows_.clear();
  by_room_.clear();
}

PackedRowsWriter::PackedRowsWriter(const fs::path& path)
    : path_(path), pieces_(with_suffix(path, ".pieces")), rows_(with_suffix(path, ".rows")) {
  const std::uint64_t zero = 0;
  rows_.write(&zero, sizeof(zero));
}

void PackedRowsWriter::add(std::span<const Piece> row) {
  pieces_.write(row.data(), row.size_bytes());
  ++counts_.rows;
  counts_.pieces += static_cast<std::int64_t>(row.size());
  counts_.max_pieces = std::max(counts_.max_pieces, static_cast<std::int64_t>(row.size()));
  for (const Piece& piece : row) counts_.pairs += piece.length;
  const auto end = static_cast<std::uint64_t>(counts_.pieces);
  rows_.write(&end, sizeof(end));
}

void PackedRowsWriter::commit(PackingCounts counts) {
  counts.rows = counts_.rows;
  counts.pieces = counts_.pieces;
  counts.max_pieces = counts_.max_pieces;
  counts.pairs = counts_.pairs;
  pieces_.commit();
  rows_.commit();
  json description = {{"kind", kKind}};
  for_each_count(counts, [&](const char* name, std::int64_t value) { description[name] = value; });
  AtomicFile manifest(with_suffix(path_, ".json"));
  manifest.write(description.dump(2) + "\n");
  manifest.commit();
}

bool PackedRows::exists(const fs::path& path) { return fs::exists(with_suffix(path, ".json")); }

PackedRows::PackedRows(const fs::path& path)
    : pieces_(with_suffix(path, ".pieces")), rows_(with_suffix(path, ".rows")) {
  try {
    const json description = json::parse(read_small_file(with_suffix(path, ".json")));
    for_each_count(counts_, [&](const char* name, std::int64_t& value) {
      value = description.at(name).get<std::int64_t>();
    });
    CHECK_USER(description.at("kind") == kKind, "[data] {}.json is not an index of rows",
               path.string());
  } catch (const json::exception& problem) {
    TESSERA_FAIL(ErrorKind::kUser, "[data] {}.json is damaged: {}; remove it", path.string(),
                 problem.what());
  }
  CHECK_USER(
      pieces_.size() == counts_.pieces * static_cast<std::int64_t>(sizeof(Piece)) &&
          rows_.size() == (counts_.rows + 1) * static_cast<std::int64_t>(sizeof(std::uint64_t)),
      "[data] {} is incomplete; remove {}.json to build the index anew", path.string(),
      path.string());
}

std::span<const Piece> PackedRows::operator[](std::int64_t row) const {
  CHECK(row >= 0 && row < counts_.rows, "[data] row {} of {}", row, counts_.rows);
  const auto bounds = rows_.as<std::uint64_t>();
  const auto begin = static_cast<std::size_t>(bounds[static_cast<std::size_t>(row)]);
  const auto end = static_cast<std::size_t>(bounds[static_cast<std::size_t>(row) + 1]);
  return pieces_.as<Piece>().subspan(begin, end - begin);
}

}  // namespace tessera
