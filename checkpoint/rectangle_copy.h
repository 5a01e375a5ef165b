// Moves the part of a tensor that one block of a file and one piece of memory have in common.
#pragma once

#include <cstdint>

#include "checkpoint/checkpoint_index.h"

namespace tessera {

// A dense row-major rectangle of a global tensor in host memory.
struct HostRectangle {
  char* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t row_begin = 0;
  std::int64_t rows = 0;
  std::int64_t col_begin = 0;
  std::int64_t cols = 0;
};

// Whether elements of `from` can be read as `to`: the same, or both of fp64, fp32, bf16, fp16.
bool can_convert(DType from, DType to);

// Where a rectangle and an extent meet.
struct Overlap {
  std::int64_t row_begin = 0;
  std::int64_t row_end = 0;
  std::int64_t col_begin = 0;
  std::int64_t col_end = 0;

  bool is_empty() const { return row_begin >= row_end || col_begin >= col_end; }
  std::int64_t elements() const {
    return is_empty() ? 0 : (row_end - row_begin) * (col_end - col_begin);
  }
};
Overlap overlap_of(const HostRectangle& rectangle, const CheckpointExtent& extent);

// Copies, with conversion, what `block` (bytes [block_begin, block_end) of the file) holds of the
// overlap of `extent` (elements of `dtype`) with `to`. Returns the number of elements.
std::int64_t copy_from_block(const char* block, std::uint64_t block_begin, std::uint64_t block_end,
                             const CheckpointExtent& extent, DType dtype, const HostRectangle& to);

}  // namespace tessera
