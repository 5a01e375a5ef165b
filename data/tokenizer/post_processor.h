// The post-processor of a tokenizer.json as far as it changes ids: what is put before and after the
// tokens of a text.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <string_view>
#include <vector>

namespace tessera {

struct PostProcessor {
  std::vector<std::int32_t> prefix;
  std::vector<std::int32_t> suffix;
};

// `spec` is the file's "post_processor" (may be null). Throws kUser naming `file` and the part if
// it is not supported.
PostProcessor parse_post_processor(const nlohmann::json& spec, std::string_view file);

}  // namespace tessera
