#include "data/tokenizer/tokenizer_json.h"

#include <limits>
#include <utility>

#include "engine/core/error.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

// Builds the tree of everything except model.vocab and model.merges.
class Reader final : public nlohmann::json_sax<Json> {
 public:
  Reader(TokenizerJson& out, std::string_view file) : out_(out), file_(file) {}

  bool has_vocabulary() const { return has_vocabulary_; }
  bool has_merges() const { return has_merges_; }

  bool null() override { return value(nullptr); }
  bool boolean(bool v) override { return value(v); }
  bool number_integer(number_integer_t v) override { return value(v); }
  bool number_unsigned(number_unsigned_t v) override {
    if (where_ == Where::kVocabulary && skipped_ == 0) {
      constexpr auto kLargest =
          static_cast<number_unsigned_t>(std::numeric_limits<std::int32_t>::max());
      CHECK_USER(v < kLargest, "[tokenizer] {}: token \"{}\" has the id {}", file_, key_, v);
      out_.model.vocabulary.emplace_back(std::move(key_), static_cast<std::int32_t>(v));
      return true;
    }
    return value(v);
  }
  bool number_float(number_float_t v, const string_t&) override { return value(v); }
  bool string(string_t& v) override {
    if (where_ == Where::kMerges) return merge_text(v);
    return value(std::move(v));
  }
  bool binary(binary_t&) override { return false; }

  bool key(string_t& v) override {
    key_ = std::move(v);
    return true;
  }
  bool start_object(std::size_t) override {
    if (where_ == Where::kTree && is_model_member("vocab")) {
      where_ = Where::kVocabulary;
      has_vocabulary_ = true;
      return true;
    }
    return open(Json::object());
  }
  bool end_object() override {
    if (where_ == Where::kVocabulary && skipped_ == 0) {
      where_ = Where::kTree;
      return true;
    }
    return close();
  }
  bool start_array(std::size_t) override {
    if (where_ == Where::kTree && is_model_member("merges")) {
      where_ = Where::kMerges;
      has_merges_ = true;
      return true;
    }
    if (where_ == Where::kMerges) {
      CHECK_USER(!in_pair_, "[tokenizer] {}: merge {} is nested too deep", file_, num_merges());
      in_pair_ = true;
      pair_.clear();
      return true;
    }
    return open(Json::array());
  }
  bool end_array() override {
    if (where_ != Where::kMerges) return close();
    if (!in_pair_) {
      where_ = Where::kTree;
      return true;
    }
    CHECK_USER(pair_.size() == 2, "[tokenizer] {}: merge {} has {} parts, expected 2", file_,
               num_merges(), pair_.size());
    out_.model.merges.emplace_back(std::move(pair_[0]), std::move(pair_[1]));
    in_pair_ = false;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    TESSERA_FAIL(ErrorKind::kUser, "[tokenizer] {}: not valid JSON at byte {}: {}", file_, position,
                 error.what());
  }

 private:
  enum class Where { kTree, kVocabulary, kMerges };

  std::size_t num_merges() const { return out_.model.merges.size(); }

  // Whether the value that starts now is model.<name>.
  bool is_model_member(std::string_view name) const {
    return stack_.size() == 2 && key_ == name && stack_[0]->is_object() &&
           stack_[0]->contains("model") && stack_[1] == &(*stack_[0])["model"];
  }

  bool merge_text(std::string& text) {
    if (in_pair_) {
      pair_.push_back(std::move(text));
      return true;
    }
    if (text.starts_with("#version")) return true;
    const std::size_t blank = text.find(' ');
    CHECK_USER(blank != std::string::npos && text.find(' ', blank + 1) == std::string::npos,
               "[tokenizer] {}: merge {} is \"{}\", expected two parts with one blank between; use "
               "the form [\"a\", \"b\"] for parts that hold blanks",
               file_, num_merges(), text);
    out_.model.merges.emplace_back(text.substr(0, blank), text.substr(blank + 1));
    return true;
  }

