#include "checkpoint/rectangle_copy.h"

#include <algorithm>
#include <cstring>

#include "engine/core/error.h"
#include "engine/core/numeric.h"

namespace tessera {
namespace {

template <typename From, typename To>
void convert(const char* from, char* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + i * static_cast<std::int64_t>(sizeof(From)), sizeof(From));
    To result;
    if constexpr (sizeof(From) == 8 || sizeof(To) == 8) {
      // fp64 goes to the half formats through fp32: it is no format of training state.
      if constexpr (sizeof(From) == 8 && sizeof(To) == 2) {
        result = To(static_cast<float>(value));
      } else if constexpr (sizeof(From) == 2) {
        result = static_cast<To>(static_cast<float>(value));
      } else {
        result = static_cast<To>(value);
      }
    } else {
      result = static_cast<To>(static_cast<float>(value));
    }
    std::memcpy(to + i * static_cast<std::int64_t>(sizeof(To)), &result, sizeof(To));
  }
}

template <typename From>
void convert_from(const char* from, DType to_dtype, char* to, std::int64_t count) {
  switch (to_dtype) {
    case DType::kF64:
      return convert<From, double>(from, to, count);
    case DType::kF32:
      return convert<From, float>(from, to, count);
    case DType::kBF16:
      return convert<From, bf16>(from, to, count);
    case DType::kF16:
      return convert<From, f16>(from, to, count);
    default:
      CHECK(false, "[checkpoint] no conversion to {}", name_of(to_dtype));
  }
}

void convert_elements(const char* from, DType from_dtype, char* to, DType to_dtype,
                      std::int64_t count) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * size_of(from_dtype));
    return;
  }
  switch (from_dtype) {
    case DType::kF64:
      return convert_from<double>(from, to_dtype, to, count);
    case DType::kF32:
      return convert_from<float>(from, to_dtype, to, count);
    case DType::kBF16:
      return convert_from<bf16>(from, to_dtype, to, count);
    case DType::kF16:
      return convert_from<f16>(from, to_dtype, to, count);
    default:
      CHECK(false, "[checkpoint] no conversion from {}", name_of(from_dtype));
  }
}

bool is_convertible(DType dtype) {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kBF16 ||
         dtype == DType::kF16;
}

}  // namespace

bool can_convert(DType from, DType to) {
  return from == to || (is_convertible(from) && is_convertible(to));
}

Overlap overlap_of(const HostRectangle& rectangle, const CheckpointExtent& extent) {
  return {std::max(rectangle.row_begin, extent.row_begin),
          std::min(rectangle.row_begin + rectangle.rows, extent.row_begin + extent.rows),
          std::max(rectangle.col_begin, extent.col_begin),
          std::min(rectangle.col_begin + rectangle.cols, extent.col_begin + extent.cols)};
}

std::int64_t copy_from_block(const char* block, std::uint64_t block_begin, std::uint64_t block_end,
                             const CheckpointExtent& extent, DType dtype, const HostRectangle& to) {
  const Overlap overlap = overlap_of(to, extent);
  if (overlap.is_empty()) return 0;
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  // Elements of the extent, counted from its begin, that the block holds. Extents and blocks both
  // begin at multiples of the element size, so none is split.
  const std::uint64_t extent_end =
      extent.offset + static_cast<std::uint64_t>(extent.rows * extent.cols * size);
  const std::uint64_t begin = std::max(block_begin, extent.offset);
  const std::uint64_t end = std::min(block_end, extent_end);
  if (begin >= end) return 0;
  const std::int64_t first = static_cast<std::int64_t>(begin - extent.offset) / size;
  const std::int64_t last = static_cast<std::int64_t>(end - extent.offset) / size;
  const char* elements = block + (begin - block_begin);  // of element `first`
  const auto to_size = static_cast<std::int64_t>(size_of(to.dtype));

  const auto copy = [&](std::int64_t from, std::int64_t count, std::int64_t row, std::int64_t col) {
    const std::int64_t place = (row - to.row_begin) * to.cols + (col - to.col_begin);
    convert_elements(elements + (from - first) * size, dtype, to.data + place * to_size, to.dtype,
                     count);
  };
  // Whole rows on both sides: one run.
  if (extent.col_begin == to.col_begin && extent.cols == to.cols) {
    const std::int64_t from =
        std::max(first, (overlap.row_begin - extent.row_begin) * extent.cols);
    const std::int64_t until = std::min(last, (overlap.row_end - extent.row_begin) * extent.cols);
    if (from >= until) return 0;
    copy(from, until - from, extent.row_begin + from / extent.cols,
         extent.col_begin + from % extent.cols);
    return until - from;
  }
  std::int64_t copied = 0;
  const std::int64_t row_begin =
      std::max(overlap.row_begin, extent.row_begin + first / extent.cols);
  const std::int64_t row_end =
      std::min(overlap.row_end, extent.row_begin + (last + extent.cols - 1) / extent.cols);
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const std::int64_t row_start = (row - extent.row_begin) * extent.cols - extent.col_begin;
    const std::int64_t from = std::max(first, row_start + overlap.col_begin);
    const std::int64_t until = std::min(last, row_start + overlap.col_end);
    if (from >= until) continue;
    copy(from, until - from, row, from - row_start);
    copied += until - from;
  }
  return copied;
}

}  // namespace tessera
