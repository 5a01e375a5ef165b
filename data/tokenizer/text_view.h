// Text on its way through the tokenizer: a view that knows which bytes of the original it came
// from, and a buffer to write the next form of it into.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Bytes [begin, end) of the original text.
struct TextSpan {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  friend bool operator==(const TextSpan&, const TextSpan&) = default;
};

// A piece of text. Its origin is either one span per byte (`origin`), or, where the text is still a
// part of the original, the bytes from `base` on.
struct TextView {
  std::string_view text;
  const TextSpan* origin = nullptr;
  std::uint32_t base = 0;

  TextSpan origin_of(std::size_t byte) const {
    if (origin != nullptr) return origin[byte];
    const auto at = base + static_cast<std::uint32_t>(byte);
    return {at, at + 1};
  }
  TextSpan origin_of(std::size_t begin, std::size_t end) const {
    return {origin_of(begin).begin, origin_of(end - 1).end};
  }
  TextView part(std::size_t begin, std::size_t end) const {
    return {text.substr(begin, end - begin), origin == nullptr ? nullptr : origin + begin,
            base + static_cast<std::uint32_t>(begin)};
  }
};

// The text a step produces. Origins are kept only where someone asks for offsets.
struct TextBuffer {
  std::string text;
  std::vector<TextSpan> origin;
  bool keeps_origin = false;

  void reset(bool keep_origin) {
    text.clear();
    origin.clear();
    keeps_origin = keep_origin;
  }
  TextView view() const { return {text, keeps_origin ? origin.data() : nullptr, 0}; }

  // Appends bytes [begin, end) of `from` as they are.
  void copy(const TextView& from, std::size_t begin, std::size_t end) {
    text.append(from.text, begin, end - begin);
    if (!keeps_origin) return;
    for (std::size_t i = begin; i < end; ++i) origin.push_back(from.origin_of(i));
  }
  // Appends `bytes`, which stand for `span` of the original.
  void put(std::string_view bytes, TextSpan span) {
    text.append(bytes);
    if (keeps_origin) origin.insert(origin.end(), bytes.size(), span);
  }
};

}  // namespace tessera
