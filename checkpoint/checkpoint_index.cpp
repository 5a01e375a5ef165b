#include "checkpoint/checkpoint_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "checkpoint/crc32c.h"
#include "checkpoint/json_text.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_header.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kFormat = "tessera-checkpoint";
constexpr int kVersion = 1;

[[noreturn]] void damaged(std::string_view file, const std::string& what) {
  TESSERA_FAIL(ErrorKind::kUser, "[checkpoint] {} is damaged: {}", file, what);
}

const Json& member(const Json& object, const char* key, std::string_view file) {
  if (!object.is_object()) damaged(file, fmt::format("no object around \"{}\"", key));
  const auto found = object.find(key);
  if (found == object.end()) damaged(file, fmt::format("no \"{}\"", key));
  return *found;
}

std::int64_t integer(const Json& value, const char* what, std::string_view file) {
  const bool fits = value.is_number_unsigned()
                        ? value.get<std::uint64_t>() <=
                              static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())
                        : false;
  if (!fits) damaged(file, fmt::format("{} is not a whole number from 0 to 2^63", what));
  return value.get<std::int64_t>();
}

const std::string& text_of(const Json& value, const char* what, std::string_view file) {
  if (!value.is_string()) damaged(file, fmt::format("{} is not a text", what));
  return value.get_ref<const std::string&>();
}

std::uint32_t parse_checksum(std::string_view text, std::string_view file) {
  std::uint32_t value = 0;
  if (text.size() != 8) damaged(file, "a checksum does not have eight digits");
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit && (c < 'a' || c > 'f')) damaged(file, "a checksum is not hexadecimal");
    value = value * 16 + static_cast<std::uint32_t>(digit ? c - '0' : c - 'a' + 10);
  }
  return value;
}

DType parse_dtype(std::string_view name, std::string_view file) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3,
                            DType::kF8E5M2, DType::kI64, DType::kI32, DType::kU8}) {
    if (safetensors_name(dtype) == name) return dtype;
  }
  damaged(file, fmt::format("unknown dtype {}", printable_name(name)));
}

// File names come from a file: nothing but a plain name may be opened inside the checkpoint.
const std::string& plain_name(const std::string& name, std::string_view file) {
  if (name.empty() || name.front() == '.' || name.find('/') != std::string::npos ||
      name.find('\0') != std::string::npos) {
    damaged(file, fmt::format("{} is no file name", printable_name(name)));
  }
  return name;
}

void check_format(const Json& json, std::string_view file) {
  if (text_of(member(json, "format", file), "\"format\"", file) != kFormat) {
    damaged(file, fmt::format("\"format\" is not {}", kFormat));
  }
  const std::int64_t version = integer(member(json, "version", file), "\"version\"", file);
  CHECK_USER(version == kVersion,
             "[checkpoint] {} has format version {}, this program reads version {}. Use the program "
             "that wrote it",
             file, version, kVersion);
}

CheckpointDataFile parse_data_file(const Json& json, std::uint64_t block_bytes,
                                   std::string_view file) {
  CheckpointDataFile result;
  result.name = plain_name(text_of(member(json, "name", file), "a file's name", file), file);
  result.bytes = static_cast<std::uint64_t>(integer(member(json, "bytes", file), "a size", file));
  const std::string& digits = text_of(member(json, "checksums", file), "checksums", file);
  const std::uint64_t blocks = result.bytes / block_bytes + (result.bytes % block_bytes != 0);
  if (digits.size() % 8 != 0 || digits.size() / 8 != blocks) {
    damaged(file, fmt::format("{} has {} digits of checksums, {} blocks need {}", result.name,
                              digits.size(), blocks, 8 * blocks));
  }
  result.checksums.reserve(blocks);
  for (std::size_t i = 0; i < digits.size(); i += 8) {
    result.checksums.push_back(parse_checksum(std::string_view(digits).substr(i, 8), file));
  }
  return result;
}

Shape parse_shape(const Json& json, std::string_view name, std::string_view file) {
  if (!json.is_array() || json.empty() || json.size() > 2) {
    damaged(file, fmt::format("the shape of {} is not one or two numbers", printable_name(name)));
  }
  Shape shape;
  for (const Json& dim : json) shape.dims[shape.rank++] = integer(dim, "a dim", file);
  std::int64_t bytes = 8;
  for (int i = 0; i < shape.rank; ++i) {
    if (__builtin_mul_overflow(bytes, std::max<std::int64_t>(1, shape.dims[i]), &bytes)) {
      damaged(file, fmt::format("the shape of {} overflows", printable_name(name)));
    }
  }
  return shape;
}

