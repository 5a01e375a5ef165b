#include "data/encoder.h"

#include <fmt/format.h>

namespace tessera {

TextEncoder byte_encoder() {
  TextEncoder encoder;
  encoder.encode = [](std::string_view text, std::vector<std::int32_t>& ids) {
    ids.reserve(ids.size() + text.size());
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  };
  encoder.decode = [](std::span<const std::int32_t> ids) {
    std::string text;
    for (const std::int32_t id : ids) {
      if (id >= 0 && id < 256) {
        text += static_cast<char>(id);
      } else {
        text += "<|endoftext|>";
      }
    }
    return text;
  };
  encoder.token_text = [](std::int32_t id) -> std::string {
    if (id == 256) return "<|endoftext|>";
    if (id >= 0x20 && id < 0x7F) return fmt::format("\"{}\"", static_cast<char>(id));
    if (id >= 0 && id < 256) return fmt::format("<0x{:02X}>", id);
    return "no token of this tokenizer";
  };
  encoder.document_end = {256};
  encoder.vocab_size = 257;
  encoder.fingerprint = "bytes/1";
  return encoder;
}

}  // namespace tessera
