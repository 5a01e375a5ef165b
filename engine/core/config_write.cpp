#include <fmt/format.h>

#include <algorithm>

#include "engine/core/config.h"
#include "engine/core/text.h"

namespace tessera {
namespace {

bool is_number_like(std::string_view text) {
  // Wider than what we read: other YAML readers take 0x1f, 0o17, 1:30 and .inf for numbers too.
  if (text.empty()) return false;
  const bool starts_like_number = (text[0] >= '0' && text[0] <= '9') || text[0] == '.' ||
                                  text[0] == '+' || text[0] == '-';
  if (!starts_like_number) return false;
  return text.find_first_not_of("0123456789abcdefABCDEFxXoO_+-.:infINFaAnNeE") == std::string_view::npos;
}

bool needs_quotes(std::string_view text, bool in_flow) {
  if (text.empty()) return true;
  if (text.front() == ' ' || text.back() == ' ') return true;
  if (parse_bool(text).has_value() || is_number_like(text)) return true;
  if (text == "~" || text == "null" || text == "Null" || text == "NULL") return true;
  if (text == "y" || text == "Y" || text == "n" || text == "N") return true;  // YAML 1.1 booleans
  // Indicators that cannot begin a plain scalar; ~ and < are safe but read as null or merge alone.
  constexpr std::string_view kIndicators = "-?:,[]{}#&*!|>'\"%@`=<";
  if (kIndicators.find(text.front()) != std::string_view::npos) return true;
  if (text.find(": ") != std::string_view::npos || text.find(" #") != std::string_view::npos) return true;
  if (text.back() == ':') return true;
  if (in_flow && text.find_first_of(",[]{}:") != std::string_view::npos) return true;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) return true;
  }
  // NEL, LINE and PARAGRAPH SEPARATOR end a line in YAML 1.1; a byte order mark is not content.
  for (const std::string_view special : {"\xC2\x85", "\xE2\x80\xA8", "\xE2\x80\xA9", "\xEF\xBB\xBF"}) {
    if (text.find(special) != std::string_view::npos) return true;
  }
  return false;
}

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (c == '\n') {
      result += "\\n";
    } else if (c == '\t') {
      result += "\\t";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else if (text.substr(i, 2) == "\xC2\x85") {
      result += "\\u0085";
      i += 1;
    } else if (text.substr(i, 3) == "\xE2\x80\xA8" || text.substr(i, 3) == "\xE2\x80\xA9") {
      result += text[i + 2] == '\xA8' ? "\\u2028" : "\\u2029";
      i += 2;
    } else if (text.substr(i, 3) == "\xEF\xBB\xBF") {
      result += "\\uFEFF";
      i += 2;
    } else {
      result += c;
    }
  }
  return result + '"';
}

std::string string_text(std::string_view text, bool in_flow = false) {
  return needs_quotes(text, in_flow) ? quoted(text) : std::string(text);
}

// A field's value as one line of YAML; empty for an unset optional without a word for it.
struct ValueWriter {
  const FieldOptions& options;

  std::string operator()(const bool* value) const { return *value ? "true" : "false"; }
  std::string operator()(const std::int64_t* value) const { return std::to_string(*value); }
  std::string operator()(const double* value) const { return format_number(*value); }
  std::string operator()(const std::string* value) const { return string_text(*value); }
  template <typename T>
  std::string operator()(const std::optional<T>* value) const {
    if (!value->has_value()) return options.unset_word;
    const T& held = **value;
    return (*this)(&held);
  }
  std::string operator()(const std::vector<std::string>* value) const {
    return flow(*value, [](const std::string& item) { return string_text(item, true); });
  }
  std::string operator()(const std::vector<double>* value) const {
    return flow(*value, [](double item) { return format_number(item); });
  }
  std::string operator()(const std::map<std::string, std::string>* value) const {
    std::string text;
    for (const auto& [key, item] : *value) {
      text += fmt::format("{}{}: {}", text.empty() ? "" : ", ", string_text(key, true),
                          string_text(item, true));
    }
    return "{" + text + "}";
  }

  template <typename T, typename Print>
  static std::string flow(const std::vector<T>& items, Print print) {
    std::string text;
    for (const T& item : items) text += (text.empty() ? "" : ", ") + print(item);
    return "[" + text + "]";
  }
};

struct TypeName {
  std::string operator()(const bool*) const { return "true or false"; }
  std::string operator()(const std::int64_t*) const { return "integer"; }
  std::string operator()(const double*) const { return "number"; }
  std::string operator()(const std::string*) const { return "text"; }
  template <typename T>
  std::string operator()(const std::optional<T>*) const {
    return (*this)(static_cast<const T*>(nullptr));
  }
  std::string operator()(const std::vector<std::string>*) const { return "list of text"; }
  std::string operator()(const std::vector<double>*) const { return "list of numbers"; }
  std::string operator()(const std::map<std::string, std::string>*) const { return "map of text"; }
};

class ConfigWriter final : public FieldVisitor {
 public:
  ConfigWriter(bool with_help, int indent) : with_help_(with_help), indent_(indent) {}

  std::string text() const { return text_; }

 protected:
  void on_field(const Field& field) override {
    const std::string value = std::visit(ValueWriter{field.options}, field.value);
    if (value.empty() && !with_help_) return;
    const std::string key = value.empty() ? fmt::format("# {}:", field.name)
                                          : fmt::format("{}: {}", field.name, value);
    std::string help = field.help;
    if (!field.options.choices.empty()) {
      help += fmt::format(" ({})", fmt::join(field.options.choices, " | "));
    }
    line(key, help);
  }

