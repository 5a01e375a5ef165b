// JSON through nlohmann's SAX interface; the iterator below keeps the line, which SAX does not tell.
#include <nlohmann/json.hpp>

#include <iterator>

#include "engine/core/config_tree.h"
#include "engine/core/error.h"
#include "engine/core/text.h"

namespace tessera {
namespace {

// Line of the last character that is not white space. nlohmann reads one character past a number
// before it reports it; a character directly behind a number is on the number's line.
struct LineCounter {
  std::int64_t current = 1;
  std::int64_t last_token = 1;

  void pass(char c) {
    if (c == '\n') {
      ++current;
    } else if (c != ' ' && c != '\t' && c != '\r') {
      last_token = current;
    }
  }
};

class CountingIterator {
 public:
  using difference_type = std::ptrdiff_t;
  using value_type = char;
  using pointer = const char*;
  using reference = const char&;
  using iterator_category = std::input_iterator_tag;

  CountingIterator(const char* position, LineCounter* lines) : position_(position), lines_(lines) {}

  reference operator*() const { return *position_; }
  CountingIterator& operator++() {
    lines_->pass(*position_);
    ++position_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  friend bool operator==(const CountingIterator& a, const CountingIterator& b) {
    return a.position_ == b.position_;
  }
  friend bool operator!=(const CountingIterator& a, const CountingIterator& b) { return !(a == b); }

 private:
  const char* position_;
  LineCounter* lines_;
};

class JsonEvents final : public nlohmann::json_sax<nlohmann::json> {
 public:
  JsonEvents(ConfigTreeBuilder& builder, const LineCounter& lines, std::string name)
      : builder_(builder), lines_(lines), name_(std::move(name)) {}

  bool null() override {
    builder_.null(lines_.last_token);
    return true;
  }
  bool boolean(bool value) override { return plain(value ? "true" : "false"); }
  bool number_integer(std::int64_t value) override { return plain(std::to_string(value)); }
  bool number_unsigned(std::uint64_t value) override { return plain(std::to_string(value)); }
  bool number_float(double, const std::string& text) override { return plain(text); }
  bool string(std::string& value) override {
    builder_.scalar(lines_.last_token, std::move(value), true);
    return true;
  }
  bool binary(nlohmann::json::binary_t&) override { return false; }
  bool start_object(std::size_t) override { return begin(ConfigNode::Kind::kMap); }
  bool start_array(std::size_t) override { return begin(ConfigNode::Kind::kSequence); }
  bool key(std::string& value) override {
    builder_.scalar(lines_.last_token, std::move(value), true);
    return true;
  }
  bool end_object() override { return end(); }
  bool end_array() override { return end(); }

  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception& error) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 3: syntax error ..."
    std::string_view what = error.what();
    const std::size_t at = what.find("at line ");
    std::size_t line = 0;
    std::size_t column = 0;
    if (at != std::string_view::npos &&
        std::sscanf(what.data() + at, "at line %zu, column %zu", &line, &column) == 2) {
      what.remove_prefix(what.find(": ", at) + 2);
      TESSERA_FAIL(ErrorKind::kUser, "[config] {}:{}:{} is not valid JSON: {}", name_, line, column, what);
    }
    if (const std::size_t bracket = what.find("] "); bracket != std::string_view::npos) {
      what.remove_prefix(bracket + 2);
    }
    TESSERA_FAIL(ErrorKind::kUser, "[config] {}:{} is not valid JSON: {}", name_, lines_.last_token, what);
  }

 private:
  bool plain(std::string text) {
    builder_.scalar(lines_.last_token, std::move(text), false);
    return true;
  }
  bool begin(ConfigNode::Kind kind) {
    builder_.begin(lines_.last_token, kind);
    return true;
  }
  bool end() {
    builder_.end();
    return true;
  }

  ConfigTreeBuilder& builder_;
  const LineCounter& lines_;
  std::string name_;
};

}  // namespace

ConfigNode parse_json_text(std::string_view text, const std::string& name) {
  ConfigTreeBuilder builder(name);
  LineCounter lines;
  JsonEvents events(builder, lines, name);
  nlohmann::json::sax_parse(CountingIterator(text.data(), &lines),
                            CountingIterator(text.data() + text.size(), &lines), &events);
  return builder.take_root();
}

}  // namespace tessera
