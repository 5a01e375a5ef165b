// Cuts text into the words of the well-known split patterns. Each matcher is written by hand to
// give the same cuts as its regular expression (split_pattern_test compares them with the general
// engine); a pattern that is not in the list goes to that engine.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include "data/tokenizer/regex.h"
#include "data/tokenizer/unicode.h"
#include "data/tokenizer/utf8.h"

namespace tessera {

// The pattern of GPT-2, built into the ByteLevel pre-tokenizer.
extern const std::string_view kGpt2Pattern;

class SplitPattern {
 public:
  // A regular expression; throws kUser if it is not supported.
  static SplitPattern from_regex(std::string_view pattern);
  // Plain text, not empty.
  static SplitPattern from_literal(std::string_view literal);

  // True if the matches of a hand-written matcher cover every text, so that there is nothing
  // between them.
  bool covers_text() const { return kind_ != Kind::kRegex && kind_ != Kind::kLiteral; }

  // Calls sink(begin, end) for each match, in order.
  template <typename Sink>
  void for_each_match(std::string_view text, Sink&& sink) const;

 private:
  enum class Kind : std::uint8_t {
    kGpt2,    // GPT-2
    kLlama3,  // Llama 3: digits in groups of up to three
    kQwen2,   // Qwen 2 and 3: single digits
    kQwen35,  // marks belong to the letters
    kO200k,   // GPT-4o: words split at case changes, contractions are suffixes
    kTekken,  // Mistral Nemo: the same, single digits, no contractions
    kRegex,
    kLiteral,
  };
  struct Rules {
    int max_digits;
    bool marks_are_letters = false;
    bool has_contractions = true;
  };

  // Category bit and length of the code point at `p`.
  struct Classified {
    CategoryMask mask;
    std::uint32_t length;
  };
  Classified classify(const char* p) const {
    const auto first = static_cast<unsigned char>(*p);
    if (first < 0x80) return {ascii_masks_[first], 1};
    const utf8::Decoded c = utf8::decode(p);
    return {categories_->mask(c.code_point), c.length};
  }
  const char* run(const char* p, const char* end, CategoryMask mask) const {
    while (p < end) {
      const Classified c = classify(p);
      if ((c.mask & mask) == 0) break;
      p += c.length;
    }
    return p;
  }

  static const char* contraction(const char* p, const char* end, bool ignore_case);
  const char* digits(const char* p, const char* end, int limit) const;
  const char* white_space(const char* p, const char* end, bool splits_lines) const;
  const char* case_word(const char* p, const char* end) const;
  const char* cased_run(const char* p, const char* end, bool needs_lower) const;

  const char* next_gpt2(const char* p, const char* end) const;
  template <Rules kRules>
  const char* next_cl100k(const char* p, const char* end) const;
  template <Rules kRules>
  const char* next_o200k(const char* p, const char* end) const;

  explicit SplitPattern(Kind kind);

