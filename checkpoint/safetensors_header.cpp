#include "checkpoint/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_set>

#include "engine/core/error.h"

namespace tessera {
namespace {

struct StoredType {
  std::string_view name;
  int bits;
  std::optional<DType> dtype;
};

// Every type of the format (version 0.6 of the reference library and later).
constexpr std::array<StoredType, 22> kStoredTypes = {{
    {"F64", 64, DType::kF64},
    {"F32", 32, DType::kF32},
    {"F16", 16, DType::kF16},
    {"BF16", 16, DType::kBF16},
    {"F8_E4M3", 8, DType::kF8E4M3},
    {"F8_E5M2", 8, DType::kF8E5M2},
    {"I64", 64, DType::kI64},
    {"I32", 32, DType::kI32},
    {"U8", 8, DType::kU8},
    {"BOOL", 8, std::nullopt},
    {"I8", 8, std::nullopt},
    {"I16", 16, std::nullopt},
    {"U16", 16, std::nullopt},
    {"U32", 32, std::nullopt},
    {"U64", 64, std::nullopt},
    {"C64", 64, std::nullopt},
    {"F8_E8M0", 8, std::nullopt},
    {"F8_E4M3FNUZ", 8, std::nullopt},
    {"F8_E5M2FNUZ", 8, std::nullopt},
    {"F6_E2M3", 6, std::nullopt},
    {"F6_E3M2", 6, std::nullopt},
    {"F4", 4, std::nullopt},
}};

const StoredType* find_stored_type(std::string_view name) {
  for (const StoredType& type : kStoredTypes) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

// Receives the header's JSON event by event: no document is built, and the first thing out of place
// ends the parse.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(std::string_view file, SafetensorsHeader& header) : file_(file), header_(header) {}

  const std::string& error() const { return error_; }

  bool start_object(std::size_t) override {
    switch (place_) {
      case Place::kBegin:
        place_ = Place::kTop;
        return true;
      case Place::kTensorValue:
        place_ = Place::kTensor;
        current_ = SafetensorsTensor{};
        current_.name = key_;
        seen_dtype_ = seen_shape_ = seen_offsets_ = false;
        return true;
      case Place::kMetadataValue:
        place_ = Place::kMetadata;
        return true;
      default:
        return unexpected("an object");
    }
  }

  bool key(std::string& name) override {
    switch (place_) {
      case Place::kTop:
        if (name == "__metadata__") {
          if (seen_metadata_) return fail("__metadata__ is given twice");
          seen_metadata_ = true;
          place_ = Place::kMetadataValue;
          return true;
        }
        if (!names_.insert(name).second) {
          return fail(fmt::format("tensor {} is given twice", printable_name(name)));
        }
        key_ = name;
        place_ = Place::kTensorValue;
        return true;
      case Place::kMetadata:
        if (header_.metadata.contains(name)) {
          return fail(fmt::format("__metadata__ holds {} twice", printable_name(name)));
        }
        key_ = name;
        return true;
      case Place::kTensor:
        if (name == "dtype") return enter(seen_dtype_, Place::kDType, name);
        if (name == "shape") return enter(seen_shape_, Place::kShape, name);
        if (name == "data_offsets") return enter(seen_offsets_, Place::kOffsets, name);
        return fail_tensor(fmt::format("has the unknown field {}", printable_name(name)));
      default:
        return unexpected("a key");
    }
  }

  bool end_object() override {
    switch (place_) {
      case Place::kTensor:
        if (!seen_dtype_) return fail_tensor("has no dtype");
        if (!seen_shape_) return fail_tensor("has no shape");
        if (!seen_offsets_) return fail_tensor("has no data_offsets");
        if (!check_size()) return false;
        header_.tensors.push_back(std::move(current_));
        place_ = Place::kTop;
        return true;
      case Place::kMetadata:
        place_ = Place::kTop;
        return true;
      case Place::kTop:
        place_ = Place::kEnd;
        return true;
      default:
        return unexpected("the end of an object");
    }
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::kShape) {
      place_ = Place::kShapeItems;
      return true;
    }
    if (place_ == Place::kOffsets) {
      place_ = Place::kOffsetItems;
      num_offsets_ = 0;
      return true;
    }
    return unexpected("a list");
  }

