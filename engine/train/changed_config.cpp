// The rules that a resumed run keeps its configuration, except for free keys and those allowed by name, and that all
// ranks have the same.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include <nlohmann/json.hpp>

#include "engine/core/error.h"
#include "engine/core/text.h"
#include "engine/train/run_config.h"
#include "parallel/control/control_plane.h"

namespace tessera {
namespace {

std::vector<FieldRecord> fields_of(const RunConfig& config) {
  RunConfig copy = config;
  return list_fields([&copy](FieldVisitor& v) { copy.visit(v); });
}

// "data" covers "data.train[0].path"; "data.train[0]" and "data.train" do, too.
bool covers(const std::string& allowed, const std::string& name) {
  if (!name.starts_with(allowed)) return false;
  return name.size() == allowed.size() || name[allowed.size()] == '.' || name[allowed.size()] == '[';
}

// "runs/sft" -> "runs/sft-2", "runs/sft-2" -> "runs/sft-3": the first that does not exist.
std::string next_run_dir(const std::string& dir) {
  std::string stem = dir;
  while (stem.size() > 1 && stem.back() == '/') stem.pop_back();
  std::int64_t number = 1;
  if (const std::size_t dash = stem.rfind('-'); dash != std::string::npos && dash > 0) {
    if (const auto found = parse_integer(std::string_view(stem).substr(dash + 1)); found && *found > 0 && *found < 100'000) {
      number = *found;
      stem.resize(dash);
    }
  }
  while (true) {
    std::string candidate = fmt::format("{}-{}", stem, ++number);
    std::error_code status;
    if (!std::filesystem::exists(candidate, status)) return candidate;
  }
}

std::string shown(const std::string& value) { return value.empty() ? "unset" : value; }

}  // namespace

std::vector<ChangedKey> changed_keys(const RunConfig& saved, const RunConfig& now) {
  const std::vector<FieldRecord> before = fields_of(saved);
  const std::vector<FieldRecord> after = fields_of(now);
  auto find = [](const std::vector<FieldRecord>& fields, const std::string& name) {
    const auto found = std::find_if(fields.begin(), fields.end(),
                                    [&name](const FieldRecord& field) { return field.name == name; });
    return found == fields.end() ? std::string() : found->value;
  };
  std::vector<ChangedKey> changed;
  for (const FieldRecord& field : after) {
    if (field.options.free_on_resume) continue;
    const std::string old_value = find(before, field.name);
    if (old_value != field.value) {
      changed.push_back({field.name, shown(old_value), shown(field.value)});
    }
  }
  // Items of lists that are gone.
  for (const FieldRecord& field : before) {
    const bool is_known = std::any_of(after.begin(), after.end(), [&field](const FieldRecord& other) {
      return other.name == field.name;
    });
    if (!is_known && !field.options.free_on_resume && !field.value.empty()) {
      changed.push_back({field.name, field.value, "unset"});
    }
  }
  return changed;
}

void check_resumable(const RunConfig& saved, const RunConfig& now, std::int64_t saved_step,
                     const std::vector<std::string>& allowed) {
  std::vector<ChangedKey> changed = changed_keys(saved, now);
  RunConfig schema = now;
  const auto known = describe_fields([&schema](FieldVisitor& v) { schema.visit(v); });
  for (const std::string& name : allowed) {
    std::string generic = name;  // data.train[3].path -> data.train[].path
    for (std::size_t open = generic.find('['); open != std::string::npos; open = generic.find('[', open + 1)) {
      const std::size_t close = generic.find(']', open);
      if (close != std::string::npos) generic.erase(open + 1, close - open - 1);
    }
    if (generic.ends_with("[]")) generic.resize(generic.size() - 2);
    std::vector<std::string> names;
    for (const FieldRecord& record : known) names.push_back(record.name);
    if (std::find(names.begin(), names.end(), generic) == names.end()) {
      const auto nearest = nearest_name(generic, names);
      TESSERA_FAIL(ErrorKind::kUser, "[resume] --allow-change {} is not a key of the configuration{}", name,
                   nearest ? fmt::format("; did you mean {}?", *nearest) : "");
    }
    std::erase_if(changed, [&name](const ChangedKey& key) { return covers(name, key.name); });
  }
  if (changed.empty()) return;

  const std::string dir = now.run.dir.value_or("runs/run");
  std::string with;
  std::string flags;
  for (const ChangedKey& key : changed) {
    if (changed.size() == 1) {
      with = fmt::format("{} {}; the config says {}", key.name, key.saved, key.now);
    } else {
      with += fmt::format("{}{} {} (the config says {})", with.empty() ? "" : ", ", key.name, key.saved, key.now);
    }
    flags += fmt::format(" --allow-change {}", key.name);
  }
  TESSERA_FAIL(ErrorKind::kUser,
               "[resume] {} holds step {} with {}. Continue:{}. Start anew: --set run.dir={}.", dir,
               saved_step, with, flags, next_run_dir(dir));
}

void check_ranks_agree(const RunConfig& config, ControlPlane& control, double timeout_seconds) {
  if (control.world_size() == 1) return;
  using Values = std::map<std::string, std::string>;
  Values own;
  for (const FieldRecord& field : fields_of(config)) {
    if (field.kind == FieldRecord::Kind::kField) own[field.name] = field.value;
  }
  for (const char* name : {"data.cache_dir", "checkpoint.local_dir"}) own.erase(name);
  const std::string first = control.broadcast(
      "configuration", control.rank() == 0 ? nlohmann::json(own).dump() : "", 0, timeout_seconds);
  const auto of_first = nlohmann::json::parse(first).get<Values>();
  if (own == of_first) return;
  Values names = own;
  names.insert(of_first.begin(), of_first.end());
  for (const auto& [name, ignored] : names) {
    const auto value = [&name = name](const Values& values) {
      const auto found = values.find(name);
      return shown(found == values.end() ? "" : found->second);
    };
    if (value(own) == value(of_first)) continue;
    TESSERA_FAIL(ErrorKind::kUser,
                 "[config] rank {} was started with {} {}, rank 0 with {}; start every rank with the same "
                 "configuration and options",
                 control.rank(), name, value(own), value(of_first));
  }
}

}  // namespace tessera
