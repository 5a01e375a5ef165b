// Reads a pattern and writes the matcher's program (regex.h).
#include <algorithm>
#include <limits>
#include <optional>

#include "data/tokenizer/regex.h"
#include "data/tokenizer/unicode.h"
#include "data/tokenizer/utf8.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

constexpr std::uint32_t kUnbounded = std::numeric_limits<std::uint32_t>::max();

enum class Greed { kGreedy, kLazy, kPossessive };

struct Node {
  enum class Kind {
    kEmpty,
    kLiteral,
    kSet,
    kSequence,
    kAlternatives,
    kRepeat,
    kLookAhead,
    kLookBehind,
    kAtomic,
    kLineStart,
    kLineEnd,
    kTextStart,
    kTextEnd,
  };
  Kind kind = Kind::kEmpty;
  std::string literal;         // kLiteral
  CodePointSet set;            // kSet, kLookBehind
  std::vector<Node> children;  // kSequence, kAlternatives; one for kRepeat, kLookAhead, kAtomic
  std::uint32_t low = 0;       // kRepeat
  std::uint32_t high = 0;
  Greed greed = Greed::kGreedy;
  bool negative = false;  // kLookAhead, kLookBehind
};

// Whether the node can match the empty string.
bool is_nullable(const Node& node) {
  switch (node.kind) {
    case Node::Kind::kLiteral:
    case Node::Kind::kSet:
      return false;
    case Node::Kind::kSequence:
      return std::all_of(node.children.begin(), node.children.end(), is_nullable);
    case Node::Kind::kAlternatives:
      return std::any_of(node.children.begin(), node.children.end(), is_nullable);
    case Node::Kind::kRepeat:
      return node.low == 0 || is_nullable(node.children[0]);
    case Node::Kind::kAtomic:
      return is_nullable(node.children[0]);
    default:
      return true;
  }
}

class Parser {
 public:
  explicit Parser(std::string_view pattern) : pattern_(pattern) {}

  Node parse() {
    Node node = alternatives(false);
    if (!at_end()) refuse("an unmatched ')'");
    return node;
  }

  [[noreturn]] void refuse(std::string_view what) const {
    TESSERA_FAIL(ErrorKind::kUser,
                 "[tokenizer] the pattern {} uses {} (at byte {}), which is not supported",
                 pattern_, what, position_);
  }

 private:
  bool at_end() const { return position_ >= pattern_.size(); }
  bool looking_at(std::string_view text) const {
    return pattern_.substr(position_, text.size()) == text;
  }
  bool accept(std::string_view text) {
    if (!looking_at(text)) return false;
    position_ += text.size();
    return true;
  }
  char32_t next() {
    if (at_end()) refuse("an end in the middle of a construct");
    const utf8::Decoded c = utf8::decode(pattern_.data() + position_);
    position_ += c.length;
    return c.code_point;
  }

  Node alternatives(bool ignore_case) {
    Node node;
    node.kind = Node::Kind::kAlternatives;
    node.children.push_back(sequence(ignore_case));
    while (accept("|")) node.children.push_back(sequence(ignore_case));
    if (node.children.size() == 1) return std::move(node.children[0]);
    return node;
  }

  Node sequence(bool ignore_case) {
    Node node;
    node.kind = Node::Kind::kSequence;
    while (!at_end() && !looking_at("|") && !looking_at(")")) {
      if (accept("(?i)")) {
        // The option holds to the end of the enclosing group, over its alternatives too.
        node.children.push_back(alternatives(true));
        break;
      }
      append(node, quantified(ignore_case), ignore_case);
    }
    return node;
  }

  // Neighbouring literals become one; under (?i:..) they are sets, where pairs of letters that fold
  // together with one code point (ss and the sharp s) would need more.
  void append(Node& sequence, Node item, bool ignore_case) {
    if (ignore_case) check_multi_folds(sequence, item);
    if (item.kind == Node::Kind::kLiteral && !sequence.children.empty() &&
        sequence.children.back().kind == Node::Kind::kLiteral) {
      sequence.children.back().literal += item.literal;
      return;
    }
    sequence.children.push_back(std::move(item));
  }

