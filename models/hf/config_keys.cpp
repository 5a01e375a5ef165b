#include "models/hf/config_keys.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

namespace tessera {
namespace {

std::optional<std::int64_t> as_integer(const nlohmann::ordered_json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<std::uint64_t>();
    if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return {};
    return static_cast<std::int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<std::int64_t>();
  if (value.is_number_float()) {  // 8192.0: some tools write every number that way
    const auto number = value.get<double>();
    if (number == std::floor(number) && std::fabs(number) < 0x1p53) {
      return static_cast<std::int64_t>(number);
    }
  }
  return {};
}

}  // namespace

std::string brief(const nlohmann::ordered_json& value) {
  std::string text = value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return text;
}

const ConfigKeys::Json* ConfigKeys::take(std::string_view key) {
  const auto found = object_.find(key);
  if (found == object_.end()) return nullptr;
  used_.insert(std::string(key));
  return found->is_null() ? nullptr : &*found;
}

std::optional<std::int64_t> ConfigKeys::integer(std::string_view key) {
  const Json* value = take(key);
  if (value == nullptr) return {};
  const std::optional<std::int64_t> number = as_integer(*value);
  if (!number)
    problem(fmt::format("{} is {}, wanted a whole number", full_name(key), brief(*value)));
  return number;
}

std::optional<double> ConfigKeys::number(std::string_view key) {
  const Json* value = take(key);
  if (value == nullptr) return {};
  if (!value->is_number()) {
    problem(fmt::format("{} is {}, wanted a number", full_name(key), brief(*value)));
    return {};
  }
  return value->get<double>();
}

std::optional<bool> ConfigKeys::boolean(std::string_view key) {
  const Json* value = take(key);
  if (value == nullptr) return {};
  if (!value->is_boolean()) {
    problem(fmt::format("{} is {}, wanted true or false", full_name(key), brief(*value)));
    return {};
  }
  return value->get<bool>();
}

std::optional<std::string> ConfigKeys::text(std::string_view key) {
  const Json* value = take(key);
  if (value == nullptr) return {};
  if (!value->is_string()) {
    problem(fmt::format("{} is {}, wanted a text", full_name(key), brief(*value)));
    return {};
  }
  return value->get<std::string>();
}

std::vector<std::int64_t> ConfigKeys::integers(std::string_view key) {
  const Json* value = take(key);
  if (value == nullptr) return {};
  const Json list = value->is_array() ? *value : Json::array({*value});
  std::vector<std::int64_t> numbers;
  for (const Json& item : list) {
    const std::optional<std::int64_t> number = as_integer(item);
    if (!number) {
      problem(fmt::format("{} is {}, wanted a whole number or a list of them", full_name(key),
                          brief(*value)));
      return {};
    }
    numbers.push_back(*number);
  }
  return numbers;
}

std::int64_t ConfigKeys::required_integer(std::string_view key) {
  const bool given = has(key) && !object_.find(key)->is_null();
  if (!given) problem(fmt::format("{} is missing", full_name(key)));
  return integer(key).value_or(0);
}

std::vector<std::string> ConfigKeys::unused() const {
  std::vector<std::string> keys;
  for (const auto& [key, value] : object_.items()) {
    if (!used_.contains(key)) keys.push_back(key);
  }
  return keys;
}

}  // namespace tessera
