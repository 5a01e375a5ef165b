#include "checkpoint/file_image.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_header.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

// Direct I/O wants the data at a multiple of the page.
constexpr std::uint64_t kDataAlignment = 4096;

struct Entry {
  const NamedState* state = nullptr;
  CheckpointTensor* tensor = nullptr;
  std::string name;
  CheckpointExtent extent;
  const char* source = nullptr;
};

void check_state(const NamedState& state) {
  CHECK(!state.name.empty() && state.name != "__metadata__",
        "[checkpoint] a state has the name \"{}\"", state.name);
  CHECK(state.shape.rank == 1 || state.shape.rank == 2, "[checkpoint] {} is {}, wanted rank 1 or 2",
        state.name, to_string(state.shape));
}

void check_piece(const NamedState& state, const CheckpointTensor& tensor, const StatePiece& piece) {
  const bool inside = piece.rows >= 0 && piece.cols >= 0 && piece.row_begin >= 0 &&
                      piece.col_begin >= 0 && piece.row_begin + piece.rows <= tensor.rows() &&
                      piece.col_begin + piece.cols <= tensor.cols();
  CHECK(inside, "[checkpoint] {}: a piece holds {}, outside {}", state.name,
        region_text(state.shape, piece.row_begin, piece.row_begin + piece.rows, piece.col_begin,
                    piece.col_begin + piece.cols),
        to_string(state.shape));
  if (piece.rows == 0 || piece.cols == 0) return;
  CHECK(piece.data.data != nullptr && piece.data.is_dense() &&
            piece.data.numel() == piece.rows * piece.cols,
        "[checkpoint] {}: a piece of {} x {} lies in {}, wanted a dense tensor of that size",
        state.name, piece.rows, piece.cols, to_string(piece.data));
  CHECK(piece.data.dtype == state.dtype, "[checkpoint] {} is saved as {} but a piece is {}",
        state.name, name_of(state.dtype), name_of(piece.data.dtype));
}

}  // namespace

std::string extent_name(const std::string& tensor, const Shape& shape,
                        const CheckpointExtent& extent) {
  const std::int64_t cols = shape.rank == 2 ? shape.dims[1] : 1;
  if (extent.rows == shape.dims[0] && extent.cols == cols) return tensor;
  if (shape.rank == 1) {
    return fmt::format("{}[{}:{}]", tensor, extent.row_begin, extent.row_begin + extent.rows);
  }
  return fmt::format("{}[{}:{},{}:{}]", tensor, extent.row_begin, extent.row_begin + extent.rows,
                     extent.col_begin, extent.col_begin + extent.cols);
}

std::vector<std::int64_t> extent_shape(const Shape& shape, const CheckpointExtent& extent) {
  if (shape.rank == 1) return {extent.rows};
  return {extent.rows, extent.cols};
}

FileImage::FileImage(std::span<const NamedState> states,
                     const std::map<std::string, std::string>& metadata) {
  std::vector<Entry> entries;
  for (const NamedState& state : states) {
    check_state(state);
    const auto [place, is_new] = tensors_.try_emplace(state.name);
    CheckpointTensor& tensor = place->second;
    if (is_new) {
      tensor.dtype = state.dtype;
      tensor.shape = state.shape;
    }
    CHECK(tensor.dtype == state.dtype && tensor.shape == state.shape,
          "[checkpoint] {} is given as {} {} and as {} {}", state.name, name_of(tensor.dtype),
          to_string(tensor.shape), name_of(state.dtype), to_string(state.shape));
    for (const StatePiece& piece : state.pieces) {
      check_piece(state, tensor, piece);
      if (!state.writes || piece.rows == 0 || piece.cols == 0) continue;
      const CheckpointExtent extent{0, piece.row_begin, piece.rows, piece.col_begin, piece.cols, 0};
      entries.push_back({&state, &tensor, extent_name(state.name, state.shape, extent), extent,
                         static_cast<const char*>(piece.data.data)});
    }
  }
  // Wide elements first, so that every extent starts at a multiple of its element without padding,
  // which the format does not allow between tensors.
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return size_of(a.state->dtype) > size_of(b.state->dtype);
  });

  std::vector<SafetensorsTensor> header;
  std::uint64_t offset = 0;
  for (const Entry& entry : entries) {
    SafetensorsTensor item;
    item.name = entry.name;
    item.stored_dtype = safetensors_name(entry.state->dtype);
    item.shape = extent_shape(entry.state->shape, entry.extent);
    item.begin = offset;
    offset += entry.tensor->bytes_of(entry.extent);
    item.end = offset;
    header.push_back(std::move(item));
  }
  std::string text = format_safetensors_header(header, metadata);
  const std::uint64_t used = (sizeof(std::uint64_t) + text.size()) % kDataAlignment;
  if (used != 0) text.append(kDataAlignment - used, ' ');
  const std::uint64_t length = text.size();
  head_.assign(reinterpret_cast<const char*>(&length), sizeof(length));
  head_ += text;

  for (std::size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = entries[i];
    entry.extent.offset = head_.size() + header[i].begin;
    entry.tensor->extents.push_back(entry.extent);
    const std::uint64_t bytes = header[i].bytes();
    const bool is_stable = entry.state->changes_only_in_update;
    if (!parts_.empty() && parts_.back().source + parts_.back().bytes == entry.source &&
        parts_.back().is_stable == is_stable) {
      parts_.back().bytes += bytes;
    } else {
      parts_.push_back({entry.extent.offset, bytes, entry.source, is_stable});
    }
  }
  bytes_ = head_.size() + offset;
}

}  // namespace tessera