  void check_multi_folds(const Node& sequence, const Node& item) const {
    if (sequence.children.empty() || item.kind != Node::Kind::kSet) return;
    const Node& before = sequence.children.back();
    if (before.kind != Node::Kind::kSet) return;
    for (const char* pair : {"ss", "st", "ff", "fi", "fl"}) {
      if (before.set.contains(static_cast<unsigned char>(pair[0])) &&
          item.set.contains(static_cast<unsigned char>(pair[1]))) {
        refuse("a case-insensitive pair of letters that one code point can stand for");
      }
    }
  }

  Node quantified(bool ignore_case) {
    Node node = atom(ignore_case);
    for (;;) {
      std::uint32_t low = 0;
      std::uint32_t high = kUnbounded;
      bool is_interval = false;
      if (accept("*")) {
      } else if (accept("+")) {
        low = 1;
      } else if (accept("?")) {
        high = 1;
      } else if (interval(&low, &high)) {
        is_interval = true;
      } else {
        return node;
      }
      Node repeat;
      repeat.kind = Node::Kind::kRepeat;
      repeat.low = low;
      repeat.high = high;
      if (accept("?")) {
        if (is_interval && low == high) refuse("{n}?");
        repeat.greed = Greed::kLazy;
      } else if (!is_interval && accept("+")) {  // after an interval, + is one more repeat
        repeat.greed = Greed::kPossessive;
      }
      if (is_nullable(node)) refuse("a repeat of something that can be empty");
      repeat.children.push_back(std::move(node));
      node = std::move(repeat);
    }
  }

  // {n}, {n,}, {,m}, {n,m}; anything else after { is literal text.
  bool interval(std::uint32_t* low, std::uint32_t* high) {
    if (!looking_at("{")) return false;
    const std::size_t start = position_;
    ++position_;
    const auto number = [this]() -> std::optional<std::uint32_t> {
      std::uint32_t value = 0;
      const std::size_t first = position_;
      while (!at_end() && pattern_[position_] >= '0' && pattern_[position_] <= '9') {
        value = value * 10 + static_cast<std::uint32_t>(pattern_[position_++] - '0');
        if (value > 100000) refuse("a repeat count above 100000");
      }
      if (position_ == first) return std::nullopt;
      return value;
    };
    const auto first = number();
    std::optional<std::uint32_t> second = first;
    const bool has_comma = accept(",");
    if (has_comma) second = number();
    if (!accept("}") || (!first && !second)) {
      position_ = start;
      return false;
    }
    *low = first.value_or(0);
    *high = second.value_or(kUnbounded);
    if (*low > *high) refuse("a repeat whose lower bound is above the upper one");
    return true;
  }

  Node atom(bool ignore_case) {
    if (accept("(")) return group(ignore_case);
    if (accept("[")) return set_node(char_class(ignore_case));
    if (accept("^")) return simple(Node::Kind::kLineStart);
    if (accept("$")) return simple(Node::Kind::kLineEnd);
    if (accept(".")) {
      CodePointSet line_end;
      line_end.add('\n', '\n');
      line_end.complement();
      return set_node(std::move(line_end));
    }
    if (looking_at("*") || looking_at("+") || looking_at("?")) refuse("a repeat of nothing");
    if (accept("\\")) {
      if (accept("A")) return simple(Node::Kind::kTextStart);
      if (accept("z")) return simple(Node::Kind::kTextEnd);
      const bool is_word = looking_at("w") || looking_at("W");
      const bool is_negative = looking_at("W");
      if (auto set = class_escape()) {
        if (is_word) *set = bare_word_set(is_negative);
        return set_node(std::move(*set));
      }
      return literal(char_escape(), ignore_case);
    }
    return literal(next(), ignore_case);
  }

  Node group(bool ignore_case) {
    Node node;
    if (accept("?:")) {
      node = alternatives(ignore_case);
    } else if (accept("?i:")) {
      node = alternatives(true);
    } else if (accept("?-i:")) {
      node = alternatives(false);
    } else if (accept("?=") || looking_at("?!")) {
      node.kind = Node::Kind::kLookAhead;
      node.negative = accept("?!");
      node.children.push_back(alternatives(ignore_case));
    } else if (accept("?<=") || looking_at("?<!")) {
      node.kind = Node::Kind::kLookBehind;
      node.negative = accept("?<!");
      node.set = single_set(alternatives(ignore_case));
    } else if (accept("?>")) {
      node.kind = Node::Kind::kAtomic;
      node.children.push_back(alternatives(ignore_case));
    } else if (looking_at("?")) {
      refuse("a group that starts with (" + std::string(pattern_.substr(position_, 2)));
    } else {
      node = alternatives(ignore_case);  // a capture; what it holds is never asked for
    }
    if (!accept(")")) refuse("an open group");
    return node;
  }

