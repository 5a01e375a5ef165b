#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "data/tokenizer/regex.h"
#include "tests/data/tokenizer/tokenizer_test_support.h"

namespace tessera {
namespace {

// The matches of `pattern`, as their texts.
std::vector<std::string> matches(std::string_view pattern, std::string_view text) {
  std::vector<std::string> found;
  Regex(pattern).for_each_match(text, [&](std::size_t begin, std::size_t end) {
    found.emplace_back(text.substr(begin, end - begin));
  });
  return found;
}

using Texts = std::vector<std::string>;

TEST(Regex, AlternativesAreTriedInOrder) {
  EXPECT_EQ(matches("ab|a|abc", "abca"), (Texts{"ab", "a"}));
  EXPECT_EQ(matches("a|ab", "ab"), (Texts{"a"}));
}

TEST(Regex, GreedyRepeatsGiveBack) {
  EXPECT_EQ(matches("a*ab", "aaab"), (Texts{"aaab"}));
  EXPECT_EQ(matches("(?:ab)*abc", "ababc"), (Texts{"ababc"}));
  EXPECT_EQ(matches(R"(\s+(?!\S))", "a   b "), (Texts{"  ", " "}));
}

TEST(Regex, PossessiveRepeatsDoNotGiveBack) {
  EXPECT_EQ(matches("a*+ab", "aaab"), Texts{});
  EXPECT_EQ(matches("(?>ab|a)b", "abb ab"), (Texts{"abb"}));
  EXPECT_EQ(matches("(?:ab)++a", "ababa"), (Texts{"ababa"}));
}

TEST(Regex, LazyRepeatsTakeAsLittleAsTheyCan) {
  EXPECT_EQ(matches("a+?", "aaa"), (Texts{"a", "a", "a"}));
  EXPECT_EQ(matches("<.*?>", "<a><b>"), (Texts{"<a>", "<b>"}));
  EXPECT_EQ(matches("a{2,3}?b", "aaab"), (Texts{"aaab"}));
  EXPECT_EQ(matches("a{1,2}?c", "aaac"), (Texts{"aac"}));
}

TEST(Regex, IntervalsCountCodePoints) {
  EXPECT_EQ(matches(R"(\p{N}{1,3})", "1234567"), (Texts{"123", "456", "7"}));
  EXPECT_EQ(matches("é{2}", "ééé"), (Texts{"éé"}));
  EXPECT_EQ(matches("x{,2}y", "xxxy"), (Texts{"xxy"}));
  EXPECT_EQ(matches("x{a}", "x{a}"), (Texts{"x{a}"}));  // no interval: literal text
  EXPECT_EQ(matches("(?:ab){2,}", "abababa"), (Texts{"ababab"}));
  EXPECT_EQ(matches("a{2}+", "aaaaa"), (Texts{"aaaa"}));  // a repeat of a repeat
}

TEST(Regex, ClassesHaveRangesNestingAndIntersection) {
  EXPECT_EQ(matches("[a-c]+", "xabcd"), (Texts{"abc"}));
  EXPECT_EQ(matches("[^a-c]+", "abxyc"), (Texts{"xy"}));
  EXPECT_EQ(matches("[a[xy]]+", "axyb"), (Texts{"axy"}));
  EXPECT_EQ(matches("[a-z&&[^b]]+", "abc"), (Texts{"a", "c"}));
  EXPECT_EQ(matches("[-a]+", "b-a"), (Texts{"-a"}));
  EXPECT_EQ(matches(R"([\]\-\\]+)", R"(a]-\b)"), (Texts{R"(]-\)"}));
  EXPECT_EQ(matches("[一-龥]+", "a中文b"), (Texts{"中文"}));
}

TEST(Regex, PropertiesFollowUnicode16) {
  EXPECT_EQ(matches(R"(\p{L}+)", "aé中1"), (Texts{"aé中"}));
  EXPECT_EQ(matches(R"(\p{Lu})", "aÄ\u01C5"), (Texts{"Ä"}));
  EXPECT_EQ(matches(R"(\p{Lt})", "\u01C5"), (Texts{"\u01C5"}));
  EXPECT_EQ(matches(R"(\p{N})", "½²①１"), (Texts{"½", "²", "①", "１"}));
  EXPECT_EQ(matches(R"(\d)", "½²①１5"), (Texts{"１", "5"}));
  EXPECT_EQ(matches(R"(\P{L}+)", "a12b"), (Texts{"12"}));
  EXPECT_EQ(matches(R"(\p{^L}+)", "a12b"), (Texts{"12"}));
  EXPECT_EQ(matches(R"(\p{Han}+)", "a漢字か"), (Texts{"漢字"}));
  EXPECT_EQ(matches(R"(\s)", "\u0085\u00A0\u200B\u3000"), (Texts{"\u0085", "\u00A0", "\u3000"}));
}

// The reference engine asks two tables: one for \w, another for [\w].
TEST(Regex, WordCharactersInsideAndOutsideOfBrackets) {
  EXPECT_EQ(matches(R"(\w+)", "a²½_é9-"), (Texts{"a²½_é9"}));
  EXPECT_EQ(matches(R"(\W+)", "a²-½¾ b"), (Texts{"-", " "}));
  EXPECT_EQ(matches(R"([\w]+)", "a²½_é9-"), (Texts{"a", "_é9"}));
  EXPECT_EQ(matches(R"([^\w\s]+)", "a\uFEFF² ¹"), (Texts{"\uFEFF²", "¹"}));
  EXPECT_EQ(matches(R"([\W]+)", "a²-½¾ b"), (Texts{"²-½¾ "}));
  EXPECT_EQ(matches(R"(\w+|[^\w\s]+)", "-\uFEFF² ²³"), (Texts{"-\uFEFF²", "²³"}));
}

TEST(Regex, CaseFoldingReachesTheLongSAndTheKelvinSign) {
  EXPECT_EQ(matches("(?i:'s)", "'s'S'\u017F"), (Texts{"'s", "'S", "'\u017F"}));
  EXPECT_EQ(matches("(?i:k)", "kK\u212A"), (Texts{"k", "K", "\u212A"}));
  EXPECT_EQ(matches("(?i:ab)c", "ABc ABC"), (Texts{"ABc"}));
  EXPECT_EQ(matches("a(?i)b|c", "aB aC C"), (Texts{"aB", "aC"}));
}

TEST(Regex, LookaroundsTakeNothing) {
  EXPECT_EQ(matches("a(?=b)", "ab ac"), (Texts{"a"}));
  EXPECT_EQ(matches("a(?!b)", "ab ac"), (Texts{"a"}));
  EXPECT_EQ(matches(R"((?<=\s)a)", "a a"), (Texts{"a"}));
  EXPECT_EQ(matches(R"((?<!é)a)", "éa a"), (Texts{"a"}));
}

TEST(Regex, AnchorsAreThoseOfLines) {
  EXPECT_EQ(matches("^a", "a\na"), (Texts{"a", "a"}));
  EXPECT_EQ(matches("a$", "a\nab"), (Texts{"a"}));
  EXPECT_EQ(matches(R"(\Aa)", "a\na"), (Texts{"a"}));
  EXPECT_EQ(matches(R"(a\z)", "a\na"), (Texts{"a"}));
}

TEST(Regex, EmptyMatchesDoNotTouchTheOneBefore) {
  EXPECT_EQ(matches("a*", "aab"), (Texts{"aa", ""}));
  EXPECT_EQ(matches("(?=[A-Z])", "aBC"), (Texts{"", ""}));
}

TEST(Regex, WhatIsNotSupportedIsRefusedByName) {
  const std::pair<const char*, const char*> kCases[] = {
      {R"(\bword)", "\\b"},
      {R"((?<name>a))", "(?<"},
      {R"(\p{Runic})", "Runic"},
      {"[[:alpha:]]", "POSIX"},
      {"(?:a*)*", "can be empty"},
      {R"((?<=ab)c)", "look-behind"},
      {"(?i:é)", "beyond ASCII"},
      {"(?i:ss)", "pair of letters"},
      {"(a", "open group"},
      {"a)", "unmatched"},
      {"[a", "open class"},
      {"*a", "repeat of nothing"},
      {R"(\1)", "\\1"},
      {"(?x:a b)", "(?x"},
      {"[z-a]", "backwards"},
      {R"(\pL)", "without braces"},
      {"a\\", "backslash"},
  };
  for (const auto& [pattern, part] : kCases) {
    const std::string message = test::user_error([p = pattern] { Regex regex{p}; });
    EXPECT_NE(message.find(part), std::string::npos) << pattern << ": " << message;
    EXPECT_NE(message.find(pattern), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace tessera
