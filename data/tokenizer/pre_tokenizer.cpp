#include "data/tokenizer/pre_tokenizer.h"

#include <nlohmann/json.hpp>

#include <algorithm>

#include "data/tokenizer/byte_alphabet.h"
#include "data/tokenizer/json_fields.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

SplitBehavior parse_behavior(const JsonFields& fields, const char* key) {
  const std::string name = fields.string(key);
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  fields.refuse("unknown behavior \"" + name + "\"");
}

// The one code point of a field such as Metaspace's "replacement".
std::string parse_character(const JsonFields& fields, const char* key) {
  std::string text = fields.string(key);
  if (text.empty() || utf8::sequence_length(text[0]) != text.size()) {
    fields.refuse(std::string("\"") + key + "\" is not one character");
  }
  return text;
}

}  // namespace

PreTokenizer::PreTokenizer() = default;
PreTokenizer::PreTokenizer(const nlohmann::json& spec, std::string_view file) {
  add_stages(spec, file);
}

void PreTokenizer::add_stages(const nlohmann::json& spec, std::string_view file) {
  if (spec.is_null()) return;
  const JsonFields fields(spec, file, "pre_tokenizer");
  const std::string& type = fields.type();
  Stage stage;
  if (type == "Sequence") {
    for (const nlohmann::json& part : fields.array("pretokenizers")) add_stages(part, file);
    return;
  }
  if (type == "Split") {
    stage.pattern = std::make_shared<const SplitPattern>(fields.pattern("pattern"));
    stage.behavior = parse_behavior(fields, "behavior");
    stage.is_inverted = fields.boolean("invert");
  } else if (type == "ByteLevel") {
    stage.kind = Stage::Kind::kByteLevel;
    stage.adds_prefix_space = fields.boolean("add_prefix_space");
    stage.uses_pattern = fields.boolean("use_regex", true);
    if (stage.uses_pattern) {
      stage.pattern = std::make_shared<const SplitPattern>(SplitPattern::from_regex(kGpt2Pattern));
    }
  } else if (type == "Metaspace") {
    stage.kind = Stage::Kind::kMetaspace;
    stage.replacement = parse_character(fields, "replacement");
    stage.splits = fields.boolean("split", true);
    const std::string scheme =
        fields.has("prepend_scheme") ? fields.string("prepend_scheme") : "always";
    if (scheme == "always") {
      stage.prepend = Stage::Prepend::kAlways;
    } else if (scheme == "first") {
      stage.prepend = Stage::Prepend::kFirst;
    } else if (scheme != "never") {
      fields.refuse("unknown prepend_scheme \"" + scheme + "\"");
    }
    // Files from before prepend_scheme have add_prefix_space alone.
    if (!fields.boolean("add_prefix_space", true)) {
      if (fields.has("prepend_scheme") && scheme != "never") {
        fields.refuse("add_prefix_space is false but prepend_scheme is \"" + scheme + "\"");
      }
      stage.prepend = Stage::Prepend::kNever;
    }
  } else if (type == "Digits") {
    stage.kind = Stage::Kind::kSplitCodePoints;
    stage.set = numeric_set();
    stage.behavior =
        fields.boolean("individual_digits") ? SplitBehavior::kIsolated : SplitBehavior::kContiguous;
  } else if (type == "Punctuation") {
    stage.kind = Stage::Kind::kSplitCodePoints;
    stage.set = punctuation_set();
    if (fields.has("behavior")) stage.behavior = parse_behavior(fields, "behavior");
  } else if (type == "Whitespace") {
    stage.kind = Stage::Kind::kWords;
    stage.set = word_set();
  } else if (type == "WhitespaceSplit") {
    stage.kind = Stage::Kind::kSplitCodePoints;
    stage.set = category_set(kSpaceMask);
    stage.behavior = SplitBehavior::kRemoved;
  } else if (type == "CharDelimiterSplit" || type == "Delimiter") {
    stage.pattern = std::make_shared<const SplitPattern>(
        SplitPattern::from_literal(parse_character(fields, "delimiter")));
    stage.behavior = SplitBehavior::kRemoved;
  } else if (type == "BertPreTokenizer") {
    stage.kind = Stage::Kind::kSplitCodePoints;
    stage.set = category_set(kSpaceMask);
    stage.behavior = SplitBehavior::kRemoved;
    stages_.push_back(stage);
    stage.set = punctuation_set();
    stage.behavior = SplitBehavior::kIsolated;
  } else if (type == "FixedLength") {
    stage.kind = Stage::Kind::kFixedLength;
    stage.length = fields.has("length") ? fields.count("length") : 5;
    if (stage.length == 0) fields.refuse("a length of 0");
  } else {
    fields.refuse_type();
  }
  stages_.push_back(std::move(stage));
}

bool PreTokenizer::ends_in_byte_level() const {
  const auto is_byte_level = [](const Stage& stage) {
    return stage.kind == Stage::Kind::kByteLevel;
  };
  return !stages_.empty() && is_byte_level(stages_.back()) &&
         std::count_if(stages_.begin(), stages_.end(), is_byte_level) == 1;
}

void PreTokenizer::keep_bytes() {
  CHECK(ends_in_byte_level(), "[tokenizer] keep_bytes without a ByteLevel stage at the end");
  stages_.back().spells_bytes = false;
  if (!stages_.back().uses_pattern && !stages_.back().adds_prefix_space) stages_.pop_back();
}

bool PreTokenizer::needs_origin(bool has_normalizer) const {
  bool is_hidden = has_normalizer;
  for (const Stage& stage : stages_) {
    if (stage.kind == Stage::Kind::kMetaspace) {
      if (stage.prepend == Stage::Prepend::kFirst && is_hidden) return true;
      is_hidden = true;
    }
    is_hidden = is_hidden || stage.kind == Stage::Kind::kByteLevel;
  }
  return false;
}

bool PreTokenizer::needs_utf8() const {
  return std::any_of(stages_.begin(), stages_.end(), [](const Stage& stage) {
    return stage.kind != Stage::Kind::kByteLevel || stage.uses_pattern;
  });
}

void PreTokenizer::walk_rest(std::size_t stage, const TextView& piece, bool keep_origin,
                             Scratch& scratch, WordSink& sink) const {
  if (stage + 1 == stages_.size()) {
    stages_[stage].apply(piece, keep_origin, scratch[stage], sink);
    return;
  }
  const auto next = [&](const TextView& word) {
    if (!word.text.empty()) walk_rest(stage + 1, word, keep_origin, scratch, sink);
  };
  stages_[stage].apply(piece, keep_origin, scratch[stage], next);
}

void PreTokenizer::Stage::spell_bytes(const TextView& word, TextBuffer& to) {
  const ByteAlphabet& alphabet = ByteAlphabet::instance();
  for (std::size_t i = 0; i < word.text.size();) {
    // Every byte of a character belongs to all of it.
    const std::size_t end = std::min(word.text.size(), i + utf8::sequence_length(word.text[i]));
    const TextSpan span = word.origin_of(i, end);
    for (; i < end; ++i) to.put(alphabet.text(static_cast<unsigned char>(word.text[i])), span);
  }
}

}  // namespace tessera