  CodePointSet single_set(const Node& node) const {
    if (node.kind == Node::Kind::kSequence && node.children.size() == 1) {
      return single_set(node.children[0]);
    }
    if (node.kind == Node::Kind::kAlternatives) {
      CodePointSet all;
      for (const Node& child : node.children) all.add(single_set(child));
      return all;
    }
    if (node.kind == Node::Kind::kSet) return node.set;
    if (node.kind == Node::Kind::kLiteral &&
        utf8::sequence_length(node.literal[0]) == node.literal.size()) {
      const char32_t c = utf8::decode(node.literal.data()).code_point;
      CodePointSet set;
      set.add(c, c);
      return set;
    }
    refuse("a look-behind of more than one character");
  }

  static Node simple(Node::Kind kind) {
    Node node;
    node.kind = kind;
    return node;
  }

  static Node set_node(CodePointSet set) {
    Node node;
    node.kind = Node::Kind::kSet;
    node.set = std::move(set);
    return node;
  }

  Node literal(char32_t c, bool ignore_case) const {
    if (ignore_case) {
      CodePointSet set;
      add_folded(set, c);
      return set_node(std::move(set));
    }
    Node node;
    node.kind = Node::Kind::kLiteral;
    node.literal = utf8::encode(c);
    return node;
  }

  // `c` and what folds to it. Two letters of ASCII have a partner beyond it: the long s and the
  // Kelvin sign.
  void add_folded(CodePointSet& set, char32_t c) const {
    if (c >= 0x80) refuse("a case-insensitive character beyond ASCII");
    set.add(c, c);
    const char32_t lower = c | 0x20;
    if (lower < 'a' || lower > 'z') return;
    set.add(lower, lower);
    set.add(lower - 0x20, lower - 0x20);
    if (lower == 's') set.add(0x17F, 0x17F);
    if (lower == 'k') set.add(0x212A, 0x212A);
  }

  // Outside of brackets the engine asks a table of Latin-1 of its own, in which ² ³ ¹ ¼ ½ ¾ are
  // word characters; inside they are not.
  static CodePointSet bare_word_set(bool is_negative) {
    CodePointSet set = regex_word_set();
    for (const auto& [first, last] : {std::pair{0xB2, 0xB3}, {0xB9, 0xB9}, {0xBC, 0xBE}}) {
      set.add(static_cast<char32_t>(first), static_cast<char32_t>(last));
    }
    if (is_negative) set.complement();
    return set;
  }

  // After a backslash: a class such as \s or \p{L}; nothing if it is a character escape.
  std::optional<CodePointSet> class_escape() {
    if (at_end()) refuse("a backslash at the end");
    CodePointSet set;
    switch (pattern_[position_]) {
      case 's':
      case 'S':
        set = category_set(kSpaceMask);
        break;
      case 'd':
      case 'D':
        set = category_set(category_bit(kNd));
        break;
      case 'w':
      case 'W':
        set = regex_word_set();
        break;
      case 'p':
      case 'P':
        return property();
      default:
        return std::nullopt;
    }
    const char letter = pattern_[position_++];
    if (letter == 'S' || letter == 'D' || letter == 'W') set.complement();
    return set;
  }

  CodePointSet property() {
    bool negative = pattern_[position_++] == 'P';
    if (!accept("{")) refuse("\\p without braces");
    if (accept("^")) negative = !negative;
    const std::size_t close = pattern_.find('}', position_);
    if (close == std::string_view::npos) refuse("an open \\p{");
    const std::string_view name = pattern_.substr(position_, close - position_);
    std::optional<CodePointSet> set = property_set(name);
    if (!set) refuse("the property " + std::string(name));
    position_ = close + 1;
    if (negative) set->complement();
    return *set;
  }

