// What the configuration language names but this version does not do yet. Every such refusal stands
// in availability.cpp, so that the change which adds a feature lifts it there and nowhere else.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "engine/train/run_config.h"

namespace tessera {

// Key or section -> why it is refused; keys of other tools that have another form here included.
const std::map<std::string, std::string>& unavailable_keys();

struct UnavailableValue {
  std::string key;
  std::string message;  // "is 2; ...", to stand behind the key
};

// The values of `config` that are spelt right and not available.
std::vector<UnavailableValue> unavailable_values(const RunConfig& config);

// Whether `key` is refused with this value, all other keys at their defaults.
bool is_unavailable(const std::string& key, const std::string& value);

}  // namespace tessera
