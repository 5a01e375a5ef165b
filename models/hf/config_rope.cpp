// Rope keys of config.json, as transformers 5 standardises them (PreTrainedConfig's
// convert_rope_params_to_dict and standardize_rope_params).
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "engine/core/error.h"
#include "models/hf/config_keys.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array kKinds = {RopeKind::kDefault, RopeKind::kLinear, RopeKind::kDynamic,
                               RopeKind::kLlama3, RopeKind::kYarn};

// Keys of some rope type or other. In a type that does not read them they change nothing, here as
// in transformers.
constexpr std::array<std::string_view, 11> kKeysOfSomeKind = {
    "factor",    "original_max_position_embeddings",
    "beta_fast", "low_freq_factor",
    "beta_slow", "high_freq_factor",
    "mscale",    "attention_factor",
    "truncate",  "mscale_all_dim",
    "finetuned"};

std::string supported_kinds() {
  std::vector<std::string_view> names;
  for (const RopeKind kind : kKinds) names.push_back(name_of(kind));
  return fmt::format("{}", fmt::join(names, ", "));
}

// `rope_type`, or its older spelling `type`; the same must not be said twice differently.
std::optional<std::string> read_kind_name(ConfigKeys& rope) {
  const std::optional<std::string> newer = rope.text("rope_type");
  const std::optional<std::string> older = rope.text("type");
  if (newer && older && *newer != *older) {
    rope.problem(fmt::format("{} is {} but {} is {}", rope.full_name("rope_type"), *newer,
                             rope.full_name("type"), *older));
  }
  return newer ? newer : older;
}

double required_number(ConfigKeys& keys, std::string_view key, RopeKind kind) {
  const bool given = keys.has(key);
  const std::optional<double> value = keys.number(key);
  if (!value && !given) {
    keys.problem(
        fmt::format("{} is missing (rope_type {} needs it)", keys.full_name(key), name_of(kind)));
  } else if (!value) {
    keys.problem(
        fmt::format("{} is null (rope_type {} needs it)", keys.full_name(key), name_of(kind)));
  }
  return value.value_or(1.0);
}

void read_llama3(ConfigKeys& keys, RopeConfig& rope) {
  rope.factor = required_number(keys, "factor", rope.kind);
  rope.low_freq_factor = required_number(keys, "low_freq_factor", rope.kind);
  rope.high_freq_factor = required_number(keys, "high_freq_factor", rope.kind);
}

void read_yarn(ConfigKeys& keys, std::int64_t max_position_embeddings, RopeConfig& rope) {
  const std::optional<double> factor = keys.number("factor");
  if (factor) {
    rope.factor = *factor;
  } else if (rope.original_max_position_embeddings > 0) {
    rope.factor = static_cast<double>(max_position_embeddings) /
                  static_cast<double>(rope.original_max_position_embeddings);
  }
  rope.attention_factor = keys.number("attention_factor");
  rope.mscale = keys.number("mscale");
  rope.mscale_all_dim = keys.number("mscale_all_dim");
  // 0 means "not given" to transformers.
  rope.beta_fast = keys.number("beta_fast").value_or(0.0);
  if (rope.beta_fast == 0.0) rope.beta_fast = 32.0;
  rope.beta_slow = keys.number("beta_slow").value_or(0.0);
  if (rope.beta_slow == 0.0) rope.beta_slow = 1.0;
  rope.truncate = keys.boolean("truncate").value_or(true);
  keys.take("finetuned");  // of the first YaRN models' own code; no formula reads it
}

// The members of rope_scaling or rope_parameters besides theta.
void read_scaling(ConfigKeys& keys, std::optional<std::int64_t> outer_original,
                  std::int64_t max_position_embeddings, RopeConfig& rope) {
  if (rope.kind == RopeKind::kLinear || rope.kind == RopeKind::kDynamic) {
    rope.factor = required_number(keys, "factor", rope.kind);
  }
  // transformers stretches from max_position_embeddings here, whatever else the file says.
  if (rope.kind == RopeKind::kDynamic) {
    rope.original_max_position_embeddings = max_position_embeddings;
  }
  if (rope.kind == RopeKind::kLlama3 || rope.kind == RopeKind::kYarn) {
    const std::optional<std::int64_t> inner = keys.integer("original_max_position_embeddings");
    rope.original_max_position_embeddings =
        outer_original.value_or(inner.value_or(max_position_embeddings));
    if (rope.kind == RopeKind::kLlama3) read_llama3(keys, rope);
    if (rope.kind == RopeKind::kYarn) read_yarn(keys, max_position_embeddings, rope);
  }
}

void check_leftovers(const ConfigKeys& keys, RopeKind kind, std::vector<std::string>& problems,
                     std::vector<std::string>& warnings) {
  for (const std::string& key : keys.unused()) {
    const bool known =
        std::find(kKeysOfSomeKind.begin(), kKeysOfSomeKind.end(), key) != kKeysOfSomeKind.end();
    if (known) {
      warnings.push_back(
          fmt::format("{} has no effect with rope_type {}", keys.full_name(key), name_of(kind)));
    } else {
      problems.push_back(fmt::format("{} is not known; with rope_type {} it cannot be honoured",
                                     keys.full_name(key), name_of(kind)));
    }
  }
}

