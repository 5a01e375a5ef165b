#include "data/tokenizer/post_processor.h"

#include <nlohmann/json.hpp>

#include <string>

#include "data/tokenizer/json_fields.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

// ["<s>", 1], as Bert and Roberta write their tokens.
std::int32_t parse_pair_id(const JsonFields& fields, const char* key) {
  const nlohmann::json& value = fields.array(key);
  if (value.size() != 2 || !value[1].is_number_integer()) {
    fields.refuse(std::string("\"") + key + "\" is not [token, id]");
  }
  return value[1].get<std::int32_t>();
}

PostProcessor parse_template(const JsonFields& fields) {
  PostProcessor result;
  const nlohmann::json& tokens = fields.at("special_tokens");
  bool seen_text = false;
  for (const nlohmann::json& piece : fields.array("single")) {
    if (piece.is_object() && piece.contains("Sequence")) {
      const nlohmann::json& sequence = piece["Sequence"];
      if (!sequence.is_object() || sequence.value("id", "") != "A" || seen_text) {
        fields.refuse("its \"single\" template must hold the text A once");
      }
      seen_text = true;
      continue;
    }
    if (!piece.is_object() || !piece.contains("SpecialToken") ||
        !piece["SpecialToken"].is_object()) {
      fields.refuse("a piece that is neither a Sequence nor a SpecialToken");
    }
    const std::string name = piece["SpecialToken"].value("id", "");
    if (!tokens.is_object() || !tokens.contains(name) || !tokens[name].is_object() ||
        !tokens[name].contains("ids")) {
      fields.refuse("\"special_tokens\" does not say what \"" + name + "\" is");
    }
    for (const nlohmann::json& id : tokens[name]["ids"]) {
      if (!id.is_number_integer()) fields.refuse("an id of \"" + name + "\" is not a number");
      (seen_text ? result.suffix : result.prefix).push_back(id.get<std::int32_t>());
    }
  }
  if (!seen_text) fields.refuse("its \"single\" template must hold the text A once");
  return result;
}

}  // namespace

PostProcessor parse_post_processor(const nlohmann::json& spec, std::string_view file) {
  if (spec.is_null()) return {};
  const JsonFields fields(spec, file, "post_processor");
  const std::string& type = fields.type();
  if (type == "TemplateProcessing") return parse_template(fields);
  if (type == "ByteLevel") return {};  // trims offsets; ids stay
  if (type == "BertProcessing" || type == "RobertaProcessing") {
    return {{parse_pair_id(fields, "cls")}, {parse_pair_id(fields, "sep")}};
  }
  if (type == "Sequence") {
    PostProcessor all;
    for (const nlohmann::json& part : fields.array("processors")) {
      // A later processor wraps what the earlier ones made.
      const PostProcessor outer = parse_post_processor(part, file);
      all.prefix.insert(all.prefix.begin(), outer.prefix.begin(), outer.prefix.end());
      all.suffix.insert(all.suffix.end(), outer.suffix.begin(), outer.suffix.end());
    }
    return all;
  }
  fields.refuse_type();
}

}  // namespace tessera
