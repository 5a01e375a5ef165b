#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "engine/core/config.h"
#include "engine/core/error.h"
#include "engine/core/text.h"

namespace tessera {
namespace {

using Kind = ConfigNode::Kind;

std::string join_path(const std::string& prefix, std::string_view name) {
  return prefix.empty() ? std::string(name) : fmt::format("{}.{}", prefix, name);
}

// The text of a node for a message: what the user wrote, shortened.
std::string shown(const ConfigNode& node) {
  switch (node.kind) {
    case Kind::kNull:
      return "empty";
    case Kind::kSequence:
      return "a list";
    case Kind::kMap:
      return "a map";
    case Kind::kScalar:
      break;
  }
  // Control characters would break the line of the message.
  std::string text;
  for (const char c : node.scalar.substr(0, 60)) {
    text += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  // The cut must not leave half a character.
  if (const std::size_t bad = find_invalid_utf8(text); bad != std::string::npos) text.resize(bad);
  if (node.scalar.size() > 60) text += "...";
  return node.quoted ? fmt::format("the text \"{}\"", text) : text;
}

// What is wrong with a value, to stand behind "run.yaml:3 train.max_steps"; empty if all is well.
using Problem = std::string;

class ValueReader {
 public:
  ValueReader(const ConfigNode& node, const FieldOptions& options) : node_(node), options_(options) {}

  Problem operator()(bool* value) const { return scalar(node_, *value); }
  Problem operator()(std::int64_t* value) const { return scalar(node_, *value); }
  Problem operator()(double* value) const { return scalar(node_, *value); }
  Problem operator()(std::string* value) const { return scalar(node_, *value); }

  template <typename T>
  Problem operator()(std::optional<T>* value) const {
    const bool is_unset_word = node_.kind == Kind::kScalar && !options_.unset_word.empty() &&
                               node_.scalar == options_.unset_word;
    if (node_.kind == Kind::kNull || is_unset_word) {
      value->reset();
      return {};
    }
    T read{};
    Problem problem = scalar(node_, read);
    if (problem.empty()) *value = std::move(read);
    return problem;
  }

  template <typename T>
  Problem operator()(std::vector<T>* value) const {
    std::vector<T> read;
    if (node_.kind == Kind::kMap) return "is a map; write a list, [a, b]";
    if (node_.kind == Kind::kScalar) {
      // One value stands for a list of one.
      if (Problem problem = scalar(node_, read.emplace_back()); !problem.empty()) return problem;
    }
    for (std::size_t i = 0; i < node_.items.size(); ++i) {
      Problem problem = scalar(node_.items[i], read.emplace_back());
      if (!problem.empty()) return fmt::format("has an item (number {}) that {}", i + 1, problem);
    }
    *value = std::move(read);
    return {};
  }

  Problem operator()(std::map<std::string, std::string>* value) const {
    std::map<std::string, std::string> read;
    if (node_.kind == Kind::kScalar || node_.kind == Kind::kSequence) {
      return fmt::format("is {}; write a map, {{name: value}}", shown(node_));
    }
    for (const auto& [key, entry] : node_.entries) {
      std::string text;
      Problem problem = scalar(entry, text);
      if (!problem.empty()) return fmt::format("has an entry {} that {}", key, problem);
      if (!read.emplace(key, std::move(text)).second) {
        return fmt::format("holds {} twice; keep one", key);
      }
    }
    *value = std::move(read);
    return {};
  }

 private:
  std::string words_besides() const {
    return options_.unset_word.empty() ? "" : fmt::format(" or {}", options_.unset_word);
  }

  Problem scalar(const ConfigNode& node, bool& value) const {
    if (node.kind == Kind::kScalar && !node.quoted) {
      if (const auto read = parse_bool(node.scalar)) {
        value = *read;
        return {};
      }
    }
    return fmt::format("is {}; write true, false{}", shown(node), words_besides());
  }

  Problem scalar(const ConfigNode& node, std::int64_t& value) const {
    const auto read = node.kind == Kind::kScalar && !node.quoted ? parse_integer(node.scalar)
                                                                 : std::nullopt;
    if (!read) {
      return fmt::format("is {}; write a whole number{}{}", shown(node), words_besides(),
                         quotes_hint(node, parse_integer(node.scalar).has_value()));
    }
    if (Problem problem = out_of_bounds(node, static_cast<double>(*read)); !problem.empty()) {
      return problem;
    }
    value = *read;
    return {};
  }

  Problem scalar(const ConfigNode& node, double& value) const {
    const auto read = node.kind == Kind::kScalar && !node.quoted ? parse_number(node.scalar)
                                                                 : std::nullopt;
    if (!read) {
      return fmt::format("is {}; write a number{}{}", shown(node), words_besides(),
                         quotes_hint(node, parse_number(node.scalar).has_value()));
    }
    if (Problem problem = out_of_bounds(node, *read); !problem.empty()) return problem;
    value = *read;
    return {};
  }

  Problem scalar(const ConfigNode& node, std::string& value) const {
    if (node.kind != Kind::kScalar) {
      return fmt::format("is {}; write {}{}", shown(node),
                         options_.choices.empty() ? "text" : join_choices(options_.choices),
                         options_.choices.empty() && node.kind == Kind::kMap && !node.entries.empty()
                             ? ", in quotes if it holds \": \" or begins with { or ["
                             : "");
    }
    std::string text = node.scalar;
    for (const auto& [foreign, ours] : options_.value_aliases) {
      if (text == foreign) text = ours;
    }
    const auto& choices = options_.choices;
    if (!choices.empty() && std::find(choices.begin(), choices.end(), text) == choices.end()) {
      const auto nearest = nearest_name(text, choices);
      return fmt::format("is {}; write {}{}", shown(node), join_choices(choices),
                         nearest && choices.size() > 1 ? fmt::format(" (did you mean {}?)", *nearest)
                                                       : "");
    }
    if (options_.is_path) {
      std::string reason;
      const auto expanded = expand_path(text, &reason);
      if (!expanded) return fmt::format("is {}: {}", shown(node), reason);
      text = *expanded;
      if (text.find('\0') != std::string::npos) return "holds a NUL byte; a path cannot";
    }
    if (options_.unit == "duration" && !parse_duration(text)) {
      return fmt::format("is {}; write a duration such as 90s, 10m, 1h30m or 01:30:00", shown(node));
    }
    if (options_.unit == "size" && !parse_bytes(text)) {
      return fmt::format("is {}; write a size such as 512MiB or 40GiB", shown(node));
    }
    value = std::move(text);
    return {};
  }

  static std::string quotes_hint(const ConfigNode& node, bool would_read) {
    return node.kind == Kind::kScalar && node.quoted && would_read ? ", without quotes" : "";
  }

  Problem out_of_bounds(const ConfigNode& node, double number) const {
    const FieldOptions& o = options_;
    if (number >= o.at_least && number <= o.at_most && number > o.above && number < o.below) return {};
    return fmt::format("is {}; it must be {}", shown(node), describe_bounds(o));
  }

  static std::string describe_bounds(const FieldOptions& o) {
    auto number = [](double value) {
      return value == std::floor(value) && std::fabs(value) < 1e15 ? fmt::format("{:.0f}", value)
                                                                   : format_number(value);
    };
    std::vector<std::string> parts;
    if (std::isfinite(o.at_least)) parts.push_back("at least " + number(o.at_least));
    if (std::isfinite(o.above)) parts.push_back("above " + number(o.above));
    if (std::isfinite(o.at_most)) parts.push_back("at most " + number(o.at_most));
    if (std::isfinite(o.below)) parts.push_back("below " + number(o.below));
    return parts.size() == 2 ? parts[0] + " and " + parts[1] : parts.empty() ? "finite" : parts[0];
  }

  const ConfigNode& node_;
  const FieldOptions& options_;
};

// The keys of the whole configuration, for unknown-key messages.
struct KnownKeys {
  std::vector<FieldRecord> records;

  // Names under `section` ("" for the top), aliases included.
  std::vector<std::string> names_in(const std::string& section) const {
    std::vector<std::string> names;
    for (const FieldRecord& record : records) {
      const auto [parent, leaf] = split(record.name);
      if (parent != section) continue;
      names.push_back(leaf);
      names.insert(names.end(), record.options.aliases.begin(), record.options.aliases.end());
    }
    return names;
  }

  // The dotted names elsewhere whose last part or alias is exactly `name`.
  std::vector<std::string> homes_of(std::string_view name) const {
    std::vector<std::string> homes;
    for (const FieldRecord& record : records) {
      const auto& aliases = record.options.aliases;
      if (split(record.name).second == name ||
          std::find(aliases.begin(), aliases.end(), name) != aliases.end()) {
        homes.push_back(record.name);
      }
    }
    return homes;
  }

  // `leaf` may be an alias: the name it stands for.
  std::string canonical(const std::string& section, const std::string& leaf) const {
    for (const FieldRecord& record : records) {
      const auto& aliases = record.options.aliases;
      if (split(record.name).first == section &&
          std::find(aliases.begin(), aliases.end(), leaf) != aliases.end()) {
        return record.name;
      }
    }
    return join_path(section, leaf);
  }

  static std::pair<std::string, std::string> split(const std::string& name) {
    const std::size_t dot = name.rfind('.');
    if (dot == std::string::npos) return {"", name};
    return {name.substr(0, dot), name.substr(dot + 1)};
  }
};

struct Context {
  const KnownKeys& known;
  const std::map<std::string, std::string>& refused;
  ConfigReading& reading;

  void mistake(const ConfigNode& node, std::string text) {
    reading.mistakes.push_back({node.order, fmt::format("{} {}", node.where, text)});
  }
};

// Reads the entries of one map. Made anew for each section and list item.
class ConfigReader final : public FieldVisitor {
 public:
  // `path` names the section in messages, "data.train[1]"; `schema_path` in KnownKeys, "data.train[]".
  ConfigReader(const ConfigNode& map, std::string path, std::string schema_path, Context& context)
      : map_(map), path_(std::move(path)), schema_path_(std::move(schema_path)), context_(context) {}

  // After all fields were visited: whatever no field took is unknown.
  void report_unknown() {
    for (const auto& [key, node] : map_.entries) {
      if (!taken_.contains(key)) report_unknown_key(key, node);
    }
  }

 protected:
  void on_field(const Field& field) override {
    const std::string name = join_path(path_, field.name);
    const ConfigNode* node = take(field.name, field.options.aliases);
    if (node == nullptr) return;
    context_.reading.places[name] = {node->where, node->order};
    const Problem problem = std::visit(ValueReader(*node, field.options), field.value);
    if (problem.empty()) return;
    context_.mistake(*node, fmt::format("{} {}", name, problem));
    context_.reading.unreadable.insert(name);
  }

  void on_section(const char* name, const char*, const VisitMembers& visit) override {
    const std::string path = join_path(path_, name);
    const ConfigNode* node = take(name, {});
    if (node == nullptr || node->kind == Kind::kNull) return;
    if (node->kind != Kind::kMap) {
      context_.mistake(*node, fmt::format("{} is {}; it is a section: write its keys under it, "
                                          "indented", path, shown(*node)));
      return;
    }
    ConfigReader reader(*node, path, join_path(schema_path_, name), context_);
    visit(reader);
    reader.report_unknown();
  }

  void on_list(const char* name, const char*, const FieldOptions& options, std::size_t,
               const ResizeList& resize, const VisitItem& visit_item) override {
    const std::string path = join_path(path_, name);
    const ConfigNode* node = take(name, options.aliases);
    if (node == nullptr) return;
    context_.reading.places[path] = {node->where, node->order};
    if (node->kind == Kind::kNull) {
      resize(0);
      return;
    }
    // One item needs no list around it.
    const std::vector<ConfigNode> single =
        node->kind == Kind::kSequence ? std::vector<ConfigNode>{} : std::vector<ConfigNode>{*node};
    const std::vector<ConfigNode>& items = node->kind == Kind::kSequence ? node->items : single;
    resize(0);
    resize(items.size());
    for (std::size_t i = 0; i < items.size(); ++i) {
      const std::string item_path = fmt::format("{}[{}]", path, i);
      ConfigNode item = items[i];
      if (item.kind == Kind::kScalar && !options.shorthand.empty()) {
        ConfigNode map = item;
        map.kind = Kind::kMap;
        map.scalar.clear();
        map.entries.emplace_back(options.shorthand, std::move(item));
        item = std::move(map);
      }
      if (item.kind != Kind::kMap) {
        context_.mistake(item, fmt::format("{} is {}; write a map of its keys{}", item_path, shown(item),
                                           options.shorthand.empty()
                                               ? ""
                                               : fmt::format(", or just its {}", options.shorthand)));
        context_.reading.unreadable.insert(path);
        continue;
      }
      ConfigReader reader(item, item_path, join_path(schema_path_, name) + "[]", context_);
      visit_item(i, reader);
      reader.report_unknown();
    }
  }

 private:
  // The entry that gives a key under its name or one of its aliases; reports doubled keys.
  const ConfigNode* take(const std::string& name, const std::vector<std::string>& aliases) {
    const ConfigNode* chosen = nullptr;
    const std::string* chosen_key = nullptr;
    for (const auto& [key, node] : map_.entries) {
      if (key != name && std::find(aliases.begin(), aliases.end(), key) == aliases.end()) continue;
      taken_.insert(key);
      if (chosen == nullptr || node.override_rank > chosen->override_rank) {
        chosen = &node;
        chosen_key = &key;
      } else if (node.override_rank == chosen->override_rank) {
        report_double(name, *chosen_key, *chosen, key, node);
      }
    }
    if (chosen != nullptr && *chosen_key != name) {
      context_.reading.notes.push_back(fmt::format("{} {} is read as {}", chosen->where,
                                                   join_path(path_, *chosen_key), join_path(path_, name)));
    }
    return chosen;
  }

  void report_double(const std::string& name, const std::string& first_key, const ConfigNode& first,
                     const std::string& key, const ConfigNode& node) {
    const std::string path = join_path(path_, key);
    if (key == first_key) {
      context_.mistake(node, fmt::format("{} is given twice, first at {}; keep one", path, first.where));
    } else {
      context_.mistake(node, fmt::format("{} and {} ({}) are two names of one key; keep {}", path,
                                         join_path(path_, first_key), first.where,
                                         join_path(path_, name)));
    }
  }

  void report_unknown_key(const std::string& key, const ConfigNode& node) {
    const std::string name = join_path(path_, key);
    // One message for a key that is unknown twice.
    if (!reported_.insert(key).second) return;
    if (const auto found = context_.refused.find(join_path(schema_path_, key));
        found != context_.refused.end()) {
      context_.mistake(node, fmt::format("{} {}", name, found->second));
      return;
    }
    ConfigNode key_node;
    key_node.kind = Kind::kScalar;
    key_node.scalar = name;
    std::string text = path_.empty()
                           ? fmt::format("{} is not a section of the configuration", shown(key_node))
                           : fmt::format("{} is not a key of {}", shown(key_node), path_);
    const KnownKeys& known = context_.known;
    if (const auto [section, leaf] = KnownKeys::split(key); !section.empty()) {
      // "train.max_steps: 10": the notation of messages and --set, used as a key.
      const std::string full = join_path(schema_path_, section);
      const auto names = known.names_in(full);
      if (std::find(names.begin(), names.end(), leaf) != names.end()) {
        context_.reading.unreadable.insert(known.canonical(full, leaf));
        context_.mistake(node, text + fmt::format("; write {} under {}:, indented", leaf, section));
        return;
      }
    }
    const auto homes = known.homes_of(key);
    const auto nearest = nearest_name(key, known.names_in(schema_path_));
    if (nearest && !is_far_fetched(key, *nearest, homes)) {
      const auto canonical = KnownKeys::split(known.canonical(schema_path_, *nearest)).second;
      text += fmt::format("; did you mean {}?", join_path(path_, canonical));
      context_.reading.unreadable.insert(join_path(path_, canonical));
    } else if (!homes.empty()) {
      text += fmt::format("; did you mean {}?", join_choices(homes));
      context_.reading.unreadable.insert(homes.begin(), homes.end());
    } else if (path_.empty()) {
      text += fmt::format("; its sections are {}", fmt::join(known.names_in(""), ", "));
    }
    context_.mistake(node, text);
  }

  // A key that exists elsewhere under exactly this name is rather misplaced than misspelt, unless it
  // is one slip away from a key here.
  static bool is_far_fetched(const std::string& key, const std::string& nearest,
                             const std::vector<std::string>& homes) {
    return !homes.empty() && edit_distance(key, nearest) > 1;
  }

  const ConfigNode& map_;
  std::string path_;
  std::string schema_path_;
  Context& context_;
  std::set<std::string> taken_;
  std::set<std::string> reported_;
};

}  // namespace

ConfigReading collect_config(const ConfigNode& root, const VisitFunction& visit,
                             const std::map<std::string, std::string>& refused) {
  ConfigReading reading;
  const KnownKeys known{describe_fields(visit)};
  Context context{known, refused, reading};
  if (root.kind == Kind::kScalar || root.kind == Kind::kSequence) {
    const bool lacks_space = root.kind == Kind::kScalar && root.scalar.find(':') != std::string::npos;
    context.mistake(root, fmt::format("is {} at the top level; a configuration is a map of sections{}",
                                      shown(root), lacks_space ? ". A space belongs behind the colon" : ""));
    return reading;
  }
  ConfigReader reader(root, "", "", context);
  visit(reader);
  reader.report_unknown();
  return reading;
}

void throw_config_mistakes(std::vector<ConfigMistake> mistakes) {
  if (mistakes.empty()) return;
  std::stable_sort(mistakes.begin(), mistakes.end(),
                   [](const ConfigMistake& a, const ConfigMistake& b) { return a.order < b.order; });
  std::string text;
  for (const ConfigMistake& mistake : mistakes) {
    text += fmt::format("{}[config] {}", text.empty() ? "" : "\n", mistake.text);
  }
  throw Error(ErrorKind::kUser, std::move(text));
}

ConfigReading read_config(const ConfigNode& root, const VisitFunction& visit,
                          const std::map<std::string, std::string>& refused) {
  ConfigReading reading = collect_config(root, visit, refused);
  throw_config_mistakes(std::move(reading.mistakes));
  reading.mistakes.clear();
  return reading;
}

}  // namespace tessera
