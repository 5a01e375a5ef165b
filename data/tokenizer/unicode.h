// What the tokenizer knows about code points: categories, blanks, words, scripts, lower case. All
// tables follow the Hugging Face library, code point for code point (tools/make_unicode_tables.py).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "data/tokenizer/code_point_set.h"

namespace tessera {

// General categories; the white space among the control characters (tab, line ends, U+0085) has a
// value of its own, so that every class of a split pattern is a set of these values.
enum CharCategory : std::uint8_t {
  kLu,
  kLl,
  kLt,
  kLm,
  kLo,
  kMn,
  kMc,
  kMe,
  kNd,
  kNl,
  kNo,
  kPc,
  kPd,
  kPs,
  kPe,
  kPi,
  kPf,
  kPo,
  kSm,
  kSc,
  kSk,
  kSo,
  kZs,
  kZl,
  kZp,
  kCc,
  kCf,
  kCo,
  kCn,
  kControlSpace,
  kNumCharCategories
};

using CategoryMask = std::uint32_t;

constexpr CategoryMask category_bit(CharCategory category) { return CategoryMask{1} << category; }

constexpr CategoryMask kLetterMask = category_bit(kLu) | category_bit(kLl) | category_bit(kLt) |
                                     category_bit(kLm) | category_bit(kLo);
constexpr CategoryMask kMarkMask = category_bit(kMn) | category_bit(kMc) | category_bit(kMe);
constexpr CategoryMask kNumberMask = category_bit(kNd) | category_bit(kNl) | category_bit(kNo);
constexpr CategoryMask kPunctuationMask = category_bit(kPc) | category_bit(kPd) |
                                          category_bit(kPs) | category_bit(kPe) |
                                          category_bit(kPi) | category_bit(kPf) | category_bit(kPo);
constexpr CategoryMask kSymbolMask =
    category_bit(kSm) | category_bit(kSc) | category_bit(kSk) | category_bit(kSo);
constexpr CategoryMask kSpaceMask =
    category_bit(kZs) | category_bit(kZl) | category_bit(kZp) | category_bit(kControlSpace);

// Category of every code point in two table look-ups.
class CategoryTable {
 public:
  static const CategoryTable& instance();  // immutable, built on first use

  CharCategory category(char32_t c) const {
    return static_cast<CharCategory>(pages_[index_[c >> 8] << 8 | (c & 0xFF)]);
  }
  CategoryMask mask(char32_t c) const { return CategoryMask{1} << category(c); }

 private:
  CategoryTable();
  std::array<std::uint16_t, 0x1100> index_;
  std::vector<std::uint8_t> pages_;
};

// White_Space of the Unicode database.
inline bool is_space(char32_t c) {
  if (c < 0x80) return c == ' ' || (c >= '\t' && c <= '\r');
  return (CategoryTable::instance().mask(c) & kSpaceMask) != 0;
}

// Sets named as in a pattern: "L", "Lu", "Letter", "Han", "IsHan", ...; nothing if unknown.
std::optional<CodePointSet> property_set(std::string_view name);
CodePointSet category_set(CategoryMask mask);

const CodePointSet& regex_word_set();   // [\w] of split patterns
const CodePointSet& word_set();         // Whitespace pre-tokenizer, single_word added tokens
const CodePointSet& numeric_set();      // Digits pre-tokenizer
const CodePointSet& punctuation_set();  // Punctuation pre-tokenizer
const CodePointSet& accent_set();       // StripAccents normalizer

// Lower case of one code point; U+0130 has two, the second of which is in `second` (else 0).
char32_t to_lower(char32_t c, char32_t* second);

}  // namespace tessera
