#include "data/tokenizer/tokenizer_files.h"

#include <nlohmann/json.hpp>

#include <fstream>
#include <sstream>

#include "checkpoint/posix_file.h"
#include "data/tokenizer/byte_alphabet.h"
#include "engine/core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr const char* kTokenizerJson = "tokenizer.json";
constexpr const char* kConfigJson = "tokenizer_config.json";
constexpr const char* kSpecialTokensJson = "special_tokens_map.json";

// What goes along into an export.
constexpr const char* kSideFiles[] = {
    kConfigJson,  kSpecialTokensJson, "added_tokens.json",   "vocab.json",
    "merges.txt", "tokenizer.model",  "chat_template.jinja", "chat_template.json",
};

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  CHECK_USER(in.good(), "[tokenizer] {}: cannot be opened; check the path", path.string());
  std::ostringstream text;
  text << in.rdbuf();
  if (!in.good() && !in.eof()) {
    TESSERA_FAIL(ErrorKind::kTransient, "[tokenizer] {}: reading failed", path.string());
  }
  return std::move(text).str();
}

Json parse_side_file(const TokenizerFiles& files, const char* name) {
  const auto found = files.content.find(name);
  if (found == files.content.end()) return Json::object();
  Json parsed = Json::parse(found->second, nullptr, false);
  const fs::path path = fs::path(files.name).replace_filename(name);
  CHECK_USER(parsed.is_object(), "[tokenizer] {}: not a JSON object", path.string());
  return parsed;
}

bool flag(const Json& token, const char* key, bool fallback) {
  const auto found = token.find(key);
  return found != token.end() && found->is_boolean() ? found->get<bool>() : fallback;
}

// A named token is its text, or an object with the text as "content".
std::optional<std::string> token_name(const Json& config, const char* key) {
  const auto found = config.find(key);
  if (found == config.end()) return std::nullopt;
  if (found->is_string()) return found->get<std::string>();
  if (found->is_object() && found->contains("content") && (*found)["content"].is_string()) {
    return (*found)["content"].get<std::string>();
  }
  return std::nullopt;
}

OrderedJson to_json(const AddedToken& token) {
  return {{"content", token.content},       {"single_word", token.single_word},
          {"lstrip", token.lstrip},         {"rstrip", token.rstrip},
          {"normalized", token.normalized}, {"special", token.special}};
}

}  // namespace

TokenizerFiles read_tokenizer_files(const fs::path& path) {
  TokenizerFiles files;
  const bool is_folder = fs::is_directory(path);
  const fs::path main = is_folder ? path / kTokenizerJson : path;
  if (!fs::exists(main)) {
    CHECK_USER(!is_folder || !fs::exists(path / "tokenizer.model"),
               "[tokenizer] {} holds a tokenizer.model but no tokenizer.json; convert it with "
               "transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...))",
               path.string());
    TESSERA_FAIL(ErrorKind::kUser,
                 "[tokenizer] {} does not exist; give a tokenizer.json or a folder "
                 "that holds one",
                 main.string());
  }
  files.name = main.string();
  files.content[kTokenizerJson] = read_file(main);
  if (is_folder || main.filename() == kTokenizerJson) {
    for (const char* name : kSideFiles) {
      const fs::path side = main.parent_path() / name;
      if (fs::is_regular_file(side)) files.content[name] = read_file(side);
    }
  }
  return files;
}