  void on_section(const char* name, const char* help, const VisitMembers& visit) override {
    if (with_help_ && indent_ == 0 && !text_.empty()) text_ += "\n";
    ConfigWriter members(with_help_, indent_ + 2);
    visit(members);
    // A section in which nothing is set would read as null; that is what {} says plainly.
    const bool has_key = first_active_line(members.text_) != std::string::npos;
    if (!has_key && !with_help_) return;
    line(fmt::format("{}:{}", name, has_key ? "" : " {}"), help);
    text_ += members.text_;
  }

  void on_list(const char* name, const char* help, const FieldOptions&, std::size_t size,
               const ResizeList&, const VisitItem& visit_item) override {
    if (size == 0) {
      line(fmt::format("{}: []", name), help);
      return;
    }
    line(fmt::format("{}:", name), help);
    for (std::size_t i = 0; i < size; ++i) {
      // The first item shows what the others can hold.
      ConfigWriter item(with_help_ && i == 0, indent_ + 4);
      visit_item(i, item);
      std::string text = item.text();
      const std::size_t first = first_active_line(text);
      const auto dash = static_cast<std::size_t>(indent_ + 2);
      if (first == std::string::npos) {
        text_ += text + std::string(dash, ' ') + "- {}\n";
        continue;
      }
      text[first + dash] = '-';
      text_ += text;
    }
  }

 private:
  static std::vector<std::string> wrap(const std::string& text, std::size_t width) {
    std::vector<std::string> lines;
    std::size_t begin = 0;
    while (text.size() - begin > width) {
      std::size_t cut = text.rfind(' ', begin + width);
      if (cut == std::string::npos || cut <= begin) cut = text.find(' ', begin);
      if (cut == std::string::npos) break;
      lines.push_back(text.substr(begin, cut - begin));
      begin = cut + 1;
    }
    lines.push_back(text.substr(begin));
    return lines;
  }

  // Where the first line that is not a comment begins; npos if there is none.
  static std::size_t first_active_line(const std::string& text) {
    std::size_t begin = 0;
    while (begin < text.size()) {
      const std::size_t content = text.find_first_not_of(' ', begin);
      if (content != std::string::npos && text[content] != '#' && text[content] != '\n') return begin;
      begin = text.find('\n', begin) + 1;
    }
    return std::string::npos;
  }

  void line(const std::string& content, const std::string& help) {
    const std::string indent(static_cast<std::size_t>(indent_), ' ');
    const std::size_t column = std::max<std::size_t>(content.size() + indent.size(), 28);
    if (!with_help_ || help.empty()) {
      text_ += fmt::format("{}{}\n", indent, content);
    } else if (column + help.size() + 4 <= 100) {
      text_ += fmt::format("{}{:<{}}  # {}\n", indent, content, std::max(0, 28 - indent_), help);
    } else {
      for (const std::string& part : wrap(help, 96 - indent.size())) {
        text_ += fmt::format("{}# {}\n", indent, part);
      }
      text_ += fmt::format("{}{}\n", indent, content);
    }
  }

  bool with_help_;
  int indent_;
  std::string text_;
};

class FieldLister final : public FieldVisitor {
 public:
  FieldLister(std::string prefix, bool describe, bool all_free, std::vector<FieldRecord>& records)
      : prefix_(std::move(prefix)), describe_(describe), all_free_(all_free), records_(records) {}

 protected:
  void on_field(const Field& field) override {
    FieldRecord record;
    record.name = prefix_ + field.name;
    record.type = std::visit(TypeName{}, field.value);
    record.value = std::visit(ValueWriter{field.options}, field.value);
    record.help = field.help;
    record.options = field.options;
    record.options.free_on_resume |= all_free_;
    records_.push_back(std::move(record));
  }

  void on_section(const char* name, const char* help, const VisitMembers& visit) override {
    if (describe_) add(FieldRecord::Kind::kSection, name, "section", help, {});
    FieldLister members(prefix_ + name + ".", describe_, all_free_, records_);
    visit(members);
  }

  void on_list(const char* name, const char* help, const FieldOptions& options, std::size_t size,
               const ResizeList& resize, const VisitItem& visit_item) override {
    const bool free = all_free_ || options.free_on_resume;
    if (!describe_) {
      for (std::size_t i = 0; i < size; ++i) {
        FieldLister item(fmt::format("{}{}[{}].", prefix_, name, i), describe_, free, records_);
        visit_item(i, item);
      }
      return;
    }
    add(FieldRecord::Kind::kList, name, "list", help, options);
    if (size == 0) resize(1);
    FieldLister item(fmt::format("{}{}[].", prefix_, name), describe_, free, records_);
    visit_item(0, item);
    if (size == 0) resize(0);
  }

 private:
  void add(FieldRecord::Kind kind, const char* name, const char* type, const char* help,
           const FieldOptions& options) {
    records_.push_back({kind, prefix_ + name, type, "", help, options});
  }

  std::string prefix_;
  bool describe_;
  bool all_free_;  // inside a list that is free on resume
  std::vector<FieldRecord>& records_;
};

}  // namespace

std::string write_config(const VisitFunction& visit, bool with_help) {
  ConfigWriter writer(with_help, 0);
  visit(writer);
  return writer.text();
}

std::vector<FieldRecord> list_fields(const VisitFunction& visit) {
  std::vector<FieldRecord> records;
  FieldLister lister("", false, false, records);
  visit(lister);
  return records;
}

std::vector<FieldRecord> describe_fields(const VisitFunction& visit) {
  std::vector<FieldRecord> records;
  FieldLister lister("", true, false, records);
  visit(lister);
  return records;
}

}  // namespace tessera