  bool end_array() override {
    if (place_ == Place::kOffsetItems && num_offsets_ != 2) {
      return fail_tensor(fmt::format("has {} data_offsets, wanted 2", num_offsets_));
    }
    place_ = Place::kTensor;
    return true;
  }

  bool string(std::string& value) override {
    if (place_ == Place::kMetadata) {
      header_.metadata.emplace(key_, value);
      return true;
    }
    if (place_ == Place::kDType) {
      const StoredType* type = find_stored_type(value);
      if (type == nullptr) {
        return fail_tensor(fmt::format("has the unknown dtype {}", printable_name(value)));
      }
      current_.stored_dtype = type->name;
      current_.dtype = type->dtype;
      place_ = Place::kTensor;
      return true;
    }
    return unexpected("a string");
  }

  bool number_unsigned(std::uint64_t value) override {
    if (place_ == Place::kShapeItems) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        return fail_tensor(fmt::format("has a dim of {}", value));
      }
      current_.shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (place_ == Place::kOffsetItems) {
      if (num_offsets_ == 0) current_.begin = value;
      if (num_offsets_ == 1) current_.end = value;
      ++num_offsets_;
      return true;
    }
    return unexpected("a number");
  }

  bool number_integer(std::int64_t value) override {
    if (place_ == Place::kShapeItems) return fail_tensor(fmt::format("has a dim of {}", value));
    if (place_ == Place::kOffsetItems) {
      return fail_tensor(fmt::format("has the offset {}, wanted no negative number", value));
    }
    return unexpected("a number");
  }

  bool number_float(double, const std::string& text) override {
    if (place_ == Place::kShapeItems || place_ == Place::kOffsetItems) {
      return fail_tensor(
          fmt::format("has {} where a whole number below 2^64 belongs", printable_name(text)));
    }
    return unexpected("a number");
  }

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("true or false"); }
  bool binary(nlohmann::json::binary_t&) override { return unexpected("binary data"); }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& exception) override {
    if (error_.empty()) {
      error_ = fmt::format("the header is not valid JSON at byte {}: {}", position,
                           printable_name(exception.what()));
    }
    return false;
  }

 private:
  enum class Place {
    kBegin,
    kTop,          // in the outer object, before a key
    kTensorValue,  // after a tensor's name
    kTensor,       // in a tensor's object
    kDType,
    kShape,
    kShapeItems,
    kOffsets,
    kOffsetItems,
    kMetadataValue,  // after "__metadata__"
    kMetadata,       // in its object
    kEnd,
  };

  bool fail(std::string message) {
    error_ = std::move(message);
    return false;
  }
  bool fail_tensor(std::string_view message) {
    return fail(fmt::format("tensor {} {}", printable_name(current_.name), message));
  }
  bool unexpected(std::string_view what) {
    if (place_ == Place::kMetadata) {
      return fail(
          fmt::format("__metadata__ {} is {}, wanted a string", printable_name(key_), what));
    }
    if (place_ == Place::kMetadataValue) {
      return fail(fmt::format("__metadata__ is {}, wanted an object", what));
    }
    if (place_ == Place::kBegin) return fail(fmt::format("the header is {}, not an object", what));
    return fail(fmt::format("tensor {} has {} in a place where the format has none",
                            printable_name(key_), what));
  }
  bool enter(bool& seen, Place place, std::string_view field) {
    if (seen) return fail_tensor(fmt::format("has {} twice", field));
    seen = true;
    place_ = place;
    return true;
  }

  // Shape times bits per element must be the bytes, computed without overflow. A dim of 0 does not
  // excuse an absurd one beside it: other code multiplies dims in other orders.
  bool check_size() {
    if (current_.end < current_.begin) {
      return fail_tensor(
          fmt::format("ends at byte {}, before its begin {}", current_.end, current_.begin));
    }
    std::int64_t extent = 1;  // product of the dims that are not 0
    std::int64_t numel = 1;
    for (const std::int64_t dim : current_.shape) {
      if (dim == 0) {
        numel = 0;
      } else if (__builtin_mul_overflow(extent, dim, &extent)) {
        return fail_tensor("has a shape whose product overflows");
      }
    }
    numel = numel == 0 ? 0 : extent;
    std::int64_t bits = 0;
    const int bits_per_element = find_stored_type(current_.stored_dtype)->bits;
    if (__builtin_mul_overflow(extent, std::int64_t{bits_per_element}, &bits)) {
      return fail_tensor("has a shape whose size in bytes overflows");
    }
    bits = numel == 0 ? 0 : bits;
    const std::uint64_t wanted = static_cast<std::uint64_t>(bits) / 8;
    if (bits % 8 != 0 || wanted != current_.bytes()) {
      return fail_tensor(fmt::format("holds {} bytes, but {} [{}] takes {}", current_.bytes(),
                                     current_.stored_dtype, fmt::join(current_.shape, ", "),
                                     (bits + 7) / 8));
    }
    return true;
  }

  std::string_view file_;
  SafetensorsHeader& header_;
  std::string error_;
  Place place_ = Place::kBegin;
  std::string key_;
  SafetensorsTensor current_;
  std::unordered_set<std::string> names_;
  bool seen_metadata_ = false;
  bool seen_dtype_ = false;
  bool seen_shape_ = false;
  bool seen_offsets_ = false;
  int num_offsets_ = 0;
};

