#include "data/tokenizer/unicode.h"

#include <algorithm>
#include <cctype>
#include <string>

namespace tessera {
namespace {

struct LowercaseRun {
  char32_t first;
  char32_t last;
  char32_t stride;
  std::int32_t delta;
};

struct NamedRanges {
  std::string_view name;
  std::span<const CodePointRange> ranges;
};

#include "data/tokenizer/unicode_tables.inc"

constexpr CategoryMask kWordMask =
    kLetterMask | kMarkMask | category_bit(kNd) | category_bit(kNl) | category_bit(kPc);

struct NamedMask {
  std::string_view name;  // lower case
  CategoryMask mask;
};

constexpr CategoryMask kOtherMask = category_bit(kCc) | category_bit(kControlSpace) |
                                    category_bit(kCf) | category_bit(kCo) | category_bit(kCn);
constexpr CategoryMask kSeparatorMask = category_bit(kZs) | category_bit(kZl) | category_bit(kZp);

constexpr NamedMask kNamedMasks[] = {
    {"l", kLetterMask},        {"letter", kLetterMask},
    {"m", kMarkMask},          {"mark", kMarkMask},
    {"n", kNumberMask},        {"number", kNumberMask},
    {"p", kPunctuationMask},   {"punctuation", kPunctuationMask},
    {"s", kSymbolMask},        {"symbol", kSymbolMask},
    {"z", kSeparatorMask},     {"separator", kSeparatorMask},
    {"c", kOtherMask},         {"other", kOtherMask},
    {"lu", category_bit(kLu)}, {"ll", category_bit(kLl)},
    {"lt", category_bit(kLt)}, {"lm", category_bit(kLm)},
    {"lo", category_bit(kLo)}, {"mn", category_bit(kMn)},
    {"mc", category_bit(kMc)}, {"me", category_bit(kMe)},
    {"nd", category_bit(kNd)}, {"nl", category_bit(kNl)},
    {"no", category_bit(kNo)}, {"pc", category_bit(kPc)},
    {"pd", category_bit(kPd)}, {"ps", category_bit(kPs)},
    {"pe", category_bit(kPe)}, {"pi", category_bit(kPi)},
    {"pf", category_bit(kPf)}, {"po", category_bit(kPo)},
    {"sm", category_bit(kSm)}, {"sc", category_bit(kSc)},
    {"sk", category_bit(kSk)}, {"so", category_bit(kSo)},
    {"zs", category_bit(kZs)}, {"zl", category_bit(kZl)},
    {"zp", category_bit(kZp)}, {"cc", category_bit(kCc) | category_bit(kControlSpace)},
    {"cf", category_bit(kCf)}, {"co", category_bit(kCo)},
    {"cn", category_bit(kCn)},
};

// A word set: the categories plus what the table adds.
CodePointSet with_extra(CategoryMask mask, std::span<const CodePointRange> extra) {
  CodePointSet set = category_set(mask);
  set.add(extra);
  return set;
}

CodePointSet adjusted(CategoryMask mask, std::span<const CodePointRange> extra,
                      std::span<const CodePointRange> missing) {
  CodePointSet set = with_extra(mask, extra);
  set.remove(CodePointSet(missing));
  return set;
}

}  // namespace

CategoryTable::CategoryTable() {
  std::array<std::uint8_t, 256> page;
  std::size_t run = 0;
  for (char32_t block = 0; block < index_.size(); ++block) {
    for (char32_t low = 0; low < 256; ++low) {
      const char32_t c = block << 8 | low;
      while (run + 1 < std::size(kCategoryRuns) && (kCategoryRuns[run + 1] >> 8) <= c) ++run;
      page[low] = static_cast<std::uint8_t>(kCategoryRuns[run] & 0xFF);
    }
    // Most blocks are uniform or repeat an earlier one.
    std::size_t same = 0;
    while (same * 256 < pages_.size() &&
           !std::equal(page.begin(), page.end(),
                       pages_.begin() + static_cast<std::ptrdiff_t>(same * 256))) {
      ++same;
    }
    if (same * 256 == pages_.size()) pages_.insert(pages_.end(), page.begin(), page.end());
    index_[block] = static_cast<std::uint16_t>(same);
  }
}

const CategoryTable& CategoryTable::instance() {
  static const CategoryTable table;
  return table;
}

CodePointSet category_set(CategoryMask mask) {
  std::vector<CodePointRange> ranges;
  for (std::size_t run = 0; run < std::size(kCategoryRuns); ++run) {
    if ((mask >> (kCategoryRuns[run] & 0xFF) & 1) == 0) continue;
    const char32_t first = kCategoryRuns[run] >> 8;
    const char32_t last =
        run + 1 < std::size(kCategoryRuns) ? (kCategoryRuns[run + 1] >> 8) - 1 : 0x10FFFF;
    ranges.push_back({first, last});
  }
  return CodePointSet(ranges);
}

std::optional<CodePointSet> property_set(std::string_view name) {
  // Names are compared as the pattern language does: case, blanks, '-' and '_' do not matter.
  std::string key;
  for (const char c : name) {
    if (c == ' ' || c == '-' || c == '_') continue;
    key.push_back(static_cast<char>(std::tolower(static_cast<unsigned char>(c))));
  }
  for (const NamedMask& named : kNamedMasks) {
    if (named.name == key) return category_set(named.mask);
  }
  for (const NamedRanges& script : kScripts) {
    if (script.name == key) return CodePointSet(script.ranges);
  }
  return std::nullopt;
}

const CodePointSet& regex_word_set() {
  static const CodePointSet set = with_extra(kWordMask, kRegexWordExtra);
  return set;
}

const CodePointSet& word_set() {
  static const CodePointSet set = with_extra(kWordMask, kWordExtra);
  return set;
}

const CodePointSet& numeric_set() {
  static const CodePointSet set = with_extra(kNumberMask, kNumericExtra);
  return set;
}

const CodePointSet& punctuation_set() {
  static const CodePointSet set =
      adjusted(kPunctuationMask, kPunctuationExtra, kPunctuationMissing);
  return set;
}

const CodePointSet& accent_set() {
  static const CodePointSet set = adjusted(kMarkMask, kAccentExtra, kAccentMissing);
  return set;
}

char32_t to_lower(char32_t c, char32_t* second) {
  *second = 0;
  if (c < 0x80) return c >= 'A' && c <= 'Z' ? c + 32 : c;
  if (c == 0x130) {  // capital I with dot above: i and a combining dot
    *second = 0x307;
    return 'i';
  }
  const auto run =
      std::upper_bound(std::begin(kLowercaseRuns), std::end(kLowercaseRuns), c,
                       [](char32_t value, const LowercaseRun& r) { return value < r.first; });
  if (run == std::begin(kLowercaseRuns)) return c;
  const LowercaseRun& r = *std::prev(run);
  if (c > r.last || (c - r.first) % r.stride != 0) return c;
  return static_cast<char32_t>(static_cast<std::int32_t>(c) + r.delta);
}

}  // namespace tessera
