// Configuration structs and how they are read. Each component owns a plain struct with one
//   void visit(FieldVisitor& v) { v.field("learning_rate", learning_rate, "Peak learning rate"); ... }
// listing every key with its default (the member's initial value) and help text. Reading, printing,
// documentation and the changed-configuration check are visitors over that one list.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

// A parsed YAML or JSON value with the place it came from.
struct ConfigNode {
  enum class Kind { kNull, kScalar, kSequence, kMap };
  Kind kind = Kind::kNull;
  std::string scalar;               // text of a scalar, without its quotes
  bool quoted = false;              // "8" in quotes is a string, not a number
  std::vector<ConfigNode> items;    // of a sequence
  // Of a map, in file order. A key that the file gives twice is here twice: read_config reports it.
  std::vector<std::pair<std::string, ConfigNode>> entries;
  std::string where;                // "run.yaml:14": the line of the key, or of the item itself
  std::int64_t order = 0;           // line number, for sorting messages
  std::int64_t override_rank = 0;   // above 0: came from apply_override; the highest wins

  // The first entry of that name; null when there is none or this is not a map.
  const ConfigNode* find(std::string_view key) const;
};

// How a field was declared, beside its name, member and help.
struct FieldOptions {
  std::vector<std::string> aliases = {};  // names that other tools give to the same thing
  std::vector<std::string> choices = {};  // non-empty: the value must be one of these
  // Values that other tools write for one of ours: {"adamw_torch", "adamw"}.
  std::vector<std::pair<std::string, std::string>> value_aliases = {};
  // A word for an unset std::optional, read and written in place of null: "auto".
  std::string unset_word = {};
  std::string unit = {};  // of text: "duration" (90s, 1h30m) or "size" (40GiB); checked when read
  // Bounds of a number, or of every number in a list.
  double at_least = -std::numeric_limits<double>::infinity();
  double at_most = std::numeric_limits<double>::infinity();
  double above = -std::numeric_limits<double>::infinity();
  double below = std::numeric_limits<double>::infinity();
  // May differ from the checkpoint's configuration; of a list, everything in it may.
  bool free_on_resume = false;
  bool is_path = false;         // ~ and ${VAR} expand
  // Of a list of structs: an item written as a plain value sets this field of the item.
  std::string shorthand = {};
};

// The member behind a field. A std::optional member is unset by default.
using FieldRef =
    std::variant<bool*, std::int64_t*, double*, std::string*, std::optional<bool>*,
                 std::optional<std::int64_t>*, std::optional<double>*, std::optional<std::string>*,
                 std::vector<std::string>*, std::vector<double>*,
                 std::map<std::string, std::string>*>;

struct Field {
  const char* name;
  FieldRef value;
  const char* help;
  FieldOptions options;
};

// Visitor over the fields of a config struct.
class FieldVisitor {
 public:
  virtual ~FieldVisitor() = default;

  template <typename T>
  void field(const char* name, T& value, const char* help, FieldOptions options = {}) {
    on_field(Field{name, FieldRef(&value), help, std::move(options)});
  }

  // A nested struct with its own `visit`.
  template <typename Struct>
  void section(const char* name, Struct& value, const char* help) {
    on_section(name, help, [&value](FieldVisitor& v) { value.visit(v); });
  }

  // A list of structs, each visited in turn.
  template <typename Struct>
  void list(const char* name, std::vector<Struct>& value, const char* help,
            FieldOptions options = {}) {
    on_list(name, help, options, value.size(), [&value](std::size_t n) { value.resize(n); },
            [&value](std::size_t i, FieldVisitor& v) { value[i].visit(v); });
  }

 protected:
  using VisitMembers = std::function<void(FieldVisitor&)>;
  using ResizeList = std::function<void(std::size_t)>;
  using VisitItem = std::function<void(std::size_t, FieldVisitor&)>;

  virtual void on_field(const Field& field) = 0;
  virtual void on_section(const char* name, const char* help, const VisitMembers& visit) = 0;
  virtual void on_list(const char* name, const char* help, const FieldOptions& options,
                       std::size_t size, const ResizeList& resize, const VisitItem& visit_item) = 0;
};

// Something that lists its fields.
using VisitFunction = std::function<void(FieldVisitor&)>;

// Parses YAML, or JSON for a name that ends in .json, keeping file:line of every value. The text is
// UTF-8 (a byte order mark is skipped) of at most 16 MiB, 64 levels and 200,000 values. Anchors,
// aliases and merge keys (<<) are resolved. Malformed text, a second document, tags of other
// types and keys that are not plain text are errors of kind kUser that name file:line.
ConfigNode parse_config_file(const std::string& path);
ConfigNode parse_config_text(std::string_view text, const std::string& name);

// "section.key=value" with a YAML value, as given to --set; replaces or adds the entry in `root`.
// "list.0.key=value" reaches into a list that exists. A later override wins over an earlier one and
// over the file, also when they use different names of one key.
void apply_override(ConfigNode& root, std::string_view assignment);

// One mistake, "run.yaml:14 parallel.tensr is not a key of parallel; ...".
struct ConfigMistake {
  std::int64_t order = 0;
  std::string text;
};

// Where a key was given: "run.yaml:14" or "--set", and its place among the messages.
struct ConfigPlace {
  std::string where;
  std::int64_t order = 0;
};

struct ConfigReading {
  std::vector<ConfigMistake> mistakes;
  std::vector<std::string> notes;  // a line for each alias translated to its canonical name
  // Canonical dotted name ("data.train[0].path") -> place, for every key that the file or an override gave.
  std::map<std::string, ConfigPlace> places;
  // Canonical names whose value could not be read, so that later checks do not complain about them.
  std::set<std::string> unreadable;
};

// Reads `root` into the fields listed by `visit`, collecting all mistakes (unknown keys with the
// nearest name, doubled keys, wrong types, values out of choices or bounds). Scalars:
//   true/false, also yes/no and on/off in lower, upper or title case; integers 8, 1_000, 1e9;
//   numbers 0.1, 1e-4; null, ~ or nothing unsets an optional and empties a list.
// `refused` explains known but unavailable keys: {"adapter", "is not available in this version"}.
ConfigReading collect_config(const ConfigNode& root, const VisitFunction& visit,
                             const std::map<std::string, std::string>& refused = {});

// Throws one kUser error with a "[config] ..." line for each mistake, in file order; returns if none.
void throw_config_mistakes(std::vector<ConfigMistake> mistakes);

// collect_config that throws at mistakes.
ConfigReading read_config(const ConfigNode& root, const VisitFunction& visit,
                          const std::map<std::string, std::string>& refused = {});

// The fields as YAML that reads back to the same values; unset optionals are left out.
// `with_help` adds the help as comments and the unset keys commented out.
std::string write_config(const VisitFunction& visit, bool with_help = false);

// A field, a section or a list with its value as one line of YAML.
struct FieldRecord {
  enum class Kind { kField, kSection, kList };
  Kind kind = Kind::kField;
  std::string name;   // dotted: "optimizer.betas", "data.train[0].path"
  std::string type;   // "integer", "number", "true or false", "text", "list of text", ...
  std::string value;  // "" for sections, lists and unset optionals without an unset_word
  std::string help;
  FieldOptions options;
};

// Every field in order of listing, list items included ("data.train[0].path").
std::vector<FieldRecord> list_fields(const VisitFunction& visit);

// The keys that can be written: sections and lists too, with one default item per list
// ("data.train[].path"). Lists that are empty are so again afterwards.
std::vector<FieldRecord> describe_fields(const VisitFunction& visit);

}  // namespace tessera
