// YAML through yaml-cpp's events: its nodes lose doubled keys, anchors and line numbers.
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <map>
#include <set>
#include <sstream>

#include "engine/core/config_tree.h"
#include "engine/core/error.h"
#include "engine/core/text.h"

namespace tessera {
namespace {

class YamlEvents final : public YAML::EventHandler {
 public:
  YamlEvents(ConfigTreeBuilder& builder, std::int64_t first_line)
      : builder_(builder), first_line_(first_line) {}

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    builder_.null(line_of(mark));
    remember(anchor);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const std::int64_t line = line_of(mark);
    const auto found = anchored_.find(anchor);
    if (found == anchored_.end()) builder_.fail(line, "has an alias inside the value it stands for");
    builder_.value(line, found->second);
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    const std::int64_t line = line_of(mark);
    // yaml-cpp gives "!" for quoted and block scalars and "?" for plain ones.
    const bool is_text = tag == "!" || tag == "tag:yaml.org,2002:str";
    static const std::set<std::string> kPlainTags = {
        "?", "", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:bool"};
    if (!is_text && !kPlainTags.contains(tag)) refuse_tag(line, tag);
    // yaml-cpp turns these two escapes into single bytes that are not UTF-8.
    if (find_invalid_utf8(value) != std::string_view::npos) {
      builder_.fail(line, "has the escape \\N or \\_; write \\u0085 or \\u00a0");
    }
    builder_.scalar(line, value, is_text);
    remember(anchor, &value, is_text);
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    begin(mark, tag, "tag:yaml.org,2002:seq", anchor, ConfigNode::Kind::kSequence);
  }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    begin(mark, tag, "tag:yaml.org,2002:map", anchor, ConfigNode::Kind::kMap);
  }
  void OnSequenceEnd() override { end(); }
  void OnMapEnd() override { end(); }

 private:
  std::int64_t line_of(const YAML::Mark& mark) const { return mark.line + first_line_; }

  [[noreturn]] void refuse_tag(std::int64_t line, const std::string& tag) {
    builder_.fail(line, fmt::format("has the tag {}, which has no meaning here; leave it out", tag));
  }

  void begin(const YAML::Mark& mark, const std::string& tag, std::string_view standard_tag,
             YAML::anchor_t anchor, ConfigNode::Kind kind) {
    const std::int64_t line = line_of(mark);
    if (tag != "?" && tag != "!" && !tag.empty() && tag != standard_tag) refuse_tag(line, tag);
    builder_.begin(line, kind);
    open_anchors_.push_back(anchor);
  }

  void end() {
    const YAML::anchor_t anchor = open_anchors_.back();
    open_anchors_.pop_back();
    builder_.end();
    remember(anchor);
  }

  void remember(YAML::anchor_t anchor, const std::string* key = nullptr, bool key_is_quoted = false) {
    if (anchor == YAML::NullAnchor) return;
    if (!builder_.last_is_key()) {
      anchored_[anchor] = builder_.last();
    } else if (key != nullptr) {
      ConfigNode node;
      node.kind = ConfigNode::Kind::kScalar;
      node.scalar = *key;
      node.quoted = key_is_quoted;
      anchored_[anchor] = node;
    }
  }

  ConfigTreeBuilder& builder_;
  std::int64_t first_line_;
  std::map<YAML::anchor_t, ConfigNode> anchored_;
  std::vector<YAML::anchor_t> open_anchors_;
};

std::string_view line_at(std::string_view text, std::int64_t line) {
  for (; line > 0; --line) {
    const std::size_t end = text.find('\n');
    if (end == std::string_view::npos) return {};
    text.remove_prefix(end + 1);
  }
  return text.substr(0, text.find('\n'));
}

// yaml-cpp's message in words for someone who does not know its grammar.
std::string explain(const std::string& message) {
  namespace msg = YAML::ErrorMsg;
  static const std::map<std::string, std::string> kWords = {
      {msg::EOF_IN_SCALAR, "a quote that was opened is never closed"},
      {msg::END_OF_MAP, "this is not a \"key: value\" of the section above it"},
      {msg::END_OF_SEQ, "this is not a \"- item\" of the list above it"},
      {msg::END_OF_SEQ_FLOW, "a list opened with [ is not closed with ]"},
      {msg::END_OF_MAP_FLOW, "a map opened with { is not closed with }"},
      {msg::MAP_VALUE, "no value can begin with this \":\"; check the indentation, and put a value that "
                       "holds \": \" in quotes"},
      {msg::UNKNOWN_TOKEN, "no value can begin with this character; put it in quotes"},
  };
  const auto found = kWords.find(message);
  return found == kWords.end() ? message : found->second;
}

bool is_tab_indented(std::string_view line) {
  const std::size_t content = line.find_first_not_of(" \t");
  return line.substr(0, content).find('\t') != std::string_view::npos;
}

}  // namespace

ConfigNode parse_yaml_text(std::string_view text, const std::string& name) {
  ConfigTreeBuilder builder(name);
  builder.set_merge_keys(true);
  // Without the comment, yaml-cpp takes a quote that is still open behind the last newline for closed.
  std::istringstream stream{fmt::format("{}\n#", text)};
  try {
    YAML::Parser parser(stream);
    YamlEvents events(builder, 1);
    if (!parser.HandleNextDocument(events)) return {};

    // One document a file; a trailing "---" or "..." with nothing behind it is harmless.
    ConfigTreeBuilder rest(name);
    YamlEvents rest_events(rest, 1);
    while (parser.HandleNextDocument(rest_events)) {
      const ConfigNode extra = rest.take_root();
      if (extra.kind != ConfigNode::Kind::kNull) {
        rest.fail(extra.order, "begins a second document; a file holds one. If no --- was meant to "
                               "stand above it, look at the indentation");
      }
    }
  } catch (const YAML::Exception& error) {
    const std::int64_t line = error.mark.is_null() ? 0 : error.mark.line;
    const std::int64_t column = error.mark.is_null() ? 0 : error.mark.column;
    std::string hint;
    // yaml-cpp often complains about the token behind the bad line.
    if (is_tab_indented(line_at(text, line)) || (line > 0 && is_tab_indented(line_at(text, line - 1)))) {
      hint = "; indent with spaces, YAML allows no tabs there";
    }
    TESSERA_FAIL(ErrorKind::kUser, "[config] {}:{}:{} is not valid YAML: {}{}", name, line + 1,
                 column + 1, explain(error.msg), hint);
  }
  return builder.take_root();
}

}  // namespace tessera