// The object that holds rope_type, under whichever name; null when the file has none.
const Json* find_scaling(ConfigKeys& keys, std::string& name) {
  const Json* newer = keys.take("rope_parameters");
  const Json* older = keys.take("rope_scaling");
  for (const auto& [value, key] : {std::pair{newer, "rope_parameters"}, {older, "rope_scaling"}}) {
    if (value != nullptr && !value->is_object()) {
      keys.problem(fmt::format("{} is {}, wanted an object", key, brief(*value)));
      return nullptr;
    }
  }
  const bool has_newer = newer != nullptr && !newer->empty();
  const bool has_older = older != nullptr && !older->empty();
  if (has_newer && has_older && *newer != *older) {
    keys.problem("rope_parameters and rope_scaling are both given and differ; keep one");
    return nullptr;
  }
  name = has_newer ? "rope_parameters" : "rope_scaling";
  return has_newer ? newer : has_older ? older : nullptr;
}

}  // namespace

RopeConfig read_rope(ConfigKeys& keys, std::int64_t max_position_embeddings,
                     std::vector<std::string>& problems, std::vector<std::string>& warnings) {
  RopeConfig rope;
  std::optional<double> theta = keys.number("rope_theta");
  const std::optional<double> outer_share = keys.number("partial_rotary_factor");
  const std::optional<std::int64_t> outer_original =
      keys.integer("original_max_position_embeddings");

  std::string name;
  std::optional<double> inner_share;
  if (const Json* scaling = find_scaling(keys, name); scaling != nullptr) {
    ConfigKeys inner(*scaling, name + ".", problems);
    for (const auto& [key, value] : scaling->items()) {
      if (value.is_object()) {
        problems.push_back(
            fmt::format("{}.{} is an object: rope settings per layer type are not "
                        "supported",
                        name, key));
        return rope;
      }
    }
    const std::optional<double> inner_theta = inner.number("rope_theta");
    if (inner_theta && theta && *inner_theta != *theta) {
      problems.push_back(
          fmt::format("rope_theta is {} but {}.rope_theta is {}", *theta, name, *inner_theta));
    }
    if (inner_theta) theta = inner_theta;
    inner_share = inner.number("partial_rotary_factor");

    const std::optional<std::string> kind = read_kind_name(inner);
    if (!kind && name == "rope_scaling") {
      problems.push_back("rope_scaling has no rope_type");
      return rope;
    }
    if (kind) {
      const auto found = std::find_if(kKinds.begin(), kKinds.end(), [&](RopeKind candidate) {
        return name_of(candidate) == *kind;
      });
      if (found == kKinds.end()) {
        problems.push_back(fmt::format("rope_type {} ({}) is not supported; supported are {}",
                                       *kind, name, supported_kinds()));
        return rope;
      }
      rope.kind = *found;
    }
    read_scaling(inner, outer_original, max_position_embeddings, rope);
    check_leftovers(inner, rope.kind, problems, warnings);
  }
  if (outer_original && rope.kind != RopeKind::kLlama3 && rope.kind != RopeKind::kYarn) {
    warnings.push_back(fmt::format(
        "original_max_position_embeddings has no effect with rope_type {}", name_of(rope.kind)));
  }
  rope.theta = theta.value_or(10000.0);
  const double share = inner_share.value_or(outer_share.value_or(1.0));
  if (share != 1.0) {
    problems.push_back(
        fmt::format("partial_rotary_factor is {}; models of this type rotate whole "
                    "heads in transformers, so the result would depend on the reader",
                    share));
  }
  return rope;
}

void write_rope(Json& json, const ModelConfig& model) {
  const RopeConfig& rope = model.rope;
  CHECK_USER(rope.partial_rotary_factor == 1.0,
             "[config] partial_rotary_factor {} cannot be written as model_type {}",
             rope.partial_rotary_factor, name_of(model.architecture));
  const bool newer = json.contains("rope_parameters") && !json["rope_parameters"].is_null();
  Json scaling = Json::object();
  // Before rope_type there was type, with room for nothing but a factor: the one spelling of these
  // two kinds that every release reads.
  const bool older_kind = rope.kind == RopeKind::kLinear || rope.kind == RopeKind::kDynamic;
  scaling[older_kind && !newer ? "type" : "rope_type"] = name_of(rope.kind);
  if (rope.kind != RopeKind::kDefault) scaling["factor"] = rope.factor;
  if (rope.kind == RopeKind::kLlama3) {
    scaling["low_freq_factor"] = rope.low_freq_factor;
    scaling["high_freq_factor"] = rope.high_freq_factor;
  }
  if (rope.kind == RopeKind::kLlama3 || rope.kind == RopeKind::kYarn) {
    scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings;
    if (json.contains("original_max_position_embeddings")) {  // it would win over the inner one
      json["original_max_position_embeddings"] = rope.original_max_position_embeddings;
    }
  }
  if (rope.kind == RopeKind::kYarn) {
    if (rope.attention_factor) scaling["attention_factor"] = *rope.attention_factor;
    if (rope.mscale) scaling["mscale"] = *rope.mscale;
    if (rope.mscale_all_dim) scaling["mscale_all_dim"] = *rope.mscale_all_dim;
    if (rope.beta_fast != 32.0) scaling["beta_fast"] = rope.beta_fast;
    if (rope.beta_slow != 1.0) scaling["beta_slow"] = rope.beta_slow;
    if (!rope.truncate) scaling["truncate"] = false;
  }
  if (newer) {
    scaling["rope_theta"] = rope.theta;
    json["rope_parameters"] = std::move(scaling);
    json.erase("rope_scaling");
    if (json.contains("rope_theta")) json["rope_theta"] = rope.theta;
    return;
  }
  json["rope_theta"] = rope.theta;
  json["rope_scaling"] = rope.kind == RopeKind::kDefault ? Json(nullptr) : std::move(scaling);
}

}  // namespace tessera