CheckpointExtent parse_extent(const Json& json, const CheckpointTensor& tensor,
                              const CheckpointIndex& index, std::string_view name,
                              std::string_view file) {
  if (!json.is_array() || json.size() != 6) {
    damaged(file, fmt::format("an extent of {} is not six numbers", printable_name(name)));
  }
  std::array<std::int64_t, 6> n{};
  for (std::size_t i = 0; i < 6; ++i) n[i] = integer(json[i], "an extent", file);
  if (n[0] >= static_cast<std::int64_t>(index.files.size())) {
    damaged(file, fmt::format("an extent of {} lies in file {} of {}", printable_name(name), n[0],
                              index.files.size()));
  }
  CheckpointExtent extent{static_cast<int>(n[0]), n[1], n[2], n[3], n[4],
                          static_cast<std::uint64_t>(n[5])};
  // Compared without sums, which could overflow.
  const bool inside = extent.rows >= 1 && extent.cols >= 1 && extent.rows <= tensor.rows() &&
                      extent.row_begin <= tensor.rows() - extent.rows &&
                      extent.cols <= tensor.cols() && extent.col_begin <= tensor.cols() - extent.cols;
  if (!inside) {
    damaged(file, fmt::format("an extent of {} lies outside {}", printable_name(name),
                              to_string(tensor.shape)));
  }
  const CheckpointDataFile& data = index.files[static_cast<std::size_t>(extent.file)];
  const std::uint64_t bytes = tensor.bytes_of(extent);
  if (bytes > data.bytes || extent.offset > data.bytes - bytes ||
      extent.offset % size_of(tensor.dtype) != 0) {
    damaged(file, fmt::format("an extent of {} lies outside {}", printable_name(name), data.name));
  }
  return extent;
}

// The first region of a tensor that no extent or more than one covers.
std::string coverage_problem_of(const std::string& name, const CheckpointTensor& tensor) {
  std::vector<const CheckpointExtent*> order;
  for (const CheckpointExtent& extent : tensor.extents) order.push_back(&extent);
  std::sort(order.begin(), order.end(), [](const CheckpointExtent* a, const CheckpointExtent* b) {
    return std::pair(a->row_begin, a->col_begin) < std::pair(b->row_begin, b->col_begin);
  });
  // Extents that reach below the begin of the current one.
  std::vector<const CheckpointExtent*> active;
  for (const CheckpointExtent* extent : order) {
    std::erase_if(active, [&](const CheckpointExtent* other) {
      return other->row_begin + other->rows <= extent->row_begin;
    });
    for (const CheckpointExtent* other : active) {
      const std::int64_t col_begin = std::max(extent->col_begin, other->col_begin);
      const std::int64_t col_end =
          std::min(extent->col_begin + extent->cols, other->col_begin + other->cols);
      if (col_begin < col_end) {
        const std::int64_t row_end =
            std::min(extent->row_begin + extent->rows, other->row_begin + other->rows);
        return fmt::format("{} of {} are stored twice",
                           region_text(tensor.shape, extent->row_begin, row_end, col_begin, col_end),
                           printable_name(name));
      }
    }
    active.push_back(extent);
  }
  std::int64_t covered = 0;  // without overlap at most the tensor's size
  for (const CheckpointExtent& extent : tensor.extents) covered += extent.rows * extent.cols;
  if (covered == tensor.rows() * tensor.cols()) return "";
  return fmt::format("only {} of {} elements of {} are stored", covered,
                     tensor.rows() * tensor.cols(), printable_name(name));
}

}  // namespace

std::string region_text(const Shape& shape, std::int64_t row_begin, std::int64_t row_end,
                        std::int64_t col_begin, std::int64_t col_end) {
  if (shape.rank == 1) return fmt::format("elements {} to {}", row_begin, row_end);
  return fmt::format("rows {} to {} and columns {} to {}", row_begin, row_end, col_begin, col_end);
}

void CheckpointIndex::merge(CheckpointIndex other) {
  CHECK(other.block_bytes == block_bytes, "[checkpoint] blocks of {} and of {} bytes in one save",
        block_bytes, other.block_bytes);
  const int first_file = static_cast<int>(files.size());
  for (CheckpointDataFile& file : other.files) files.push_back(std::move(file));
  for (auto& [name, tensor] : other.tensors) {
    const auto [place, is_new] = tensors.try_emplace(name);
    CheckpointTensor& ours = place->second;
    if (is_new) {
      ours.dtype = tensor.dtype;
      ours.shape = tensor.shape;
    }
    CHECK(ours.dtype == tensor.dtype && ours.shape == tensor.shape,
          "[checkpoint] {} is {} {} on one rank and {} {} on another", printable_name(name),
          name_of(ours.dtype), to_string(ours.shape), name_of(tensor.dtype),
          to_string(tensor.shape));
    for (CheckpointExtent extent : tensor.extents) {
      extent.file += first_file;
      ours.extents.push_back(extent);
    }
  }
}

std::string CheckpointIndex::coverage_problem() const {
  for (const auto& [name, tensor] : tensors) {
    std::string problem = coverage_problem_of(name, tensor);
    if (!problem.empty()) return problem;
  }
  return "";
}

