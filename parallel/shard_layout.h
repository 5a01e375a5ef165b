// ShardLayout: where every element of every parameter lives, as pure functions of specs,
// tensor-parallel rank and the number of ZeRO shards. Shared by the store, checkpoints, the planner
// and tests.
//
// A bucket is the flat concatenation of its parameters' local (tensor-parallel) pieces. Parameters
// start at multiples of 256 elements unless they follow their predecessor;
// parameters whose gradient is a partial sum over tp come first, so that one call sums them. The
// bucket is exchanged in parts (one, unless a limit is given), each cut into shard_count equal
// shards of a multiple of 256 elements, so that blocks of 8-bit moments are never cut; a rank's shard is its piece of every part, one behind the
// other. Cuts may fall anywhere in a parameter.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/param_spec.h"

namespace tessera {

inline constexpr std::int64_t kShardAlignment = 256;

// The piece of a parameter that a tensor-parallel rank holds. A rank-1 parameter is a column: cols
// == 1.
struct LocalExtent {
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;  // valid rows
  std::int64_t col_begin = 0;
  std::int64_t cols = 0;          // valid columns
  std::int64_t storage_rows = 0;  // >= rows: padding is zero and stays zero
  std::int64_t storage_cols = 0;  // >= cols
  int copies = 1;                 // ranks that hold this same piece
  int copy = 0;                   // which of them this rank is
  std::int64_t elements() const { return storage_rows * storage_cols; }
};

// Throws kUser, naming the parameter and the numbers, where the placement does not divide.
LocalExtent local_extent(const ParamSpec& spec, int tensor_size, int tensor_rank);

struct BucketLayout {
  struct Piece {
    std::int64_t offset = 0;  // elements from the bucket's start
    LocalExtent extent;
  };
  // What one collective moves: elements [begin, + size) of the bucket, [shard_begin, + shard_size)
  // of each shard.
  struct Part {
    std::int64_t begin = 0;
    std::int64_t size = 0;
    std::int64_t shard_begin = 0;
    std::int64_t shard_size = 0;
  };
  struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };
  std::vector<Piece> pieces;  // in the order of the bucket's params
  std::vector<Part> parts;
  std::int64_t size = 0;  // elements, padding included
  std::int64_t shard_size = 0;
  // Ranges whose gradients are summed over tp (empty if begin == end) and over the copies of a
  // group.
  std::int64_t tensor_sum_begin = 0;
  std::int64_t tensor_sum_end = 0;
  std::vector<Range> copies_sums;
  int copies = 1;  // size of the groups of copies
};

// `max_part`: most elements of a part, rounded to what can be cut; 0: the whole bucket.
BucketLayout lay_out_bucket(const BucketSpec& bucket, int tensor_size, int tensor_rank,
                            int shard_count, std::int64_t max_part = 0);

// What `shard` holds of [begin, end) of the bucket, as ranges of the shard.
std::vector<BucketLayout::Range> shard_ranges(const BucketLayout& layout, int shard,
                                              std::int64_t begin, std::int64_t end);

// The part of one parameter that one shard holds.
struct ShardPiece {
  int param = 0;
  std::int64_t shard_begin = 0;  // elements within the shard
  std::int64_t local_begin = 0;  // elements within the parameter's local piece
  std::int64_t length = 0;
};

std::vector<ShardPiece> pieces_of_shard(const BucketLayout& layout, int shard);

// A rectangle of a global parameter that is contiguous in a shard: rows [row_begin, + rows) of
// columns [col_begin, + cols).
struct GlobalExtent {
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
  std::int64_t col_begin = 0;
  std::int64_t cols = 0;
  std::int64_t shard_begin = 0;
  std::int64_t elements() const { return rows * cols; }
};

// The valid part of `piece` as rectangles: first partial row, whole rows, last partial row, and row
// by row where the columns are padded.
std::vector<GlobalExtent> global_extents(const ShardPiece& piece, const LocalExtent& extent);

}  // namespace tessera