TokenizerConfig parse_tokenizer_config(const TokenizerFiles& files) {
  TokenizerConfig result;
  const Json config = parse_side_file(files, kConfigJson);
  const Json special = parse_side_file(files, kSpecialTokensJson);
  const auto name = [&](const char* key) {
    auto found = token_name(config, key);
    return found ? found : token_name(special, key);
  };
  result.bos = name("bos_token");
  result.eos = name("eos_token");
  result.pad = name("pad_token");
  result.unk = name("unk_token");
  const auto switch_of = [&](const char* key) -> std::optional<bool> {
    const auto found = config.find(key);
    if (found == config.end() || !found->is_boolean()) return std::nullopt;
    return found->get<bool>();
  };
  result.add_bos = switch_of("add_bos_token");
  result.add_eos = switch_of("add_eos_token");
  if (const auto decoder = config.find("added_tokens_decoder");
      decoder != config.end() && decoder->is_object()) {
    for (const auto& [key, token] : decoder->items()) {
      const bool is_number = !key.empty() && key.size() <= 9 &&
                             key.find_first_not_of("0123456789") == std::string::npos;
      CHECK_USER(
          is_number && token.is_object() && token_name(*decoder, key.c_str()),
          "[tokenizer] {}: added_tokens_decoder has an entry \"{}\" that is not an id with a "
          "token",
          fs::path(files.name).replace_filename(kConfigJson).string(), key);
      AddedToken added;
      added.content = token["content"].get<std::string>();
      added.single_word = flag(token, "single_word", false);
      added.lstrip = flag(token, "lstrip", false);
      added.rstrip = flag(token, "rstrip", false);
      added.special = flag(token, "special", false);
      added.normalized = flag(token, "normalized", !added.special);
      result.added_tokens.emplace_back(std::stoi(key), std::move(added));
    }
    std::sort(result.added_tokens.begin(), result.added_tokens.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
  }
  return result;
}

TokenizerFiles with_added_tokens(const TokenizerFiles& files,
                                 std::span<const std::pair<std::int32_t, AddedToken>> tokens) {
  TokenizerFiles result = files;
  if (tokens.empty()) return result;
  auto main = OrderedJson::parse(result.content.at(kTokenizerJson));
  OrderedJson& list = main["added_tokens"];
  if (!list.is_array()) list = OrderedJson::array();
  const auto config_file = result.content.find(kConfigJson);
  OrderedJson config;
  if (config_file != result.content.end()) config = OrderedJson::parse(config_file->second);
  for (const auto& [id, token] : tokens) {
    OrderedJson entry = {{"id", id}};
    entry.update(to_json(token));
    const auto same_id = [id = id](const OrderedJson& other) {
      return other.value("id", -1) == id;
    };
    const auto found = std::find_if(list.begin(), list.end(), same_id);
    if (found != list.end()) {
      *found = std::move(entry);
    } else {
      list.push_back(std::move(entry));
    }
    if (config.is_object() && config.contains("added_tokens_decoder")) {
      config["added_tokens_decoder"][std::to_string(id)] = to_json(token);
    }
  }
  std::stable_sort(list.begin(), list.end(), [](const OrderedJson& a, const OrderedJson& b) {
    return a.value("id", -1) < b.value("id", -1);
  });
  result.content[kTokenizerJson] = main.dump(2);
  if (config.is_object()) config_file->second = config.dump(2);
  return result;
}

TokenizerFiles byte_tokenizer_files() {
  OrderedJson vocabulary = OrderedJson::object();
  for (int byte = 0; byte < 256; ++byte) {
    vocabulary[ByteAlphabet::instance().text(static_cast<unsigned char>(byte))] = byte;
  }
  OrderedJson added = OrderedJson::array();
  int id = 256;
  for (const char* name : {"<|bos|>", "<|eos|>", "<|pad|>"}) {
    AddedToken token;
    token.content = name;
    token.normalized = false;
    token.special = true;
    OrderedJson entry = {{"id", id++}};
    entry.update(to_json(token));
    added.push_back(std::move(entry));
  }
  const OrderedJson byte_level = {{"type", "ByteLevel"},
                                  {"add_prefix_space", false},
                                  {"trim_offsets", false},
                                  {"use_regex", false}};
  OrderedJson main;
  main["version"] = "1.0";
  main["truncation"] = nullptr;
  main["padding"] = nullptr;
  main["added_tokens"] = std::move(added);
  main["normalizer"] = nullptr;
  main["pre_tokenizer"] = byte_level;
  main["post_processor"] = nullptr;
  main["decoder"] = byte_level;
  main["model"] = {{"type", "BPE"},
                   {"dropout", nullptr},
                   {"unk_token", nullptr},
                   {"continuing_subword_prefix", nullptr},
                   {"end_of_word_suffix", nullptr},
                   {"fuse_unk", false},
                   {"byte_fallback", false},
                   {"ignore_merges", false},
                   {"vocab", std::move(vocabulary)},
                   {"merges", OrderedJson::array()}};
  const OrderedJson config = {{"bos_token", "<|bos|>"},
                              {"eos_token", "<|eos|>"},
                              {"pad_token", "<|pad|>"},
                              {"clean_up_tokenization_spaces", false},
                              {"tokenizer_class", "PreTrainedTokenizerFast"}};
  TokenizerFiles files;
  files.name = "the byte tokenizer";
  files.content[kTokenizerJson] = main.dump(2);
  files.content[kConfigJson] = config.dump(2);
  return files;
}

void write_tokenizer_files(const TokenizerFiles& files, const fs::path& folder) {
  for (const auto& [name, text] : files.content) {
    replace_file(folder / name, text, "tokenizer");
  }
}

}  // namespace tessera
