#include "data/readers/json_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace tessera {
namespace {

constexpr std::size_t kMaxDepth = 512;

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

void append_utf8(std::string& out, std::uint32_t code) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xC0 | (code >> 6));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    out += static_cast<char>(0xE0 | (code >> 12));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | (code >> 18));
    out += static_cast<char>(0x80 | ((code >> 12) & 0x3F));
    out += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  }
}

}  // namespace

char JsonReader::peek() {
  while (next_ < text_.size() && is_blank(text_[next_])) ++next_;
  return next_ < text_.size() ? text_[next_] : '\0';
}

bool JsonReader::consume(char c) {
  if (peek() != c || next_ >= text_.size()) return false;
  ++next_;
  return true;
}

void JsonReader::expect(char c) {
  if (!consume(c)) fail(fmt::format("expected '{}', got {}", c, describe_next()));
}

std::string JsonReader::describe_next() const {
  if (next_ >= text_.size()) return "the end";
  const auto c = static_cast<unsigned char>(text_[next_]);
  if (c < 0x20 || c >= 0x7F) return fmt::format("byte 0x{:02x}", c);
  return fmt::format("'{}'", static_cast<char>(c));
}

std::string JsonReader::read_key(std::vector<std::string>& seen) {
  if (peek() != '"') fail(fmt::format("expected a key in quotes, got {}", describe_next()));
  const std::size_t start = next_;
  std::string key = read_string();
  if (std::find(seen.begin(), seen.end(), key) != seen.end()) {
    throw JsonProblem(start, fmt::format("the key \"{}\" is given twice", key));
  }
  seen.push_back(key);
  return key;
}

std::uint32_t JsonReader::read_hex4() {
  if (next_ + 4 > text_.size()) fail("\\u needs four hexadecimal digits");
  std::uint32_t code = 0;
  for (int i = 0; i < 4; ++i) {
    const char c = text_[next_ + static_cast<std::size_t>(i)];
    std::uint32_t digit = 0;
    if (is_digit(c)) {
      digit = static_cast<std::uint32_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      digit = static_cast<std::uint32_t>(c - 'a' + 10);
    } else if (c >= 'A' && c <= 'F') {
      digit = static_cast<std::uint32_t>(c - 'A' + 10);
    } else {
      fail("\\u needs four hexadecimal digits");
    }
    code = code * 16 + digit;
  }
  next_ += 4;
  return code;
}

std::string JsonReader::read_string() {
  if (peek() != '"') fail(fmt::format("expected a string, got {}", describe_next()));
  const std::size_t start = next_++;
  std::string out;
  while (true) {
    std::size_t run = next_;
    while (run < text_.size() && text_[run] != '"' && text_[run] != '\\' &&
           static_cast<unsigned char>(text_[run]) >= 0x20) {
      ++run;
    }
    out.append(text_.substr(next_, run - next_));
    next_ = run;
    if (next_ >= text_.size()) throw JsonProblem(start, "the string that starts here does not end");
    const char c = text_[next_];
    if (c == '"') {
      ++next_;
      return out;
    }
    if (c != '\\') {
      fail(fmt::format("control character 0x{:02x} in a string, expected an escape such as \\n",
                       static_cast<unsigned char>(c)));
    }
    ++next_;
    if (next_ >= text_.size()) throw JsonProblem(start, "the string that starts here does not end");
    const char escape = text_[next_++];
    switch (escape) {
      case '"':
        out += '"';
        break;
      case '\\':
        out += '\\';
        break;
      case '/':
        out += '/';
        break;
      case 'b':
        out += '\b';
        break;
      case 'f':
        out += '\f';
        break;
      case 'n':
        out += '\n';
        break;
      case 'r':
        out += '\r';
        break;
      case 't':
        out += '\t';
        break;
      case 'u': {
        std::uint32_t code = read_hex4();
        if (code >= 0xD800 && code <= 0xDBFF && text_.substr(next_, 2) == "\\u") {
          const std::size_t back = next_;
          next_ += 2;
          const std::uint32_t low = read_hex4();
          if (low >= 0xDC00 && low <= 0xDFFF) {
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
          } else {
            next_ = back;  // the second escape stands for itself
          }
        }
        if (code >= 0xD800 && code <= 0xDFFF) code = 0xFFFD;
        append_utf8(out, code);
        break;
      }
      default:
        --next_;
        fail(fmt::format("unknown escape \\{}", escape));
    }
  }
}

