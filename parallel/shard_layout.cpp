#include "parallel/shard_layout.h"

#include <algorithm>

#include "engine/core/error.h"

namespace tessera {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

LocalExtent local_extent(const ParamSpec& spec, int tensor_size, int tensor_rank) {
  const std::int64_t rows = spec.shape[0];
  const std::int64_t cols = spec.shape.rank == 2 ? spec.shape[1] : 1;
  LocalExtent extent{0, rows, 0, cols, rows, cols, 1, 0};
  const Placement& placement = spec.placement;
  switch (placement.kind) {
    case Placement::Kind::kReplicated:
      extent.copies = tensor_size;
      extent.copy = tensor_rank;
      return extent;
    case Placement::Kind::kSharded: {
      const std::int64_t length = placement.dim == 0 ? rows : cols;
      std::int64_t piece = (length + tensor_size - 1) / tensor_size;
      if (placement.quantum > 1) {
        piece = round_up(piece, placement.quantum);
      } else {
        CHECK_USER(length % tensor_size == 0,
                   "[parallel] {}: {} of size {} cannot be split over parallel.tensor {}",
                   spec.name, placement.dim == 0 ? "rows" : "columns", length, tensor_size);
      }
      const std::int64_t begin = std::min(length, piece * tensor_rank);
      const std::int64_t valid = std::min(piece, length - begin);
      if (placement.dim == 0) {
        extent.row_begin = begin;
        extent.rows = valid;
        extent.storage_rows = piece;
      } else {
        extent.col_begin = begin;
        extent.cols = valid;
        extent.storage_cols = piece;
      }
      return extent;
    }
    case Placement::Kind::kShardedInGroups: {
      const std::int64_t groups = placement.groups;
      CHECK_USER(groups > 0 && tensor_size % groups == 0 && rows % groups == 0,
                 "[parallel] {}: {} groups cannot be spread over parallel.tensor {}", spec.name,
                 groups, tensor_size);
      extent.copies = static_cast<int>(tensor_size / groups);
      extent.copy = tensor_rank % extent.copies;
      extent.rows = extent.storage_rows = rows / groups;
      extent.row_begin = tensor_rank / extent.copies * extent.rows;
      return extent;
    }
  }
  return extent;
}

BucketLayout lay_out_bucket(const BucketSpec& bucket, int tensor_size, int tensor_rank,
                            int shard_count, std::int64_t max_part) {
  BucketLayout layout;
  layout.pieces.resize(bucket.params.size());
  std::int64_t offset = 0;
  const auto place = [&](std::size_t i) {
    const ParamSpec& spec = bucket.params[i];
    if (!spec.follows_previous) offset = round_up(offset, kShardAlignment);
    auto& piece = layout.pieces[i];
    piece.extent = local_extent(spec, tensor_size, tensor_rank);
    piece.offset = offset;
    offset += piece.extent.elements();
  };
  for (std::size_t i = 0; i < bucket.params.size(); ++i) {
    if (bucket.params[i].gradient_sum == GradientSum::kTensor) place(i);
  }
  layout.tensor_sum_end = tensor_size > 1 ? offset : 0;
  for (std::size_t i = 0; i < bucket.params.size(); ++i) {
    const ParamSpec& spec = bucket.params[i];
    if (spec.gradient_sum == GradientSum::kTensor) continue;
    place(i);
    const auto& piece = layout.pieces[i];
    if (spec.gradient_sum != GradientSum::kCopies || piece.extent.copies == 1) continue;
    layout.copies = piece.extent.copies;
    if (!layout.copies_sums.empty() && layout.copies_sums.back().end == piece.offset) {
      layout.copies_sums.back().end = offset;
    } else {
      layout.copies_sums.push_back({piece.offset, offset});
    }
  }
  const std::int64_t unit =
      kShardAlignment * shard_count;  // the least that every shard has a piece of
  layout.size = round_up(offset, unit);
  layout.shard_size = layout.size / shard_count;
  const std::int64_t part = max_part > 0 ? std::max(unit, max_part / unit * unit) : layout.size;
  for (std::int64_t begin = 0; begin < layout.size; begin += part) {
    const std::int64_t size = std::min(part, layout.size - begin);
    layout.parts.push_back({begin, size, begin / shard_count, size / shard_count});
  }
  return layout;
}

std::vector<BucketLayout::Range> shard_ranges(const BucketLayout& layout, int shard,
                                              std::int64_t begin, std::int64_t end) {
  std::vector<BucketLayout::Range> result;
  for (const BucketLayout::Part& part : layout.parts) {
    const std::int64_t start = part.begin + part.shard_size * shard;
    const std::int64_t from = std::max(start, begin);
    const std::int64_t to = std::min(start + part.shard_size, end);
    if (from >= to) continue;
    const std::int64_t at = part.shard_begin + (from - start);
    if (!result.empty() && result.back().end == at) {
      result.back().end += to - from;
    } else {
      result.push_back({at, at + (to - from)});
    }
  }
  return result;
}

std::vector<ShardPiece> pieces_of_shard(const BucketLayout& layout, int shard) {
  std::vector<ShardPiece> result;
  for (const BucketLayout::Part& part : layout.parts) {
    const std::int64_t begin = part.begin + part.shard_size * shard;
    const std::int64_t end = begin + part.shard_size;
    for (std::size_t i = 0; i < layout.pieces.size(); ++i) {
      const auto& piece = layout.pieces[i];
      const std::int64_t from = std::max(begin, piece.offset);
      const std::int64_t to = std::min(end, piece.offset + piece.extent.elements());
      if (from >= to) continue;
      result.push_back(
          {static_cast<int>(i), part.shard_begin + (from - begin), from - piece.offset, to - from});
    }
  }
  std::sort(result.begin(), result.end(),
            [](const ShardPiece& a, const ShardPiece& b) { return a.shard_begin < b.shard_begin; });
  return result;
}

std::vector<GlobalExtent> global_extents(const ShardPiece& piece, const LocalExtent& extent) {
  std::vector<GlobalExtent> result;
  const std::int64_t width = extent.storage_cols;
  std::int64_t at = piece.local_begin;
  const std::int64_t end = std::min(piece.local_begin + piece.length, extent.rows * width);
  while (at < end) {
    const std::int64_t row = at / width;
    const std::int64_t col = at % width;
    if (col >= extent.cols) {
      at = (row + 1) * width;
      continue;
    }
    GlobalExtent part;
    part.row_begin = extent.row_begin + row;
    part.col_begin = extent.col_begin + col;
    part.shard_begin = piece.shard_begin + (at - piece.local_begin);
    if (col == 0 && extent.cols == width && end - at >= width) {
      part.rows = (end - at) / width;
      part.cols = width;
    } else {
      part.rows = 1;
      part.cols = std::min(extent.cols - col, end - at);
    }
    at += part.elements();
    result.push_back(part);
  }
  return result;
}

}  // namespace tessera
