#include "engine/train/config_reference.h"

#include <fmt/format.h>

#include <cmath>

#include "engine/core/text.h"
#include "engine/train/availability.h"
#include "engine/train/run_config.h"

namespace tessera {
namespace {

// A bar would end the table's cell.
std::string cell(std::string_view text) {
  std::string result;
  for (const char c : text) result += c == '|' ? std::string("\\|") : std::string(1, c);
  return result;
}

std::string code_list(const std::vector<std::string>& names) {
  std::vector<std::string> quoted;
  for (const std::string& name : names) quoted.push_back(fmt::format("`{}`", name));
  return fmt::format("{}", fmt::join(quoted, ", "));
}

std::string bounds(const FieldOptions& o) {
  auto number = [](double value) {
    return value == std::floor(value) && std::fabs(value) < 1e15 ? fmt::format("{:.0f}", value)
                                                                 : format_number(value);
  };
  std::vector<std::string> parts;
  if (std::isfinite(o.at_least)) parts.push_back("≥ " + number(o.at_least));
  if (std::isfinite(o.above)) parts.push_back("> " + number(o.above));
  if (std::isfinite(o.at_most)) parts.push_back("≤ " + number(o.at_most));
  if (std::isfinite(o.below)) parts.push_back("< " + number(o.below));
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string type_of(const FieldRecord& record) {
  const FieldOptions& o = record.options;
  std::string type = !o.choices.empty()     ? code_list(o.choices)
                     : o.unit.empty()       ? (o.is_path ? "path" : record.type)
                                            : o.unit;
  if (const std::string limits = bounds(o); !limits.empty()) type += " " + limits;
  if (!o.unset_word.empty()) type += fmt::format(" or `{}`", o.unset_word);
  return type;
}

std::string row(const FieldRecord& record, const std::string& key) {
  const FieldOptions& o = record.options;
  std::string meaning = record.help + ".";
  if (!o.aliases.empty()) meaning += fmt::format(" Also read as {}.", code_list(o.aliases));
  if (!o.value_aliases.empty()) {
    std::vector<std::string> pairs;
    for (const auto& [foreign, ours] : o.value_aliases) {
      pairs.push_back(fmt::format("`{}` means `{}`", foreign, ours));
    }
    meaning += fmt::format(" {}.", fmt::join(pairs, ", "));
  }
  if (record.kind == FieldRecord::Kind::kList) {
    return fmt::format("| `{}`{} | list | `[]` | {} |\n", key, o.free_on_resume ? " ○" : "", cell(meaning));
  }
  const std::string value = record.value.empty() ? "" : fmt::format("`{}`", cell(record.value));
  return fmt::format("| `{}`{} | {} | {} | {} |\n", key, o.free_on_resume ? " ○" : "", cell(type_of(record)),
                     value, cell(meaning));
}

std::string unavailable(const std::vector<FieldRecord>& records) {
  std::string text = "\n### Not available in this version\n\nRefused when a configuration is read:\n\n";
  for (const FieldRecord& record : records) {
    std::vector<std::string> refused;
    for (const std::string& choice : record.options.choices) {
      if (is_unavailable(record.name, choice)) refused.push_back(choice);
    }
    if (!refused.empty()) text += fmt::format("- `{}`: {}\n", record.name, code_list(refused));
    if (record.type != "integer" || !record.name.starts_with("parallel.")) continue;
    for (int number = 1; number <= 3; ++number) {
      if (!is_unavailable(record.name, std::to_string(number))) continue;
      text += fmt::format("- `{}` above {}\n", record.name, number - 1);
      break;
    }
  }
  for (const auto& [key, message] : unavailable_keys()) text += fmt::format("- `{}` {}\n", key, message);
  return text;
}

}  // namespace

std::string configuration_reference() {
  RunConfig config;
  const auto records = describe_fields([&config](FieldVisitor& v) { config.visit(v); });
  std::string text;
  std::string section;
  for (const FieldRecord& record : records) {
    const bool is_nested = record.name.find('.') != std::string::npos;
    if (record.kind == FieldRecord::Kind::kSection) {
      if (is_nested) continue;  // its keys say what it is for
      section = record.name;
      text += fmt::format("{}### {}\n\n{}.\n\n| key | type | default | meaning |\n|---|---|---|---|\n",
                          text.empty() ? "" : "\n", section, record.help);
      continue;
    }
    // data.eval takes the same items as data.train.
    if (record.name.starts_with("data.eval[]")) continue;
    text += row(record, record.name.substr(section.size() + 1));
  }
  return text + unavailable(records);
}

}  // namespace tessera
