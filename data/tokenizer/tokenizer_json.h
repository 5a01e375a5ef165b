// Reads tokenizer.json. The vocabulary and the merges, which are nearly all of it, go straight into
// flat lists; the rest becomes a small tree.
#pragma once

#include <nlohmann/json.hpp>

#include <string>
#include <string_view>

#include "data/tokenizer/bpe.h"

namespace tessera {

struct TokenizerJson {
  nlohmann::json parts;  // everything but model.vocab and model.merges
  BpeConfig model;

  // A part such as "normalizer"; null if it is not there.
  const nlohmann::json& part(const char* name) const;
};

// `text` is the content of `file`, which is named in errors. Throws kUser if it is no JSON, not a
// BPE tokenizer, or uses a setting of the model that is not supported.
TokenizerJson parse_tokenizer_json(std::string_view text, std::string_view file);

}  // namespace tessera
