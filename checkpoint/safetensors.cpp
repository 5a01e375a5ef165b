#include "checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "checkpoint/safetensors_header.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

constexpr std::string_view kWho = "safetensors";

// The two files most often found where a safetensors file was expected.
std::string_view guess_other_format(const char (&head)[8]) {
  if (std::memcmp(head, "version ", 8) == 0) {
    return ". It looks like a Git LFS pointer: fetch the file itself (git lfs pull)";
  }
  if (std::memcmp(head, "PK\x03\x04", 4) == 0) {
    return ". It looks like a PyTorch .bin file: convert it to safetensors first";
  }
  if (std::memcmp(head, "GGUF", 4) == 0) {
    return ". It looks like a GGUF file: use the original safetensors model";
  }
  return "";
}

// Reads of whole rows go through this much memory.
constexpr std::size_t kBounceBytes = std::size_t{4} << 20;
// From this length on a row's part is worth a read of its own.
constexpr std::size_t kLongPart = std::size_t{64} << 10;
// Whole rows are read for at most this many times the wanted bytes.
constexpr std::size_t kMostWaste = 16;

}  // namespace

std::int64_t SafetensorsTensor::numel() const {
  std::int64_t product = 1;
  for (const std::int64_t dim : shape) product *= dim;
  return product;
}

std::int64_t SafetensorsTensor::rows() const {
  std::int64_t product = 1;
  for (std::size_t i = 0; i + 1 < shape.size(); ++i) product *= shape[i];
  return product;
}

std::int64_t SafetensorsTensor::cols() const { return shape.empty() ? 1 : shape.back(); }

std::string_view safetensors_name(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return "F64";
    case DType::kF32:
      return "F32";
    case DType::kBF16:
      return "BF16";
    case DType::kF16:
      return "F16";
    case DType::kF8E4M3:
      return "F8_E4M3";
    case DType::kF8E5M2:
      return "F8_E5M2";
    case DType::kI64:
      return "I64";
    case DType::kI32:
      return "I32";
    case DType::kU8:
      return "U8";
  }
  return "";
}

SafetensorsFile::SafetensorsFile(std::filesystem::path path)
    : path_(std::move(path)), file_(open_for_reading(path_, kWho)) {
  const std::string file = path_.string();
  const std::uint64_t total = file_size(file_, path_, kWho);
  CHECK_USER(total >= 8, "[safetensors] {} has {} bytes; a safetensors file has at least 8", file,
             total);
  char head[8];
  read_at(file_, 0, head, sizeof(head), path_, kWho);
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, head, sizeof(head));
  CHECK_USER(header_bytes <= kLargestHeader,
             "[safetensors] {}: the header claims {} bytes, the limit is {}{}", file, header_bytes,
             kLargestHeader, guess_other_format(head));
  CHECK_USER(header_bytes <= total - 8,
             "[safetensors] {}: the header claims {} bytes, but only {} follow; the file is cut "
             "short or damaged{}",
             file, header_bytes, total - 8, guess_other_format(head));
  std::string text(header_bytes, '\0');
  read_at(file_, 8, text.data(), text.size(), path_, kWho);
  data_start_ = 8 + header_bytes;
  SafetensorsHeader header = parse_safetensors_header(text, total - data_start_, file);
  tensors_ = std::move(header.tensors);
  metadata_ = std::move(header.metadata);
  index_of_name_.reserve(tensors_.size());
  for (std::size_t i = 0; i < tensors_.size(); ++i) index_of_name_.emplace(tensors_[i].name, i);
}

const SafetensorsTensor* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_of_name_.find(std::string(name));
  return found == index_of_name_.end() ? nullptr : &tensors_[found->second];
}

const SafetensorsTensor& SafetensorsFile::get(std::string_view name) const {
  const SafetensorsTensor* tensor = find(name);
  CHECK_USER(tensor != nullptr, "[safetensors] {} has no tensor {}", path_.string(),
             printable_name(name));
  return *tensor;
}

std::size_t SafetensorsFile::element_size(const SafetensorsTensor& tensor) const {
  CHECK_USER(tensor.dtype.has_value(),
             "[safetensors] {}: tensor {} holds {}, which cannot be used here; supported are F64, "
             "F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32 and U8",
             path_.string(), printable_name(tensor.name), tensor.stored_dtype);
  return size_of(*tensor.dtype);
}

