// The TextEncoder of a tokenizer.
#pragma once

#include <filesystem>
#include <memory>

#include "data/encoder.h"
#include "data/tokenizer/tokenizer.h"

namespace tessera {

// `path` is the folder or tokenizer.json that `tokenizer` was loaded from: its content is the encoder's
// fingerprint. A document starts with what the tokenizer puts in front of a text (BOS, where the file
// says so) and ends with EOS, where there is one.
TextEncoder make_text_encoder(std::shared_ptr<const Tokenizer> tokenizer,
                              const std::filesystem::path& path);

}  // namespace tessera