  char32_t char_escape() {
    const char32_t c = next();
    switch (c) {
      case 'n':
        return '\n';
      case 'r':
        return '\r';
      case 't':
        return '\t';
      case 'f':
        return '\f';
      case 'v':
        return '\v';
      case 'a':
        return '\a';
      case 'e':
        return 0x1B;
      case 'x':
        if (accept("{")) {
          const char32_t value = hex(1, 8);
          if (!accept("}")) refuse("an open \\x{");
          return value;
        }
        return hex(2, 2);
      case 'u':
        return hex(4, 4);
      default:
        break;
    }
    const bool is_plain =
        c < 0x80 && (c < '0' || (c > '9' && c < 'A') || (c > 'Z' && c < 'a') || c > 'z');
    if (!is_plain) refuse("the escape \\" + utf8::encode(c));
    return c;
  }

  char32_t hex(int least, int most) {
    char32_t value = 0;
    int digits = 0;
    while (digits < most && !at_end() &&
           std::isxdigit(static_cast<unsigned char>(pattern_[position_]))) {
      const char digit = pattern_[position_++];
      value = value * 16 +
              static_cast<char32_t>(digit <= '9' ? digit - '0' : (digit | 0x20) - 'a' + 10);
      ++digits;
    }
    // Two digits above 7F would be one raw byte of a sequence, not a code point.
    if (digits < least || value > 0x10FFFF || (most == 2 && value > 0x7F))
      refuse("this \\x or \\u");
    return value;
  }

  // After '['.
  CodePointSet char_class(bool ignore_case) {
    const bool negative = accept("^");
    CodePointSet set = class_items(ignore_case);
    while (accept("&&")) set.intersect(class_items(ignore_case));
    if (!accept("]")) refuse("an open class");
    if (negative) set.complement();
    return set;
  }

  CodePointSet class_items(bool ignore_case) {
    CodePointSet set;
    bool is_first = true;
    while (!looking_at("]") && !looking_at("&&")) {
      if (at_end()) refuse("an open class");
      if (looking_at("[:")) refuse("a POSIX bracket");
      if (accept("[")) {
        set.add(char_class(ignore_case));
      } else {
        class_item(set, ignore_case);
      }
      is_first = false;
    }
    if (is_first) refuse("an empty class");
    return set;
  }

  void class_item(CodePointSet& set, bool ignore_case) {
    char32_t first;
    if (accept("\\")) {
      if (auto escaped = class_escape()) {
        set.add(*escaped);
        return;
      }
      first = char_escape();
    } else {
      first = next();
    }
    const bool is_range =
        looking_at("-") && position_ + 1 < pattern_.size() && pattern_[position_ + 1] != ']';
    if (!is_range) {
      if (ignore_case) {
        add_folded(set, first);
      } else {
        set.add(first, first);
      }
      return;
    }
    accept("-");
    if (looking_at("[") || looking_at("&&")) refuse("a range that ends in a class");
    if (accept("\\") && class_escape()) refuse("a range that ends in a class");
    const char32_t last = pattern_[position_ - 1] == '\\' ? char_escape() : next();
    if (last < first) refuse("a range that runs backwards");
    if (!ignore_case) {
      set.add(first, last);
      return;
    }
    for (char32_t c = first; c <= last; ++c) add_folded(set, c);
  }

  std::string_view pattern_;
  std::size_t position_ = 0;
};

}  // namespace

class RegexCompiler {
 public:
  RegexCompiler(Regex& regex, const Parser& parser) : regex_(regex), parser_(parser) {}

  void compile(const Node& node) {
    emit(node);
    add(Regex::Op::kMatch);
  }

 private:
  using Op = Regex::Op;

  std::uint32_t here() const { return static_cast<std::uint32_t>(regex_.program_.size()); }

  std::uint32_t add(Op op, std::uint32_t a = 0, std::uint32_t b = 0) {
    if (here() > 100000) parser_.refuse("more than 100000 steps");
    regex_.program_.push_back({op, a, b, 0, 0});
    return here() - 1;
  }

  std::uint32_t add_set(const CodePointSet& set) {
    regex_.sets_.push_back(set);
    return static_cast<std::uint32_t>(regex_.sets_.size() - 1);
  }

