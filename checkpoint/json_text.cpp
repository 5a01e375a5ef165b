#include "checkpoint/json_text.h"

#include <string>
#include <unordered_set>
#include <vector>

#include "engine/core/error.h"

namespace tessera {

nlohmann::ordered_json parse_json_text(std::string_view text, std::string_view name,
                                       std::string_view who) {
  using Json = nlohmann::ordered_json;
  constexpr int kDeepest = 64;
  std::vector<std::unordered_set<std::string>> keys_of_open_objects;
  const auto on_event = [&](int depth, Json::parse_event_t event, Json& parsed) {
    CHECK_USER(depth <= kDeepest, "[{}] {}: nested more than {} deep", who, name, kDeepest);
    if (event == Json::parse_event_t::object_start) {
      keys_of_open_objects.emplace_back();
    } else if (event == Json::parse_event_t::object_end) {
      keys_of_open_objects.pop_back();
    } else if (event == Json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      CHECK_USER(keys_of_open_objects.back().insert(key).second,
                 "[{}] {}: the key \"{}\" is given twice", who, name, key);
    }
    return true;
  };
  // A byte order mark is skipped by the library.
  try {
    return Json::parse(text.begin(), text.end(), on_event);
  } catch (const Json::exception& error) {
    TESSERA_FAIL(ErrorKind::kUser, "[{}] {} is not valid JSON: {}", who, name, error.what());
  }
}

}  // namespace tessera
