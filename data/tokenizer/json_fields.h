// Reads one part ("normalizer", "decoder", ...) of a tokenizer.json with errors that name the file,
// the part and the field.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <string_view>

#include "data/tokenizer/split_pattern.h"

namespace tessera {

class JsonFields {
 public:
  // `spec` must be an object with a "type"; it and `file` must outlive this.
  JsonFields(const nlohmann::json& spec, std::string_view file, std::string_view part);

  const std::string& type() const { return type_; }
  [[noreturn]] void refuse_type() const;
  [[noreturn]] void refuse(std::string_view what) const;

  const nlohmann::json& at(const char* key) const;
  const nlohmann::json& array(const char* key) const;
  bool has(const char* key) const;  // there and not null
  std::string string(const char* key) const;
  bool boolean(const char* key) const;
  bool boolean(const char* key, bool fallback) const;
  std::size_t count(const char* key) const;

  // {"String": s} or {"Regex": r}.
  SplitPattern pattern(const char* key) const;

 private:
  const nlohmann::json& spec_;
  std::string_view file_;
  std::string_view part_;
  std::string type_;
};

}  // namespace tessera