  bool value(Json v) {
    CHECK_USER(where_ == Where::kTree, "[tokenizer] {}: unexpected {} in model.{}", file_, v.dump(),
               where_ == Where::kVocabulary ? "vocab" : "merges");
    place(std::move(v));
    return true;
  }
  bool open(Json container) {
    if (where_ == Where::kVocabulary) ++skipped_;
    CHECK_USER(where_ == Where::kTree, "[tokenizer] {}: a list or object as the id of \"{}\"",
               file_, key_);
    stack_.push_back(place(std::move(container)));
    return true;
  }
  bool close() {
    stack_.pop_back();
    return true;
  }
  Json* place(Json v) {
    if (stack_.empty()) {
      out_.parts = std::move(v);
      return &out_.parts;
    }
    Json& parent = *stack_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(v));
      return &parent.back();
    }
    Json& member = parent[key_];
    member = std::move(v);
    return &member;
  }

  TokenizerJson& out_;
  std::string_view file_;
  Where where_ = Where::kTree;
  std::string key_;
  // Open containers. Pointers stay good: only the innermost one grows while its members are open.
  std::vector<Json*> stack_;
  std::size_t skipped_ = 0;
  bool in_pair_ = false;
  std::vector<std::string> pair_;
  bool has_vocabulary_ = false;
  bool has_merges_ = false;
};

// Reads the small fields of the model and refuses what they ask for in vain.
void read_model_fields(const Json& model, std::string_view file, BpeConfig& config) {
  const auto text = [&](const char* key) -> std::optional<std::string> {
    const auto found = model.find(key);
    if (found == model.end() || found->is_null()) return std::nullopt;
    CHECK_USER(found->is_string(), "[tokenizer] {}: model.{} is {}, expected a string", file, key,
               found->dump());
    return found->get<std::string>();
  };
  const auto flag = [&](const char* key) {
    const auto found = model.find(key);
    if (found == model.end() || found->is_null()) return false;
    CHECK_USER(found->is_boolean(), "[tokenizer] {}: model.{} is {}, expected true or false", file,
               key, found->dump());
    return found->get<bool>();
  };
  config.unk_token = text("unk_token");
  config.continuing_subword_prefix = text("continuing_subword_prefix").value_or("");
  config.end_of_word_suffix = text("end_of_word_suffix").value_or("");
  config.fuse_unk = flag("fuse_unk");
  config.byte_fallback = flag("byte_fallback");
  config.ignore_merges = flag("ignore_merges");
  const auto dropout = model.find("dropout");
  const bool has_dropout = dropout != model.end() && !dropout->is_null() &&
                           !(dropout->is_number() && dropout->get<double>() == 0.0);
  CHECK_USER(!has_dropout,
             "[tokenizer] {}: model.dropout is {}; random merges are not supported, set it to null",
             file, dropout->dump());
}

}  // namespace

const nlohmann::json& TokenizerJson::part(const char* name) const {
  static const Json kNull;
  const auto found = parts.find(name);
  return found == parts.end() ? kNull : *found;
}

TokenizerJson parse_tokenizer_json(std::string_view text, std::string_view file) {
  TokenizerJson result;
  Reader reader(result, file);
  Json::sax_parse(text, &reader);
  CHECK_USER(result.parts.is_object(), "[tokenizer] {}: not a JSON object", file);
  const Json& version = result.part("version");
  CHECK_USER(version.is_null() || version == "1.0", "[tokenizer] {}: version {}, expected \"1.0\"",
             file, version.dump());
  const Json& model = result.part("model");
  CHECK_USER(model.is_object(), "[tokenizer] {}: no \"model\"", file);
  const std::string type = model.contains("type") && model["type"].is_string()
                               ? model["type"].get<std::string>()
                               : std::string("BPE");
  CHECK_USER(type == "BPE", "[tokenizer] {}: model \"{}\" is not supported; BPE tokenizers are",
             file, type);
  CHECK_USER(reader.has_vocabulary() && reader.has_merges(),
             "[tokenizer] {}: the BPE model has no \"{}\"", file,
             reader.has_vocabulary() ? "merges" : "vocab");
  read_model_fields(model, file, result.model);
  return result;
}

}  // namespace tessera
