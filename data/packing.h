// Rows of a fixed length made of pieces of documents, and the index on disk that lists them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "data/mapped_file.h"

namespace tessera {

// `length` (input, target) pairs of a document, from its input `begin` on: pair t is the token
// begin + t and the one behind it. Document numbers are those of the source.
struct Piece {
  std::uint64_t document = 0;
  std::uint64_t begin = 0;
  std::uint32_t length = 0;
  std::uint32_t unused = 0;
};
static_assert(sizeof(Piece) == 24);

// Puts units (the pieces of one record, which stay together) into rows: best fit, longest first,
// within windows of kWindow units; rows with room are carried to the next window, at most kCarried
// of them. Memory is bounded and the result depends on the units and their order alone.
class Packer {
 public:
  static constexpr std::size_t kWindow = 65536;
  static constexpr std::size_t kCarried = 1024;

  using EmitRow = std::function<void(std::span<const Piece> row)>;

  // Without `packing` every unit is a row. `max_pieces` bounds the pieces of a packed row; a unit
  // with more has a row to itself.
  Packer(std::int64_t row_length, std::int64_t max_pieces, bool packing, EmitRow emit);

  void add(std::span<const Piece> unit);  // total length in 1..row_length
  void finish();

 private:
  struct Unit {
    std::size_t first = 0;  // in pieces_
    std::size_t count = 0;
    std::int64_t length = 0;
  };
  struct Row {
    std::vector<Piece> pieces;
    std::int64_t room = 0;
  };

  void pack_window();
  void place(const Unit& unit);
  void emit(Row& row);

  std::int64_t row_length_;
  std::size_t max_pieces_;
  bool packing_;
  EmitRow emit_;
  std::vector<Piece> pieces_;  // of the window
  std::vector<Unit> units_;
  std::vector<Row> rows_;
  std::map<std::int64_t, std::set<std::size_t>> by_room_;  // open rows: room -> index in rows_
};

// What became of the documents of a source.
struct PackingCounts {
  std::int64_t rows = 0;
  std::int64_t pieces = 0;
  std::int64_t max_pieces = 0;      // of a row
  std::int64_t pairs = 0;           // positions used in rows
  std::int64_t target_tokens = 0;   // of these, trained
  std::int64_t records = 0;         // that gave at least one piece
  std::int64_t too_short = 0;       // documents of fewer than two tokens
  std::int64_t without_target = 0;  // records or pieces of split ones with nothing to train
  std::int64_t split = 0;           // overlong records
  std::int64_t cut = 0;
  std::int64_t cut_pairs = 0;  // lost by cutting
  std::int64_t dropped = 0;    // overlong records left out
  std::int64_t skipped = 0;    // records on the skip list
};

// The rows of one source on disk: NAME.pieces, NAME.rows (first piece of each row, and the end),
// and NAME.json with the counts, written last.
class PackedRowsWriter {
 public:
  explicit PackedRowsWriter(const std::filesystem::path& path);
  void add(std::span<const Piece> row);
  // `counts`: all but rows, pieces, max_pieces and pairs.
  void commit(PackingCounts counts);

 private:
  std::filesystem::path path_;
  AtomicFile pieces_;
  AtomicFile rows_;
  PackingCounts counts_;
};

class PackedRows {
 public:
  static bool exists(const std::filesystem::path& path);
  explicit PackedRows(const std::filesystem::path& path);

  std::int64_t size() const { return counts_.rows; }
  std::span<const Piece> operator[](std::int64_t row) const;
  const PackingCounts& counts() const { return counts_; }

 private:
  MappedFile pieces_;
  MappedFile rows_;
  PackingCounts counts_;
};

}  // namespace tessera
