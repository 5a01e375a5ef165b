// The regular expressions of tokenizer.json (Split and Replace), as the Hugging Face library reads
// them: Oniguruma's Ruby syntax over UTF-8. A backtracking matcher for the part of that language
// that tokenizers use; anything else is refused when the pattern is read, never approximated.
//
// Supported: literals, escapes, `.`, classes with ranges, nesting and &&, \s \d \w \p{..} and their
// complements, groups, (?i:..) over ASCII letters, alternation, greedy, lazy and possessive
// quantifiers, (?>..), look-ahead, look-behind of one character, ^ $ \A \z.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer/code_point_set.h"

namespace tessera {

class Regex {
 public:
  struct Match {
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  // `pattern` as it stands in the file. Throws kUser naming the construct if it is not supported.
  explicit Regex(std::string_view pattern);

  // A choice of the search that can still be changed.
  struct Frame {
    enum Kind : std::uint8_t { kResume, kGiveBack, kTakeMore };
    Kind kind;
    std::uint32_t pc;     // kResume: where to go on; otherwise the repeat
    std::uint32_t count;  // kTakeMore: code points taken so far
    std::size_t position;
    std::size_t lowest;  // kGiveBack: where giving back must stop
  };
  using Stack = std::vector<Frame>;  // kept between searches to save its allocation

  // The leftmost match at or after byte `from` of `text` (valid UTF-8); false if there is none.
  bool search(std::string_view text, std::size_t from, Stack& stack, Match* match) const;

  // Calls sink(begin, end) for each match from left to right; an empty match that touches the
  // previous one is skipped.
  template <typename Sink>
  void for_each_match(std::string_view text, Sink&& sink) const {
    std::size_t from = 0;
    std::size_t previous_end = std::string_view::npos;
    Stack stack;
    Match match;
    while (from <= text.size() && search(text, from, stack, &match)) {
      if (match.begin == match.end && match.end == previous_end) {
        from += from < text.size() ? step_length(text[from]) : 1;
        continue;
      }
      from = previous_end = match.end;
      sink(match.begin, match.end);
    }
  }

 private:
  friend class RegexCompiler;

  enum class Op : std::uint8_t {
    kLiteral,    // bytes of literals_[a, a + b)
    kSet,        // one code point of sets_[a]
    kRepeatSet,  // low..high code points of sets_[a], as many as possible first
    kRepeatSetLazy,
    kRepeatSetPossessive,
    kSplit,       // try a, then b
    kJump,        // to a
    kLookAhead,   // body at pc + 1, continue at a; b: 1 if it must not match
    kLookBehind,  // the code point before is in sets_[a]; b: 1 if it must not be
    kAtomic,      // body at pc + 1, continue at a where the body ended
    kLineStart,
    kLineEnd,
    kTextStart,
    kTextEnd,
    kMatch,
  };
  struct Instruction {
    Op op = Op::kMatch;
    std::uint32_t a = 0;
    std::uint32_t b = 0;
    std::uint32_t low = 0;
    std::uint32_t high = 0;
  };
  static std::size_t step_length(char first);
  bool match_here(std::string_view text, std::uint32_t pc, std::size_t position, Stack& stack,
                  std::size_t* end) const;

  std::vector<Instruction> program_;
  std::vector<CodePointSet> sets_;
  std::string literals_;
};

}  // namespace tessera
