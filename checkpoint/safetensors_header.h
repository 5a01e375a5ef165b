// The JSON header of a safetensors file: text to checked entries and back. Apart from the file
// access so that it can be tested and fuzzed on bytes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"

namespace tessera {

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // sorted by their bytes, which cover [0, data_bytes)
  std::map<std::string, std::string> metadata;
};

// Parses and checks everything: JSON, known dtypes, one entry per name, shape against bytes, no
// hole, no overlap, ending exactly at `data_bytes`. Throws kUser; `file` begins the message.
// Memory is bounded by a small multiple of the text.
SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_bytes,
                                           std::string_view file);

// The header text, without padding, with entries in the order of `tensors`; each of them needs
// name, stored_dtype, shape, begin and end.
std::string format_safetensors_header(const std::vector<SafetensorsTensor>& tensors,
                                      const std::map<std::string, std::string>& metadata);

// A name from a file in a form fit for one line of a message: cut to 120 bytes, control bytes
// replaced.
std::string printable_name(std::string_view name);

}  // namespace tessera
