// GPT-2's printable alphabet for bytes: each byte has one code point below U+0144 that stands for
// it in the vocabulary of a byte-level tokenizer (bytes_to_unicode of the GPT-2 encoder).
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

class ByteAlphabet {
 public:
  static const ByteAlphabet& instance();  // immutable, built on first use

  const std::string& text(unsigned char byte) const { return text_[byte]; }
  // The byte that `c` stands for, or -1.
  int byte_of(char32_t c) const { return c < byte_of_.size() ? byte_of_[c] : -1; }
  // The bytes that `token` stands for; nothing if one of its characters stands for none.
  std::optional<std::string> bytes_of(std::string_view token) const;

 private:
  ByteAlphabet();
  std::array<std::string, 256> text_;
  std::array<short, 0x180> byte_of_;
};

}  // namespace tessera