void SafetensorsFile::read_bytes(const SafetensorsTensor& tensor, std::uint64_t first,
                                 std::size_t bytes, void* destination) const {
  CHECK(first <= tensor.bytes() && bytes <= tensor.bytes() - first,
        "[safetensors] {}: bytes {} + {} of tensor {} asked for, it has {}", path_.string(), first,
        bytes, printable_name(tensor.name), tensor.bytes());
  read_at(file_, data_start_ + tensor.begin + first, destination, bytes, path_, kWho);
}

void SafetensorsFile::read_elements(const SafetensorsTensor& tensor, std::int64_t first,
                                    std::int64_t count, void* destination) const {
  const std::size_t size = element_size(tensor);
  const std::int64_t numel = tensor.numel();
  CHECK(first >= 0 && count >= 0 && first <= numel && count <= numel - first,
        "[safetensors] {}: elements {} + {} of tensor {} asked for, it has {}", path_.string(),
        first, count, printable_name(tensor.name), numel);
  read_bytes(tensor, static_cast<std::uint64_t>(first) * size,
             static_cast<std::size_t>(count) * size, destination);
}

void SafetensorsFile::read_rectangle(const SafetensorsTensor& tensor,
                                     const TensorRectangle& rectangle, void* destination,
                                     std::int64_t destination_stride) const {
  const std::size_t size = element_size(tensor);
  const std::int64_t rows = tensor.rows();
  const std::int64_t cols = tensor.cols();
  const auto [row_begin, row_count, col_begin, col_count] = rectangle;
  const auto inside = [](std::int64_t begin, std::int64_t count, std::int64_t limit) {
    return begin >= 0 && count >= 0 && begin <= limit && count <= limit - begin;
  };
  CHECK(inside(row_begin, row_count, rows) && inside(col_begin, col_count, cols),
        "[safetensors] {}: rows {} + {}, columns {} + {} of tensor {} asked for, it is [{}, {}]",
        path_.string(), row_begin, row_count, col_begin, col_count, printable_name(tensor.name),
        rows, cols);
  if (destination_stride == 0) destination_stride = col_count;
  CHECK(destination_stride >= col_count, "[safetensors] rows of {} elements {} apart", col_count,
        destination_stride);
  if (row_count == 0 || col_count == 0) return;

  if (col_count == cols && destination_stride == cols) {
    read_elements(tensor, row_begin * cols, row_count * cols, destination);
    return;
  }
  auto* out = static_cast<char*>(destination);
  const std::size_t row_bytes = static_cast<std::size_t>(cols) * size;
  const std::size_t part_bytes = static_cast<std::size_t>(col_count) * size;
  const std::size_t out_bytes = static_cast<std::size_t>(destination_stride) * size;
  const bool by_part =
      part_bytes >= kLongPart || row_bytes > kBounceBytes || row_bytes / part_bytes > kMostWaste;
  if (by_part) {
    for (std::int64_t row = 0; row < row_count; ++row) {
      read_elements(tensor, (row_begin + row) * cols + col_begin, col_count,
                    out + static_cast<std::size_t>(row) * out_bytes);
    }
    return;
  }
  const std::int64_t rows_per_read =
      std::min<std::int64_t>(row_count, static_cast<std::int64_t>(kBounceBytes / row_bytes));
  const auto bounce =
      std::make_unique_for_overwrite<char[]>(static_cast<std::size_t>(rows_per_read) * row_bytes);
  for (std::int64_t row = 0; row < row_count; row += rows_per_read) {
    const std::int64_t batch = std::min(rows_per_read, row_count - row);
    // From the first wanted element to the last: nothing before or behind them is touched.
    const std::int64_t first = (row_begin + row) * cols + col_begin;
    read_elements(tensor, first, (batch - 1) * cols + col_count, bounce.get());
    for (std::int64_t i = 0; i < batch; ++i) {
      std::memcpy(out + static_cast<std::size_t>(row + i) * out_bytes,
                  bounce.get() + static_cast<std::size_t>(i) * row_bytes, part_bytes);
    }
  }
}

}  // namespace tessera
