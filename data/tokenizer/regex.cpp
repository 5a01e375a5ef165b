#include "data/tokenizer/regex.h"

#include <cstring>

#include "data/tokenizer/utf8.h"

namespace tessera {
namespace {

// The end of at most `limit` code points of `set` from `position`; `count` receives how many.
std::size_t take(std::string_view text, std::size_t position, const CodePointSet& set,
                 std::uint32_t limit, std::uint32_t* count) {
  std::uint32_t taken = 0;
  while (taken < limit && position < text.size()) {
    const utf8::Decoded c = utf8::decode(text.data() + position);
    if (!set.contains(c.code_point)) break;
    position += c.length;
    ++taken;
  }
  *count = taken;
  return position;
}

}  // namespace

std::size_t Regex::step_length(char first) { return utf8::sequence_length(first); }

bool Regex::search(std::string_view text, std::size_t from, Stack& stack, Match* match) const {
  for (std::size_t begin = from;;) {
    std::size_t end = 0;
    if (match_here(text, 0, begin, stack, &end)) {
      *match = {begin, end};
      return true;
    }
    if (begin >= text.size()) return false;
    begin += step_length(text[begin]);
  }
}

bool Regex::match_here(std::string_view text, std::uint32_t pc, std::size_t position, Stack& stack,
                       std::size_t* end) const {
  const std::size_t base = stack.size();
  for (;;) {
    const Instruction& at = program_[pc];
    bool ok = true;
    switch (at.op) {
      case Op::kLiteral:
        ok = text.size() - position >= at.b &&
             std::memcmp(text.data() + position, literals_.data() + at.a, at.b) == 0;
        position += at.b;
        ++pc;
        break;
      case Op::kSet: {
        if (position >= text.size()) {
          ok = false;
          break;
        }
        const utf8::Decoded c = utf8::decode(text.data() + position);
        ok = sets_[at.a].contains(c.code_point);
        position += c.length;
        ++pc;
        break;
      }
      case Op::kRepeatSet:
      case Op::kRepeatSetPossessive: {
        std::uint32_t count = 0;
        const std::size_t lowest = take(text, position, sets_[at.a], at.low, &count);
        ok = count == at.low;
        if (!ok) break;
        position = take(text, lowest, sets_[at.a], at.high - at.low, &count);
        if (at.op == Op::kRepeatSet && position > lowest) {
          stack.push_back({Frame::kGiveBack, pc, 0, position, lowest});
        }
        ++pc;
        break;
      }
      case Op::kRepeatSetLazy: {
        std::uint32_t count = 0;
        position = take(text, position, sets_[at.a], at.low, &count);
        ok = count == at.low;
        if (ok && at.low < at.high) {
          stack.push_back({Frame::kTakeMore, pc, at.low, position, 0});
        }
        ++pc;
        break;
      }
      case Op::kSplit:
        stack.push_back({Frame::kResume, at.b, 0, position, 0});
        pc = at.a;
        break;
      case Op::kJump:
        pc = at.a;
        break;
      case Op::kLookAhead: {
        std::size_t ignored = 0;
        ok = match_here(text, pc + 1, position, stack, &ignored) == (at.b == 0);
        pc = at.a;
        break;
      }
      case Op::kLookBehind: {
        bool found = false;
        if (position > 0) {
          const std::size_t before = utf8::previous(text, position);
          found = sets_[at.a].contains(utf8::decode(text.data() + before).code_point);
        }
        ok = found == (at.b == 0);
        ++pc;
        break;
      }
      case Op::kAtomic:
        ok = match_here(text, pc + 1, position, stack, &position);
        pc = at.a;
        break;
      case Op::kLineStart:  // also after a line end, but not after the one that ends the text
        ok = position == 0 || (position < text.size() && text[position - 1] == '\n');
        ++pc;
        break;
      case Op::kLineEnd:
        ok = position == text.size() || text[position] == '\n';
        ++pc;
        break;
      case Op::kTextStart:
        ok = position == 0;
        ++pc;
        break;
      case Op::kTextEnd:
        ok = position == text.size();
        ++pc;
        break;
      case Op::kMatch:
        *end = position;
        stack.resize(base);
        return true;
    }
    if (ok) continue;

    // Back to the newest choice: an alternative, or a repeat that can give back or take one more.
    for (bool resumed = false; !resumed;) {
      if (stack.size() == base) return false;
      Frame& frame = stack.back();
      resumed = true;
      switch (frame.kind) {
        case Frame::kResume:
          position = frame.position;
          pc = frame.pc;
          stack.pop_back();
          break;
        case Frame::kGiveBack:
          position = frame.position = utf8::previous(text, frame.position);
          pc = frame.pc + 1;
          if (frame.position == frame.lowest) stack.pop_back();
          break;
        case Frame::kTakeMore: {
          const Instruction& repeat = program_[frame.pc];
          std::uint32_t count = 0;
          position = take(text, frame.position, sets_[repeat.a], 1, &count);
          pc = frame.pc + 1;
          frame.position = position;
          resumed = count == 1;
          if (!resumed || ++frame.count == repeat.high) stack.pop_back();
          break;
        }
      }
    }
  }
}

}  // namespace tessera