  void emit(const Node& node) {
    switch (node.kind) {
      case Node::Kind::kEmpty:
        return;
      case Node::Kind::kLiteral:
        add(Op::kLiteral, static_cast<std::uint32_t>(regex_.literals_.size()),
            static_cast<std::uint32_t>(node.literal.size()));
        regex_.literals_ += node.literal;
        return;
      case Node::Kind::kSet:
        add(Op::kSet, add_set(node.set));
        return;
      case Node::Kind::kSequence:
        for (const Node& child : node.children) emit(child);
        return;
      case Node::Kind::kAlternatives:
        emit_alternatives(node);
        return;
      case Node::Kind::kRepeat:
        emit_repeat(node);
        return;
      case Node::Kind::kLookAhead:
      case Node::Kind::kAtomic: {
        const std::uint32_t start =
            add(node.kind == Node::Kind::kAtomic ? Op::kAtomic : Op::kLookAhead, 0,
                node.negative ? 1 : 0);
        emit(node.children[0]);
        add(Op::kMatch);
        regex_.program_[start].a = here();
        return;
      }
      case Node::Kind::kLookBehind:
        add(Op::kLookBehind, add_set(node.set), node.negative ? 1 : 0);
        return;
      case Node::Kind::kLineStart:
        add(Op::kLineStart);
        return;
      case Node::Kind::kLineEnd:
        add(Op::kLineEnd);
        return;
      case Node::Kind::kTextStart:
        add(Op::kTextStart);
        return;
      case Node::Kind::kTextEnd:
        add(Op::kTextEnd);
        return;
    }
  }

  void emit_alternatives(const Node& node) {
    std::vector<std::uint32_t> jumps;
    for (std::size_t i = 0; i < node.children.size(); ++i) {
      const bool is_last = i + 1 == node.children.size();
      std::uint32_t split = 0;
      if (!is_last) split = add(Op::kSplit, here() + 1);
      emit(node.children[i]);
      if (is_last) break;
      jumps.push_back(add(Op::kJump));
      regex_.program_[split].b = here();
    }
    for (const std::uint32_t jump : jumps) regex_.program_[jump].a = here();
  }

  // The one set that `node` is, if it is one.
  static const CodePointSet* as_set(const Node& node, CodePointSet& storage) {
    if (node.kind == Node::Kind::kSet) return &node.set;
    if (node.kind == Node::Kind::kSequence && node.children.size() == 1) {
      return as_set(node.children[0], storage);
    }
    if (node.kind == Node::Kind::kLiteral &&
        utf8::sequence_length(node.literal[0]) == node.literal.size()) {
      const char32_t c = utf8::decode(node.literal.data()).code_point;
      storage.add(c, c);
      return &storage;
    }
    return nullptr;
  }

  void emit_repeat(const Node& node) {
    const Node& body = node.children[0];
    CodePointSet storage;
    if (const CodePointSet* set = as_set(body, storage)) {
      const Op op = node.greed == Greed::kGreedy ? Op::kRepeatSet
                    : node.greed == Greed::kLazy ? Op::kRepeatSetLazy
                                                 : Op::kRepeatSetPossessive;
      const std::uint32_t at = add(op, add_set(*set));
      regex_.program_[at].low = node.low;
      regex_.program_[at].high = node.high;
      return;
    }
    std::uint32_t atomic = 0;
    if (node.greed == Greed::kPossessive) atomic = add(Op::kAtomic);
    const bool is_lazy = node.greed == Greed::kLazy;
    for (std::uint32_t i = 0; i < node.low; ++i) emit(body);
    if (node.high == kUnbounded) {
      const std::uint32_t split = add(Op::kSplit);
      emit(body);
      add(Op::kJump, split);
      set_choice(split, split + 1, here(), is_lazy);
    } else {
      std::vector<std::uint32_t> splits;
      for (std::uint32_t i = node.low; i < node.high; ++i) {
        splits.push_back(add(Op::kSplit));
        emit(body);
      }
      for (const std::uint32_t split : splits) set_choice(split, split + 1, here(), is_lazy);
    }
    if (node.greed == Greed::kPossessive) {
      add(Op::kMatch);
      regex_.program_[atomic].a = here();
    }
  }

  void set_choice(std::uint32_t split, std::uint32_t more, std::uint32_t done, bool is_lazy) {
    regex_.program_[split].a = is_lazy ? done : more;
    regex_.program_[split].b = is_lazy ? more : done;
  }

  Regex& regex_;
  const Parser& parser_;
};

Regex::Regex(std::string_view pattern) {
  Parser parser(pattern);
  const Node node = parser.parse();
  RegexCompiler(*this, parser).compile(node);
}

}  // namespace tessera
