// Builds a ConfigNode tree from parser events; shared by the YAML and the JSON reader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/config.h"

namespace tessera {

// Events arrive in document order; `line` is 1-based. Throws kUser errors that name file:line when a
// limit is passed or a map key is not plain text.
class ConfigTreeBuilder {
 public:
  static constexpr std::size_t kMaxDepth = 64;
  static constexpr std::size_t kMaxNodes = 200'000;

  explicit ConfigTreeBuilder(std::string file) : file_(std::move(file)) {}

  // `text` is a key when the innermost open container is a map that waits for one.
  void scalar(std::int64_t line, std::string text, bool quoted);
  void null(std::int64_t line);
  void begin(std::int64_t line, ConfigNode::Kind container);
  void end();
  // A finished value: a copy of an anchored one.
  void value(std::int64_t line, const ConfigNode& node);

  // The value finished by the last scalar(), null() or end(); valid until the next event.
  const ConfigNode& last() const { return *last_; }
  bool last_is_key() const { return last_ == nullptr; }
  bool done() const { return open_.empty() && has_root_; }
  ConfigNode take_root() { return std::move(root_); }

  // Merge keys (<<) are a YAML habit; in JSON they are ordinary names.
  void set_merge_keys(bool enabled) { merge_keys_ = enabled; }

  std::string place(std::int64_t line) const;
  [[noreturn]] void fail(std::int64_t line, std::string_view message) const;

 private:
  struct Open {
    ConfigNode node;
    std::string key;  // of the entry whose value comes next
    std::int64_t key_line = 0;
    bool has_key = false;
    bool key_is_merge = false;
    std::vector<ConfigNode> merges;
  };

  bool waits_for_key() const;
  void count(std::int64_t line, std::size_t nodes);
  void deliver(ConfigNode node);
  void merge(Open& open);

  std::string file_;
  bool merge_keys_ = false;
  std::vector<Open> open_;
  ConfigNode root_;
  bool has_root_ = false;
  const ConfigNode* last_ = nullptr;
  std::size_t nodes_ = 0;
};

// Each parses a whole UTF-8 text without byte order mark.
ConfigNode parse_yaml_text(std::string_view text, const std::string& name);
ConfigNode parse_json_text(std::string_view text, const std::string& name);

}  // namespace tessera
