#include "data/tokenizer/utf8.h"

#include <cstring>

namespace tessera::utf8 {
namespace {

struct Step {
  std::size_t length;  // bytes of the sequence, or of the maximal invalid part
  bool valid;
  bool truncated;  // valid so far, the text ended too early
};

// One step of the table in the Unicode standard, section 3.9, "Well-Formed UTF-8 Byte Sequences".
Step step(std::string_view text, std::size_t i) {
  const auto byte = [&](std::size_t k) { return static_cast<unsigned char>(text[i + k]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return {1, true, false};
  std::size_t length = 0;
  unsigned char low = 0x80;
  unsigned char high = 0xBF;
  if (first >= 0xC2 && first <= 0xDF) {
    length = 2;
  } else if (first >= 0xE0 && first <= 0xEF) {
    length = 3;
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
  } else if (first >= 0xF0 && first <= 0xF4) {
    length = 4;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
  } else {
    return {1, false, false};
  }
  for (std::size_t k = 1; k < length; ++k) {
    if (i + k >= text.size()) return {k, false, true};
    if (byte(k) < low || byte(k) > high) return {k, false, false};
    low = 0x80;
    high = 0xBF;
  }
  return {length, true, false};
}

// Index of the first byte at or after `i` that is not ASCII.
std::size_t skip_ascii(std::string_view text, std::size_t i) {
  constexpr std::uint64_t kHighBits = 0x8080808080808080ull;
  while (i + 8 <= text.size()) {
    std::uint64_t word;
    std::memcpy(&word, text.data() + i, 8);
    if ((word & kHighBits) != 0) break;
    i += 8;
  }
  while (i < text.size() && static_cast<unsigned char>(text[i]) < 0x80) ++i;
  return i;
}

}  // namespace

void append(std::string& out, char32_t code_point) {
  const auto put = [&out](std::uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  const auto c = static_cast<std::uint32_t>(code_point);
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6);
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12);
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18);
    put(0x80 | (c >> 12 & 0x3F));
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  }
}

std::string encode(char32_t code_point) {
  std::string out;
  append(out, code_point);
  return out;
}

std::size_t find_invalid(std::string_view text) {
  std::size_t i = 0;
  while ((i = skip_ascii(text, i)) < text.size()) {
    const Step s = step(text, i);
    if (!s.valid) return i;
    i += s.length;
  }
  return std::string_view::npos;
}

void append_lossy(std::string& out, std::string_view bytes) {
  std::size_t i = 0;
  while (i < bytes.size()) {
    const std::size_t ascii_end = skip_ascii(bytes, i);
    out.append(bytes, i, ascii_end - i);
    i = ascii_end;
    if (i == bytes.size()) break;
    const Step s = step(bytes, i);
    if (s.valid) {
      out.append(bytes, i, s.length);
    } else {
      out.append("\xEF\xBF\xBD");
    }
    i += s.length;
  }
}

std::size_t incomplete_suffix(std::string_view bytes) {
  for (std::size_t length = 1; length <= 3 && length <= bytes.size(); ++length) {
    const std::size_t start = bytes.size() - length;
    if (is_continuation(bytes[start])) continue;
    return step(bytes, start).truncated ? length : 0;
  }
  return 0;
}

}  // namespace tessera::utf8
