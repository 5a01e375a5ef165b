// The golden ids of real tokenizers: awkward strings, and whole files line by line.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <fstream>
#include <sstream>

#include "data/tokenizer/tokenizer.h"
#include "tests/data/tokenizer/sha256.h"
#include "tests/support/test_data.h"

namespace tessera {
namespace {

std::string folder_of(const std::string& tokenizer) {
  return tokenizer == "stories260K" ? "models/stories260K/hf" : "tokenizers/" + tokenizer;
}

std::string read(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return std::move(text).str();
}

class Golden : public ::testing::TestWithParam<const char*> {};

TEST_P(Golden, AwkwardStringsGiveTheReferenceIds) {
  TESSERA_REQUIRE_DATA(folder, folder_of(GetParam()));
  TESSERA_REQUIRE_DATA(golden, std::string("golden/tokens_") + GetParam() + ".jsonl");
  const Tokenizer tokenizer = Tokenizer::load(folder);
  std::ifstream rows(golden);
  std::string line;
  int count = 0;
  while (std::getline(rows, line)) {
    const auto row = nlohmann::json::parse(line);
    const auto text = row["text"].get<std::string>();
    const auto ids = row["ids"].get<std::vector<std::int32_t>>();
    SCOPED_TRACE(row["text"].dump());
    EXPECT_EQ(tokenizer.encode(text, false), ids);
    EXPECT_EQ(tokenizer.encode(text, true),
              row["ids_with_special"].get<std::vector<std::int32_t>>());
    EXPECT_EQ(tokenizer.encode_with_spans(text, {.add_special_tokens = false}).ids, ids);
    EXPECT_EQ(tokenizer.decode(ids, false), row["decoded"].get<std::string>());
    EXPECT_EQ(tokenizer.decode(ids, true), row["decoded_skip_special"].get<std::string>());
    ++count;
  }
  EXPECT_EQ(count, 117);
}

TEST_P(Golden, WholeFilesGiveTheReferenceHash) {
  TESSERA_REQUIRE_DATA(folder, folder_of(GetParam()));
  TESSERA_REQUIRE_DATA(hashes, "golden/token_file_hashes.json");
  const Tokenizer tokenizer = Tokenizer::load(folder);
  int count = 0;
  for (const auto& entry : nlohmann::json::parse(read(hashes))) {
    if (entry["tokenizer"] != GetParam()) continue;
    TESSERA_REQUIRE_DATA(file, entry["file"].get<std::string>());
    SCOPED_TRACE(file.string());
    const std::string text = read(file);
    std::vector<std::string_view> lines;
    for (std::size_t begin = 0; begin <= text.size();) {
      const std::size_t end = std::min(text.find('\n', begin), text.size());
      lines.push_back(std::string_view(text).substr(begin, end - begin));
      begin = end + 1;
    }
    ASSERT_EQ(lines.size(), entry["lines"].get<std::size_t>());
    test::Sha256 hash;
    std::size_t tokens = 0;
    for (const auto& ids : tokenizer.encode_batch(lines, {.add_special_tokens = false}, 2)) {
      tokens += ids.size();
      for (const std::int32_t id : ids) {
        const auto u = static_cast<std::uint32_t>(id);
        const char bytes[4] = {static_cast<char>(u), static_cast<char>(u >> 8),
                               static_cast<char>(u >> 16), static_cast<char>(u >> 24)};
        hash.add({bytes, 4});
      }
    }
    EXPECT_EQ(tokens, entry["tokens"].get<std::size_t>());
    EXPECT_EQ(hash.hex(), entry["sha256_u32le"].get<std::string>());
    ++count;
  }
  EXPECT_EQ(count, 6);
}

INSTANTIATE_TEST_SUITE_P(Tokenizers, Golden,
                         ::testing::Values("llama2", "llama3_1", "mistral_v0_1", "qwen3",
                                           "stories260K", "tiny_bpe_nfc", "tiny_llama3_regex"),
                         [](const auto& info) { return std::string(info.param); });

TEST(GoldenCases, WholeWordIsTakenBeforeMerges) {
  TESSERA_REQUIRE_DATA(folder, "tokenizers/llama3_1");
  const Tokenizer tokenizer = Tokenizer::load(folder);
  EXPECT_EQ(tokenizer.encode(" Việt", false), (std::vector<std::int32_t>{101798}));
  EXPECT_EQ(tokenizer.encode("Việt Nam", false),
            (std::vector<std::int32_t>{36644, 26298, 83, 31074}));
}

TEST(GoldenCases, MergesGoByRankNotFromTheLeft) {
  TESSERA_REQUIRE_DATA(folder, "tokenizers/qwen3");
  const Tokenizer tokenizer = Tokenizer::load(folder);
  std::vector<std::string> tokens;
  for (const std::int32_t id : tokenizer.encode("brutalist", false)) {
    tokens.push_back(*tokenizer.id_to_token(id));
  }
  EXPECT_EQ(tokens, (std::vector<std::string>{"br", "ut", "alist"}));
}

TEST(GoldenCases, ComposedAndDecomposedTextAreOne) {
  TESSERA_REQUIRE_DATA(folder, "tokenizers/qwen3");
  TESSERA_REQUIRE_DATA(llama3, "tokenizers/llama3_1");
  const Tokenizer tokenizer = Tokenizer::load(folder);
  const std::pair<const char*, const char*> kPairs[] = {{"cafe\u0301", "caf\u00e9"},
                                                        {"\u1100\u1161", "\uac00"},
                                                        {"\u212b", "\u00c5"},
                                                        {"s\u0307\u0323", "\u1e69"},
                                                        {"s\u0323\u0307", "\u1e69"}};
  for (const auto& [decomposed, composed] : kPairs) {
    EXPECT_EQ(tokenizer.encode(decomposed, false), tokenizer.encode(composed, false)) << composed;
  }
  EXPECT_NE(tokenizer.encode("\ufb01", false), tokenizer.encode("fi", false));
  const Tokenizer plain = Tokenizer::load(llama3);
  EXPECT_NE(plain.encode("cafe\u0301", false), plain.encode("caf\u00e9", false));
}

TEST(GoldenCases, SpecialTokensAreNamedByTheFilesBeside) {
  TESSERA_REQUIRE_DATA(llama2, "tokenizers/llama2");
  TESSERA_REQUIRE_DATA(qwen3, "tokenizers/qwen3");
  const Tokenizer first = Tokenizer::load(llama2);
  EXPECT_EQ(first.special_ids().bos, 1);
  EXPECT_EQ(first.special_ids().eos, 2);
  EXPECT_EQ(first.special_ids().pad, -1);
  EXPECT_EQ(first.vocab_size(), 32000);
  EXPECT_EQ(std::vector<std::int32_t>(first.prefix_ids().begin(), first.prefix_ids().end()),
            (std::vector<std::int32_t>{1}));
  const Tokenizer second = Tokenizer::load(qwen3);
  EXPECT_EQ(second.special_ids().bos, -1);
  EXPECT_EQ(second.special_ids().eos, second.token_to_id("<|im_end|>"));
  EXPECT_EQ(second.vocab_size(), 151669);
  EXPECT_TRUE(second.prefix_ids().empty());
  EXPECT_TRUE(second.is_special(second.special_ids().eos));
}

// B59: what an embedding needs is known before anything is allocated.
TEST(GoldenCases, ATokenAddedLaterNeedsOneMoreRow) {
  TESSERA_REQUIRE_DATA(folder, "models/stories260K/hf");
  Tokenizer tokenizer = Tokenizer::load(folder);
  EXPECT_EQ(tokenizer.vocab_size(), 512);
  AddedToken token;
  token.content = "<|user|>";
  token.normalized = false;
  token.special = true;
  EXPECT_EQ(tokenizer.add_tokens({{token}}), (std::vector<std::int32_t>{512}));
  EXPECT_EQ(tokenizer.vocab_size(), 513);
  EXPECT_EQ(tokenizer.encode("<|user|>", false), (std::vector<std::int32_t>{512}));
  EXPECT_EQ(tokenizer.id_to_token(512), "<|user|>");
  EXPECT_EQ(tokenizer.id_to_token(513), std::nullopt);
  EXPECT_EQ(tokenizer.id_to_token(-1), std::nullopt);
}

}  // namespace
}  // namespace tessera