std::string format_index(const CheckpointIndex& index) {
  // One line a file and a tensor, so that people can search it.
  std::string text = fmt::format("{{\"format\":\"{}\",\"version\":{},\"block_bytes\":{},\n\"files\":[",
                                 kFormat, kVersion, index.block_bytes);
  auto out = std::back_inserter(text);
  for (std::size_t i = 0; i < index.files.size(); ++i) {
    const CheckpointDataFile& file = index.files[i];
    fmt::format_to(out, "{}\n{{\"name\":{},\"bytes\":{},\"checksums\":\"", i == 0 ? "" : ",",
                   Json(file.name).dump(), file.bytes);
    for (const std::uint32_t checksum : file.checksums) text += crc32c_text(checksum);
    text += "\"}";
  }
  text += "],\n\"tensors\":{";
  bool is_first = true;
  for (const auto& [name, tensor] : index.tensors) {
    fmt::format_to(out, "{}\n{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"extents\":[",
                   is_first ? "" : ",", Json(name).dump(), safetensors_name(tensor.dtype),
                   fmt::join(tensor.shape.dims, tensor.shape.dims + tensor.shape.rank, ","));
    is_first = false;
    for (std::size_t i = 0; i < tensor.extents.size(); ++i) {
      const CheckpointExtent& extent = tensor.extents[i];
      fmt::format_to(out, "{}[{},{},{},{},{},{}]", i == 0 ? "" : ",", extent.file, extent.row_begin,
                     extent.rows, extent.col_begin, extent.cols, extent.offset);
    }
    text += "]}";
  }
  text += "}}\n";
  return text;
}

CheckpointIndex parse_index(std::string_view text, std::string_view file) {
  const Json json = parse_json_text(text, file, "checkpoint");
  check_format(json, file);
  CheckpointIndex index;
  index.block_bytes =
      static_cast<std::uint64_t>(integer(member(json, "block_bytes", file), "block_bytes", file));
  if (index.block_bytes == 0 || index.block_bytes % 4096 != 0 ||
      index.block_bytes > (std::uint64_t{1} << 30)) {
    damaged(file, fmt::format("block_bytes is {}", index.block_bytes));
  }
  const Json& files = member(json, "files", file);
  if (!files.is_array()) damaged(file, "\"files\" is not a list");
  for (const Json& entry : files) {
    index.files.push_back(parse_data_file(entry, index.block_bytes, file));
  }
  const Json& tensors = member(json, "tensors", file);
  if (!tensors.is_object()) damaged(file, "\"tensors\" is not an object");
  for (const auto& [name, entry] : tensors.items()) {
    CheckpointTensor tensor;
    tensor.dtype = parse_dtype(text_of(member(entry, "dtype", file), "a dtype", file), file);
    tensor.shape = parse_shape(member(entry, "shape", file), name, file);
    const Json& extents = member(entry, "extents", file);
    if (!extents.is_array()) damaged(file, "\"extents\" is not a list");
    for (const Json& extent : extents) {
      tensor.extents.push_back(parse_extent(extent, tensor, index, name, file));
    }
    index.tensors.emplace(name, std::move(tensor));
  }
  return index;
}

std::uint64_t CommitRecord::total_bytes() const {
  std::uint64_t total = 0;
  for (const auto& [name, file] : files) total += file.bytes;
  return total;
}

std::string format_commit(const CommitRecord& record) {
  Json json = Json::object();
  json["format"] = kFormat;
  json["version"] = kVersion;
  json["step"] = record.step;
  json["sequence"] = record.sequence;
  json["ranks"] = record.ranks;
  Json files = Json::object();
  for (const auto& [name, file] : record.files) {
    Json entry = {{"bytes", file.bytes}};
    if (file.checksum) entry["crc32c"] = crc32c_text(*file.checksum);
    files[name] = std::move(entry);
  }
  json["files"] = std::move(files);
  const std::string text = json.dump(1);
  json["crc32c"] = crc32c_text(crc32c(text.data(), text.size()));  // of the record without this line
  return json.dump(1) + "\n";
}

CommitRecord parse_commit(std::string_view text, std::string_view file) {
  const Json json = parse_json_text(text, file, "checkpoint");
  check_format(json, file);
  CommitRecord record;
  record.step = integer(member(json, "step", file), "\"step\"", file);
  record.sequence =
      static_cast<std::uint64_t>(integer(member(json, "sequence", file), "\"sequence\"", file));
  const std::int64_t ranks = integer(member(json, "ranks", file), "\"ranks\"", file);
  if (ranks > std::numeric_limits<int>::max()) damaged(file, "\"ranks\" is too large");
  record.ranks = static_cast<int>(ranks);
  const Json& files = member(json, "files", file);
  if (!files.is_object()) damaged(file, "\"files\" is not an object");
  for (const auto& [name, entry] : files.items()) {
    CommittedFile committed;
    committed.bytes =
        static_cast<std::uint64_t>(integer(member(entry, "bytes", file), "a size", file));
    if (entry.contains("crc32c")) {
      committed.checksum = parse_checksum(text_of(entry["crc32c"], "a checksum", file), file);
    }
    record.files.emplace(plain_name(name, file), committed);
  }
  // Written again it must be the same text, checksum included: nothing changed unseen.
  if (format_commit(record) != text) damaged(file, "its own checksum does not fit");
  return record;
}

}  // namespace tessera
