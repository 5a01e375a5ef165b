#include "data/tokenizer/byte_alphabet.h"

#include "data/tokenizer/utf8.h"

namespace tessera {

ByteAlphabet::ByteAlphabet() {
  byte_of_.fill(-1);
  char32_t next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool is_printable =
        (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    const char32_t c = is_printable ? static_cast<char32_t>(byte) : next++;
    text_[static_cast<std::size_t>(byte)] = utf8::encode(c);
    byte_of_[c] = static_cast<short>(byte);
  }
}

const ByteAlphabet& ByteAlphabet::instance() {
  static const ByteAlphabet alphabet;
  return alphabet;
}

std::optional<std::string> ByteAlphabet::bytes_of(std::string_view token) const {
  std::string bytes;
  for (std::size_t i = 0; i < token.size();) {
    const utf8::Decoded c = utf8::decode(token.data() + i);
    const int byte = byte_of(c.code_point);
    if (byte < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(byte));
    i += c.length;
  }
  return bytes;
}

}  // namespace tessera
