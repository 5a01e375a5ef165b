// The hand-written matchers against the general engine, on texts made to hit their corners.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "data/tokenizer/regex.h"
#include "data/tokenizer/split_pattern.h"
#include "data/tokenizer/utf8.h"

namespace tessera {
namespace {

constexpr const char* kPatterns[] = {
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
};

using Cuts = std::vector<std::pair<std::size_t, std::size_t>>;

class KnownPattern : public ::testing::TestWithParam<const char*> {};

TEST_P(KnownPattern, CutsLikeTheRegularExpression) {
  const SplitPattern fast = SplitPattern::from_regex(GetParam());
  ASSERT_TRUE(fast.covers_text()) << "no hand-written matcher for this pattern";
  const Regex regex(GetParam());
  const std::string pieces[] = {
      "a",      "B",      "z",      "S",       "\u00e9",     "\u00c9",    "\u01c5", "\u02b0",
      "\u4e2d", "\u0301", "\u093e", "1",       "9",          "\u00bd",    "\u0661", " ",
      " ",      "\t",     "\n",     "\r",      "\v",         "\u0085",    "\u00a0", "\u3000",
      "'",      "'s",     "'LL",    "'\u017f", "'re",        "!",         "/",      "\u2026",
      "$",      "\x01",   "\x1c",   "\u200b",  "\U0001f600", "\U00020000"};
  std::mt19937 random(7);
  for (int round = 0; round < 5000; ++round) {
    std::string text;
    const auto length = random() % 14;
    for (std::size_t i = 0; i < length; ++i) {
      if (random() % 20 == 0) {
        const char32_t c = random() % 0x110000;
        utf8::append(text, c >= 0xD800 && c <= 0xDFFF ? U'x' : c);
      } else {
        text += pieces[random() % std::size(pieces)];
      }
    }
    Cuts expected;
    Cuts cuts;
    regex.for_each_match(text, [&](std::size_t b, std::size_t e) { expected.emplace_back(b, e); });
    fast.for_each_match(text, [&](std::size_t b, std::size_t e) { cuts.emplace_back(b, e); });
    ASSERT_EQ(cuts, expected) << testing::PrintToString(text);
  }
}

INSTANTIATE_TEST_SUITE_P(SplitPattern, KnownPattern, ::testing::ValuesIn(kPatterns),
                         [](const auto& info) { return "Pattern" + std::to_string(info.index); });

TEST(SplitPattern, ALiteralIsFoundFromLeftToRight) {
  Cuts cuts;
  SplitPattern::from_literal("aa").for_each_match(
      "aaaba", [&](std::size_t b, std::size_t e) { cuts.emplace_back(b, e); });
  EXPECT_EQ(cuts, (Cuts{{0, 2}}));
}

}  // namespace
}  // namespace tessera
