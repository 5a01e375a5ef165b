// The checks behind validate(): rules between keys, apart from reading them.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "engine/train/run_config.h"

namespace tessera {

// Mistakes of a configuration that was read. A rule that involves a key in `unreadable` says nothing:
// its mistake has been reported.
std::vector<ConfigMistake> find_config_problems(const RunConfig& config,
                                                const std::set<std::string>& unreadable);

}  // namespace tessera
