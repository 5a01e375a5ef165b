// Typed access to the keys of one JSON object that remembers which were used and gathers mistakes:
// for the .cpp files that read model folders.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "models/config.h"

namespace tessera {

class ConfigKeys {
 public:
  using Json = nlohmann::ordered_json;

  // `prefix` ("rope_scaling.") begins key names in messages. `problems` outlives this object.
  ConfigKeys(const Json& object, std::string prefix, std::vector<std::string>& problems)
      : object_(object), prefix_(std::move(prefix)), problems_(problems) {}

  // The value, marked as used; null when the key is absent or holds null.
  const Json* take(std::string_view key);
  bool has(std::string_view key) const { return object_.contains(key); }

  // Empty when absent, null, or of another type (which adds a problem).
  std::optional<std::int64_t> integer(std::string_view key);
  std::optional<double> number(std::string_view key);
  std::optional<bool> boolean(std::string_view key);
  std::optional<std::string> text(std::string_view key);
  // A number or a list of numbers.
  std::vector<std::int64_t> integers(std::string_view key);

  // The value, or a problem and 0 when the key is absent.
  std::int64_t required_integer(std::string_view key);

  void problem(std::string text) { problems_.push_back(std::move(text)); }
  std::string full_name(std::string_view key) const { return prefix_ + std::string(key); }
  // Keys that nothing took, in file order.
  std::vector<std::string> unused() const;

 private:
  const Json& object_;
  std::string prefix_;
  std::vector<std::string>& problems_;
  std::set<std::string, std::less<>> used_;
};

// A JSON value in a form fit for a message: at most 80 bytes.
std::string brief(const nlohmann::ordered_json& value);

// The rotary embedding, in either generation of keys (rope_theta + rope_scaling, or
// rope_parameters). Needs max_position_embeddings; defaults as in transformers.
RopeConfig read_rope(ConfigKeys& keys, std::int64_t max_position_embeddings,
                     std::vector<std::string>& problems, std::vector<std::string>& warnings);

// Sets the rope keys of `json` in the generation it already uses, the older one in a new file.
void write_rope(nlohmann::ordered_json& json, const ModelConfig& model);

}  // namespace tessera
