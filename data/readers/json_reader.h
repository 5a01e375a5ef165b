// A pull parser over one JSON value (RFC 8259) held in memory. Records are read field by field
// without building a tree: rows of token ids are most of what passes through here.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// What is wrong and at which byte; whoever knows file and line makes it a message.
struct JsonProblem : std::runtime_error {
  JsonProblem(std::size_t offset, const std::string& what)
      : std::runtime_error(what), offset(offset) {}
  std::size_t offset;
};

class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  // First character of the next value or punctuation, '\0' at the end. Skips blanks.
  char peek();
  bool consume(char c);  // takes the next character if it is `c`
  void expect(char c);
  bool at_end() { return peek() == '\0' && next_ == text_.size(); }

  // Calls on_field(key) with the reader standing at the value, which the callee must read.
  // A key given twice is a problem.
  template <typename OnField>
  void read_object(OnField&& on_field) {
    expect('{');
    std::vector<std::string> keys;
    if (consume('}')) return;
    do {
      std::string key = read_key(keys);
      expect(':');
      on_field(key);
    } while (consume(','));
    expect('}');
  }

  // A lone surrogate (\ud83e) becomes U+FFFD; all other escapes are exact, \u0000 included.
  std::string read_string();

  // [1, 2, 3]; numbers must be integers of at most 32 bits. true and false count as 1 and 0, as
  // some tools write masks.
  void read_integers(std::vector<std::int32_t>& out);

  bool consume_null();

  // The text of the next value, checked for its syntax. Numbers of any size, NaN and Infinity pass.
  std::string_view skip_value();

  std::size_t offset() const { return next_; }

 private:
  std::string read_key(std::vector<std::string>& seen);
  std::int32_t read_int32();
  std::uint32_t read_hex4();
  void skip_string();
  [[noreturn]] void fail(const std::string& what) const { throw JsonProblem(next_, what); }
  std::string describe_next() const;

  std::string_view text_;
  std::size_t next_ = 0;
};

}  // namespace tessera
