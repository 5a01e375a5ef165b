// JSON text into a document, strictly: for .cpp files that read model folders. (The library alone
// would keep the last of two entries with one key.)
#pragma once

#include <nlohmann/json.hpp>

#include <string_view>

namespace tessera {

// The document in file order. Malformed text, invalid UTF-8, a key given twice, trailing text or
// nesting deeper than 64 is kUser: "[who] name: ...".
nlohmann::ordered_json parse_json_text(std::string_view text, std::string_view name,
                                       std::string_view who);

}  // namespace tessera
