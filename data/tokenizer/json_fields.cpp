#include "data/tokenizer/json_fields.h"

#include <nlohmann/json.hpp>

#include "engine/core/error.h"

namespace tessera {

JsonFields::JsonFields(const nlohmann::json& spec, std::string_view file, std::string_view part)
    : spec_(spec), file_(file), part_(part) {
  const auto type = spec.is_object() ? spec.find("type") : spec.end();
  CHECK_USER(spec.is_object() && type != spec.end() && type->is_string(),
             "[tokenizer] {}: a {} without a \"type\"", file, part);
  type_ = type->get<std::string>();
}

void JsonFields::refuse_type() const {
  TESSERA_FAIL(ErrorKind::kUser,
               "[tokenizer] {}: {} \"{}\" is not supported; use a tokenizer.json without it", file_,
               part_, type_);
}

void JsonFields::refuse(std::string_view what) const {
  TESSERA_FAIL(ErrorKind::kUser, "[tokenizer] {}: {} \"{}\": {}", file_, part_, type_, what);
}

const nlohmann::json& JsonFields::at(const char* key) const {
  const auto found = spec_.find(key);
  CHECK_USER(found != spec_.end(), "[tokenizer] {}: {} \"{}\" has no \"{}\"", file_, part_, type_,
             key);
  return *found;
}

const nlohmann::json& JsonFields::array(const char* key) const {
  const nlohmann::json& value = at(key);
  CHECK_USER(value.is_array(), "[tokenizer] {}: {} \"{}\": \"{}\" is not a list", file_, part_,
             type_, key);
  return value;
}

bool JsonFields::has(const char* key) const {
  const auto found = spec_.find(key);
  return found != spec_.end() && !found->is_null();
}

std::string JsonFields::string(const char* key) const {
  const nlohmann::json& value = at(key);
  CHECK_USER(value.is_string(), "[tokenizer] {}: {} \"{}\": \"{}\" is not a string", file_, part_,
             type_, key);
  return value.get<std::string>();
}

bool JsonFields::boolean(const char* key) const {
  const nlohmann::json& value = at(key);
  CHECK_USER(value.is_boolean(), "[tokenizer] {}: {} \"{}\": \"{}\" is not true or false", file_,
             part_, type_, key);
  return value.get<bool>();
}

bool JsonFields::boolean(const char* key, bool fallback) const {
  return has(key) ? boolean(key) : fallback;
}

std::size_t JsonFields::count(const char* key) const {
  const nlohmann::json& value = at(key);
  CHECK_USER(value.is_number_unsigned(), "[tokenizer] {}: {} \"{}\": \"{}\" is not a count", file_,
             part_, type_, key);
  return value.get<std::size_t>();
}

SplitPattern JsonFields::pattern(const char* key) const {
  const nlohmann::json& value = at(key);
  const auto is_form = [&](const char* name) {
    return value.is_object() && value.contains(name) && value[name].is_string();
  };
  if (is_form("String")) {
    const auto literal = value["String"].get<std::string>();
    if (literal.empty()) refuse("an empty pattern");
    return SplitPattern::from_literal(literal);
  }
  if (!is_form("Regex")) refuse("a pattern that is neither a String nor a Regex");
  try {
    return SplitPattern::from_regex(value["Regex"].get<std::string>());
  } catch (const Error& error) {
    refuse(error.what());
  }
}

}  // namespace tessera
