#include "data/tokenizer/split_pattern.h"

#include "engine/core/error.h"

namespace tessera {

constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

SplitPattern::SplitPattern(Kind kind) : kind_(kind), categories_(&CategoryTable::instance()) {
  for (char32_t c = 0; c < 128; ++c) ascii_masks_[c] = categories_->mask(c);
}

SplitPattern SplitPattern::from_regex(std::string_view pattern) {
  struct Known {
    std::string_view pattern;
    Kind kind;
  };
  static constexpr Known kKnown[] = {
      {kGpt2Pattern, Kind::kGpt2},
      {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
       R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       Kind::kLlama3},
      {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|)"
       R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       Kind::kQwen2},
      {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|)"
       R"( ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       Kind::kQwen35},
      {R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
       R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
       R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
       R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
       R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       Kind::kO200k},
      {R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|)"
       R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|)"
       R"(\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       Kind::kTekken},
  };
  for (const Known& known : kKnown) {
    if (pattern == known.pattern) return SplitPattern(known.kind);
  }
  SplitPattern split(Kind::kRegex);
  split.regex_ = std::make_shared<const Regex>(pattern);
  return split;
}

SplitPattern SplitPattern::from_literal(std::string_view literal) {
  CHECK_USER(!literal.empty(), "[tokenizer] a split on the empty string; give it a pattern");
  SplitPattern split(Kind::kLiteral);
  split.literal_ = literal;
  return split;
}

}  // namespace tessera