// Sorted by begin, the tensors must follow each other from 0 to the end of the file.
void check_coverage(const std::vector<SafetensorsTensor>& tensors, std::uint64_t data_bytes,
                    std::string_view file) {
  std::uint64_t covered = 0;
  std::string_view previous;
  for (const SafetensorsTensor& tensor : tensors) {
    CHECK_USER(tensor.end <= data_bytes,
               "[safetensors] {}: tensor {} ends at byte {} of the data, but the file holds {}; it "
               "is cut short or damaged. Copy or download it again",
               file, printable_name(tensor.name), tensor.end, data_bytes);
    CHECK_USER(tensor.begin >= covered,
               "[safetensors] {}: tensor {} begins at byte {}, inside tensor {} which ends at {}",
               file, printable_name(tensor.name), tensor.begin, printable_name(previous), covered);
    CHECK_USER(tensor.begin == covered,
               "[safetensors] {}: bytes {} to {} before tensor {} belong to no tensor", file,
               covered, tensor.begin, printable_name(tensor.name));
    covered = tensor.end;
    previous = tensor.name;
  }
  CHECK_USER(covered == data_bytes,
             "[safetensors] {}: {} bytes after the last tensor {} belong to no tensor", file,
             data_bytes - covered, printable_name(previous));
}

}  // namespace

std::string printable_name(std::string_view name) {
  constexpr std::size_t kLongest = 120;
  std::string result(name.substr(0, kLongest));
  for (char& c : result) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  if (name.size() > kLongest) result += fmt::format("... ({} bytes)", name.size());
  return result.empty() ? "\"\"" : result;
}

SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_bytes,
                                           std::string_view file) {
  // The format demands it, and it keeps a byte order mark or blanks out of the header.
  CHECK_USER(!text.empty() && text.front() == '{',
             "[safetensors] {}: the header does not begin with '{{'; this is no safetensors file",
             file);
  SafetensorsHeader header;
  HeaderReader reader(file, header);
  const bool good = nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
  CHECK_USER(good, "[safetensors] {}: {}", file, reader.error());
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
              return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
            });
  check_coverage(header.tensors, data_bytes, file);
  return header;
}

std::string format_safetensors_header(const std::vector<SafetensorsTensor>& tensors,
                                      const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  std::string text = "{";
  const auto add = [&](const std::string& key, const nlohmann::ordered_json& value) {
    if (text.size() > 1) text += ',';
    text += nlohmann::ordered_json(key).dump();
    text += ':';
    text += value.dump();
  };
  if (!metadata.empty()) add("__metadata__", nlohmann::ordered_json(metadata));
  for (const SafetensorsTensor& tensor : tensors) {
    nlohmann::ordered_json entry = nlohmann::ordered_json::object();
    entry["dtype"] = tensor.stored_dtype;
    entry["shape"] = tensor.shape;
    entry["data_offsets"] = {tensor.begin, tensor.end};
    add(tensor.name, entry);
  }
  text += '}';
  return text;
}

}  // namespace tessera