std::int32_t JsonReader::read_int32() {
  const std::size_t start = next_;
  for (const std::string_view word : {"false", "true"}) {
    if (text_.substr(next_, word.size()) != word) continue;
    next_ += word.size();
    return word == "true" ? 1 : 0;
  }
  bool negative = false;
  if (next_ < text_.size() && text_[next_] == '-') {
    negative = true;
    ++next_;
  }
  const std::size_t digits = next_;
  std::int64_t value = 0;
  while (next_ < text_.size() && is_digit(text_[next_])) {
    if (value <= std::numeric_limits<std::int32_t>::max())
      value = value * 10 + (text_[next_] - '0');
    ++next_;
  }
  const bool more =
      next_ < text_.size() && (text_[next_] == '.' || text_[next_] == 'e' || text_[next_] == 'E');
  if (next_ == digits || more || value > std::numeric_limits<std::int32_t>::max()) {
    next_ = start;
    std::size_t end = start;
    while (end < text_.size() && end < start + 24 && text_[end] != ',' && text_[end] != ']' &&
           !is_blank(text_[end])) {
      ++end;
    }
    fail(fmt::format("expected an integer of at most 32 bits, got {}",
                     text_.substr(start, end - start)));
  }
  return static_cast<std::int32_t>(negative ? -value : value);
}

void JsonReader::read_integers(std::vector<std::int32_t>& out) {
  out.clear();
  if (peek() != '[') fail(fmt::format("expected a list of integers, got {}", describe_next()));
  ++next_;
  if (consume(']')) return;
  do {
    peek();
    out.push_back(read_int32());
  } while (consume(','));
  expect(']');
}

bool JsonReader::consume_null() {
  peek();
  if (text_.substr(next_, 4) != "null") return false;
  next_ += 4;
  return true;
}

void JsonReader::skip_string() {
  const std::size_t start = next_++;
  while (next_ < text_.size()) {
    const char c = text_[next_];
    if (c == '"') {
      ++next_;
      return;
    }
    if (static_cast<unsigned char>(c) < 0x20) {
      fail(fmt::format("control character 0x{:02x} in a string, expected an escape such as \\n",
                       static_cast<unsigned char>(c)));
    }
    next_ += c == '\\' ? 2 : 1;
  }
  throw JsonProblem(start, "the string that starts here does not end");
}

std::string_view JsonReader::skip_value() {
  peek();
  const std::size_t start = next_;
  std::string open;  // the closing brackets that are awaited
  bool key_next = false;
  while (true) {
    const char c = peek();
    if (key_next) {
      if (c != '"') fail(fmt::format("expected a key in quotes, got {}", describe_next()));
      skip_string();
      expect(':');
      key_next = false;
      continue;
    }
    bool opened = false;
    if (c == '{' || c == '[') {
      ++next_;
      if (open.size() >= kMaxDepth) fail(fmt::format("nested deeper than {}", kMaxDepth));
      open += c == '{' ? '}' : ']';
      opened = !consume(open.back());
      if (!opened) open.pop_back();
      key_next = opened && c == '{';
    } else if (c == '"') {
      skip_string();
    } else {
      const std::size_t from = next_;
      while (next_ < text_.size() &&
             (is_digit(text_[next_]) || (text_[next_] >= 'a' && text_[next_] <= 'z') ||
              (text_[next_] >= 'A' && text_[next_] <= 'Z') || text_[next_] == '-' ||
              text_[next_] == '+' || text_[next_] == '.')) {
        ++next_;
      }
      const std::string_view word = text_.substr(from, next_ - from);
      const bool is_number = !word.empty() &&
                             is_digit(word[word[0] == '-' && word.size() > 1 ? 1 : 0]) &&
                             word.find_first_not_of("0123456789+-.eE") == std::string_view::npos;
      if (!is_number && word != "true" && word != "false" && word != "null" && word != "NaN" &&
          word != "Infinity" && word != "-Infinity") {
        next_ = from;
        fail(fmt::format("expected a value, got {}", describe_next()));
      }
    }
    if (opened) continue;
    // After a complete value: close what ends here, or go on behind a comma.
    while (true) {
      if (open.empty()) return text_.substr(start, next_ - start);
      if (consume(',')) {
        key_next = open.back() == '}';
        break;
      }
      expect(open.back());
      open.pop_back();
    }
  }
}

}  // namespace tessera
