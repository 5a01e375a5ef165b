// Small tokenizers written as JSON, and a folder to put files in.
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <string>
#include <utility>
#include <vector>

#include "data/tokenizer/byte_alphabet.h"
#include "data/tokenizer/tokenizer.h"
#include "tests/data/data_test_support.h"

namespace tessera::test {

using Json = nlohmann::ordered_json;

// The message of the kUser error that `call` throws; fails the test if it throws none.
template <typename Call>
std::string user_error(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return {};
}

// A tokenizer.json around a BPE model. Fields are changed in place before it is loaded.
class TokenizerSpec {
 public:
  // Ids in the order given; merges as "a b".
  TokenizerSpec(const std::vector<std::string>& tokens, const std::vector<std::string>& merges) {
    json = {{"version", "1.0"},          {"truncation", nullptr},
            {"padding", nullptr},        {"added_tokens", Json::array()},
            {"normalizer", nullptr},     {"pre_tokenizer", nullptr},
            {"post_processor", nullptr}, {"decoder", nullptr}};
    Json vocabulary = Json::object();
    int id = 0;
    for (const std::string& token : tokens) vocabulary[token] = id++;
    json["model"] = {{"type", "BPE"}, {"vocab", std::move(vocabulary)}, {"merges", merges}};
  }

  // The 256 bytes, then `tokens`, with a ByteLevel pre-tokenizer and decoder.
  static TokenizerSpec byte_level(const std::vector<std::string>& tokens = {},
                                  const std::vector<std::string>& merges = {}) {
    std::vector<std::string> all;
    for (int byte = 0; byte < 256; ++byte) {
      all.push_back(ByteAlphabet::instance().text(static_cast<unsigned char>(byte)));
    }
    all.insert(all.end(), tokens.begin(), tokens.end());
    TokenizerSpec spec(all, merges);
    spec.json["pre_tokenizer"] = {{"type", "ByteLevel"},
                                  {"add_prefix_space", false},
                                  {"trim_offsets", false},
                                  {"use_regex", false}};
    spec.json["decoder"] = spec.json["pre_tokenizer"];
    return spec;
  }

  TokenizerSpec& add(int id, const std::string& content, const Json& flags = Json::object()) {
    Json token = {{"id", id},        {"content", content}, {"single_word", false},
                  {"lstrip", false}, {"rstrip", false},    {"normalized", false},
                  {"special", false}};
    token.update(flags);
    json["added_tokens"].push_back(token);
    return *this;
  }

  Tokenizer load() const {
    const ScratchFolder folder;
    return Tokenizer::load(folder.write("tokenizer.json", json.dump()));
  }

  Json json;
};

// Texts of the tokens, for readable comparisons.
inline std::vector<std::string> tokens_of(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<std::string> tokens;
  for (const std::int32_t id : tokenizer.encode(text, false)) {
    tokens.push_back(tokenizer.id_to_token(id).value_or("?"));
  }
  return tokens;
}

}  // namespace tessera::test
