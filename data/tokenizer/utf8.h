// UTF-8 helpers shared by the tokenizer's parts. Functions on trusted text (decode_one, next)
// expect valid UTF-8; find_invalid_utf8 is the check at the door.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::utf8 {

struct Decoded {
  char32_t code_point;
  std::uint32_t length;  // bytes, 1-4
};

// The code point at `p`, which must start a complete valid sequence.
inline Decoded decode(const char* p) {
  const auto byte = [p](int i) {
    return static_cast<std::uint32_t>(static_cast<unsigned char>(p[i]));
  };
  const std::uint32_t first = byte(0);
  if (first < 0x80) return {static_cast<char32_t>(first), 1};
  if (first < 0xE0) return {static_cast<char32_t>((first & 0x1F) << 6 | (byte(1) & 0x3F)), 2};
  if (first < 0xF0) {
    return {static_cast<char32_t>((first & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F)),
            3};
  }
  return {static_cast<char32_t>((first & 0x07) << 18 | (byte(1) & 0x3F) << 12 |
                                (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F)),
          4};
}

// Bytes of the sequence that starts with `first`.
inline std::size_t sequence_length(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

inline bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// The start of the code point that ends before `end`; `end` must be greater than 0.
inline std::size_t previous(std::string_view text, std::size_t end) {
  do {
    --end;
  } while (end > 0 && is_continuation(text[end]));
  return end;
}

void append(std::string& out, char32_t code_point);
std::string encode(char32_t code_point);

// Byte offset of the first sequence that is not valid UTF-8 (overlong forms, surrogates and values
// past U+10FFFF included), or npos.
std::size_t find_invalid(std::string_view text);

// Appends `bytes` to `out`, each maximal invalid part replaced by U+FFFD (the Unicode standard's
// recommended practice, section 3.9).
void append_lossy(std::string& out, std::string_view bytes);

// Length of an incomplete but so far valid sequence at the end of `bytes` (0-3).
std::size_t incomplete_suffix(std::string_view bytes);

}  // namespace tessera::utf8