  Kind kind_;
  const CategoryTable* categories_;
  std::array<CategoryMask, 128> ascii_masks_;
  std::shared_ptr<const Regex> regex_;  // shared by the copies of one pattern; immutable
  std::string literal_;
};

inline const char* SplitPattern::contraction(const char* p, const char* end, bool ignore_case) {
  // p is at the apostrophe; 's 't 'm 'd 're 've 'll
  if (end - p < 2) return nullptr;
  const char fold = ignore_case ? 0x20 : 0;
  const char a = static_cast<char>(p[1] | fold);
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return p + 2;
  if (end - p < 3) return nullptr;
  const char b = static_cast<char>(p[2] | fold);
  if ((b == 'e' && (a == 'r' || a == 'v')) || (a == 'l' && b == 'l')) return p + 3;
  // The long s folds to s.
  if (ignore_case && p[1] == '\xC5' && p[2] == '\xBF') return p + 3;
  return nullptr;
}

inline const char* SplitPattern::digits(const char* p, const char* end, int limit) const {
  for (int i = 0; i < limit && p < end; ++i) {
    const Classified c = classify(p);
    if ((c.mask & kNumberMask) == 0) break;
    p += c.length;
  }
  return p;
}

// \s*[\r\n]+ (if splits_lines), \s+(?!\S), \s+ from a blank at p.
inline const char* SplitPattern::white_space(const char* p, const char* end,
                                             bool splits_lines) const {
  const char* last = p;              // the last blank of the run
  const char* after_line = nullptr;  // behind its last line end
  const char* q = p;
  while (q < end) {
    const Classified c = classify(q);
    if ((c.mask & kSpaceMask) == 0) break;
    last = q;
    if (*q == '\n' || *q == '\r') after_line = q + 1;
    q += c.length;
  }
  if (splits_lines && after_line != nullptr) return after_line;
  // The last blank before a word is left to that word.
  if (q == end || last == p) return q;
  return last;
}

inline const char* SplitPattern::next_gpt2(const char* p, const char* end) const {
  if (*p == '\'') {
    if (const char* q = contraction(p, end, false)) return q;
  }
  const char* q = *p == ' ' && p + 1 < end ? p + 1 : p;
  const Classified c = classify(q);
  for (const CategoryMask mask : {kLetterMask, kNumberMask}) {
    if ((c.mask & mask) != 0) return run(q + c.length, end, mask);
  }
  if ((c.mask & kSpaceMask) != 0) return white_space(p, end, false);
  return run(q + c.length, end, ~(kSpaceMask | kLetterMask | kNumberMask));
}

template <SplitPattern::Rules kRules>
const char* SplitPattern::next_cl100k(const char* p, const char* end) const {
  constexpr CategoryMask kLetters = kLetterMask | (kRules.marks_are_letters ? kMarkMask : 0);
  constexpr CategoryMask kOthers = ~(kSpaceMask | kLetters | kNumberMask);
  if (*p == '\'') {
    if (const char* q = contraction(p, end, true)) return q;
  }
  const Classified c = classify(p);
  const char* q = p + c.length;
  if ((c.mask & kLetters) != 0) return run(q, end, kLetters);
  if ((c.mask & kNumberMask) != 0) return digits(p, end, kRules.max_digits);
  if (q < end && *p != '\r' && *p != '\n') {
    const Classified after = classify(q);
    if ((after.mask & kLetters) != 0) return run(q + after.length, end, kLetters);
    if (*p == ' ' && (after.mask & kOthers) != 0) {
      q += after.length;
      q = run(q, end, kOthers);
      while (q < end && (*q == '\r' || *q == '\n')) ++q;
      return q;
    }
  }
  if ((c.mask & kSpaceMask) != 0) return white_space(p, end, true);
  q = run(q, end, kOthers);
  while (q < end && (*q == '\r' || *q == '\n')) ++q;
  return q;
}

// [upper]*[lower]+ if needs_lower, else [upper]+[lower]*, from p; nullptr if there is no match.
// Letters without case and marks belong to both.
inline const char* SplitPattern::cased_run(const char* p, const char* end, bool needs_lower) const {
  constexpr CategoryMask kBoth = category_bit(kLm) | category_bit(kLo) | kMarkMask;
  constexpr CategoryMask kUpper = category_bit(kLu) | category_bit(kLt) | kBoth;
  constexpr CategoryMask kLower = category_bit(kLl) | kBoth;
  const char* after_both = nullptr;  // behind the last one of the upper run that counts as lower
  const char* q = p;
  CategoryMask mask = 0;
  while (q < end) {
    const Classified c = classify(q);
    mask = c.mask;
    if ((mask & kUpper) == 0) break;
    q += c.length;
    if ((mask & kBoth) != 0) after_both = q;
    mask = 0;
  }
  if (!needs_lower) return q == p ? nullptr : run(q, end, kLower);
  if ((mask & kLower) != 0) return run(q, end, kLower);
  return after_both;  // the upper run gives back down to it
}

// The two word alternatives of the GPT-4o pattern; nullptr if none matches at p.
inline const char* SplitPattern::case_word(const char* p, const char* end) const {
  const Classified c = classify(p);
  const bool may_be_prefix =
      (c.mask & (kLetterMask | kNumberMask)) == 0 && *p != '\r' && *p != '\n';
  for (const bool needs_lower : {true, false}) {
    if (may_be_prefix) {
      if (const char* q = cased_run(p + c.length, end, needs_lower)) return q;
    }
    if (const char* q = cased_run(p, end, needs_lower)) return q;
  }
  return nullptr;
}

template <SplitPattern::Rules kRules>
const char* SplitPattern::next_o200k(const char* p, const char* end) const {
  constexpr CategoryMask kOthers = ~(kSpaceMask | kLetterMask | kNumberMask);
  if (const char* q = case_word(p, end)) {
    if (kRules.has_contractions && q < end && *q == '\'') {
      if (const char* suffix = contraction(q, end, true)) return suffix;
    }
    return q;
  }
  const Classified c = classify(p);
  if ((c.mask & kNumberMask) != 0) return digits(p, end, kRules.max_digits);
  const char* q = p;
  if (*p == ' ' && p + 1 < end && (classify(p + 1).mask & kOthers) != 0) q = p + 1;
  if (q == p && (c.mask & kSpaceMask) != 0) return white_space(p, end, true);
  q = run(q, end, kOthers);
  while (q < end && (*q == '\r' || *q == '\n' || *q == '/')) ++q;
  return q;
}

template <typename Sink>
void SplitPattern::for_each_match(std::string_view text, Sink&& sink) const {
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const auto cut = [&](auto next) {
    for (const char* p = begin; p < end;) {
      const char* q = next(p);
      sink(static_cast<std::size_t>(p - begin), static_cast<std::size_t>(q - begin));
      p = q;
    }
  };
  switch (kind_) {
    case Kind::kGpt2:
      return cut([&](const char* p) { return next_gpt2(p, end); });
    case Kind::kLlama3:
      return cut([&](const char* p) { return next_cl100k<Rules{.max_digits = 3}>(p, end); });
    case Kind::kQwen2:
      return cut([&](const char* p) { return next_cl100k<Rules{.max_digits = 1}>(p, end); });
    case Kind::kQwen35:
      return cut([&](const char* p) {
        return next_cl100k<Rules{.max_digits = 1, .marks_are_letters = true}>(p, end);
      });
    case Kind::kO200k:
      return cut([&](const char* p) { return next_o200k<Rules{.max_digits = 3}>(p, end); });
    case Kind::kTekken:
      return cut([&](const char* p) {
        return next_o200k<Rules{.max_digits = 1, .has_contractions = false}>(p, end);
      });
    case Kind::kRegex:
      return regex_->for_each_match(text, sink);
    case Kind::kLiteral:
      for (std::size_t at = 0; (at = text.find(literal_, at)) != std::string_view::npos;) {
        sink(at, at + literal_.size());
        at += literal_.size();
      }
      return;
  }
}

}  // namespace tessera
