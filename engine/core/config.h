// Configuration structs and how they are read. Each component owns a plain struct with one
//   void visit(FieldVisitor& v) { v.field("learning_rate", learning_rate, "Peak learning rate"); ... }
// listing every key with its default (the member's initial value) and help text. Reading, printing,
// documentation and the changed-config check are visitors over that one list.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// A parsed YAML or JSON value with the place it came from.
struct ConfigNode {
  enum class Kind { kNull, kScalar, kSequence, kMap };
  Kind kind = Kind::kNull;
  std::string scalar;          // text of a scalar, as written (without quotes)
  bool quoted = false;         // "8" in quotes is a string, not a number
  std::vector<ConfigNode> items;                            // of a sequence
  std::vector<std::pair<std::string, ConfigNode>> entries;  // of a map, in file order
  std::string where;           // "run.yaml:14"

  const ConfigNode* find(std::string_view key) const;
};

class FieldVisitor;

// How a field was declared, beside its name, member and help.
struct FieldOptions {
  std::vector<std::string> aliases = {};  // accepted spellings of other tools (docs/configuration.md)
  std::vector<std::string> choices = {};  // non-empty: the value must be one of these
  bool free_on_resume = false;            // may differ from the checkpoint's configuration
  bool is_path = false;                   // ~ and ${VAR} expand
};

// Visitor over the fields of a config struct. Lists of structs are visited element by element.
class FieldVisitor {
 public:
  virtual ~FieldVisitor() = default;

  virtual void field(const char* name, bool& value, const char* help, FieldOptions options = {}) = 0;
  virtual void field(const char* name, std::int64_t& value, const char* help, FieldOptions options = {}) = 0;
  virtual void field(const char* name, double& value, const char* help, FieldOptions options = {}) = 0;
  virtual void field(const char* name, std::string& value, const char* help, FieldOptions options = {}) = 0;
  virtual void field(const char* name, std::optional<bool>& value, const char* help, FieldOptions options = {}) = 0;
  virtual void field(const char* name, std::optional<std::int64_t>& value, const char* help, FieldOptions options = {}) = 0;
  virtual void field(const char* name, std::optional<double>& value, const char* help, FieldOptions options = {}) = 0;
  virtual void field(const char* name, std::optional<std::string>& value, const char* help, FieldOptions options = {}) = 0;
  virtual void field(const char* name, std::vector<std::string>& value, const char* help, FieldOptions options = {}) = 0;
  virtual void field(const char* name, std::vector<double>& value, const char* help, FieldOptions options = {}) = 0;
  virtual void field(const char* name, std::map<std::string, std::string>& value, const char* help,
                     FieldOptions options = {}) = 0;
  // A nested struct: `visit_members` visits its fields.
  virtual void section(const char* name, const char* help, const std::function<void(FieldVisitor&)>& visit_members) = 0;
  // A list of structs: `resize(n)` sets the length, `visit_item(i, v)` visits element i.
  virtual void list(const char* name, const char* help, std::size_t size,
                    const std::function<void(std::size_t)>& resize,
                    const std::function<void(std::size_t, FieldVisitor&)>& visit_item,
                    FieldOptions options = {}) = 0;
};

// Something that lists its fields.
using VisitFunction = std::function<void(FieldVisitor&)>;

// Parses YAML (a superset of JSON; *.json files are parsed as JSON) keeping file:line of every value.
// Doubled keys, anchors with cycles and malformed text are errors of kind kUser with file:line.
ConfigNode parse_config_file(const std::string& path);
ConfigNode parse_config_text(std::string_view text, const std::string& name);

// "section.key=value" with a YAML value, as given to --set; replaces or adds the entry in `root`.
void apply_override(ConfigNode& root, std::string_view assignment);

// Reads `root` into the fields listed by `visit`. All mistakes (unknown keys with the nearest name,
// wrong types, values out of choices, a key given under two names) are reported in one Error.
// `notes`, when given, receives a line for each alias that was translated to its canonical name.
void read_config(const ConfigNode& root, const VisitFunction& visit, std::vector<std::string>* notes = nullptr);

// The fields as commented YAML; `with_help` adds the help text as comments.
std::string write_config(const VisitFunction& visit, bool with_help = false);

// Every field as (dotted name, value as YAML text, free_on_resume), in order of listing.
struct FieldRecord {
  std::string name;
  std::string value;
  std::string help;
  FieldOptions options;
};
std::vector<FieldRecord> list_fields(const VisitFunction& visit);

}  // namespace tessera
