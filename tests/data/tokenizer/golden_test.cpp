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

// Kinds B70, B72 and B76 beside the golden files; ids of the reference library (PyPI tokenizers
// 0.23.3).
TEST(GoldenCases, NumbersComposedTextAndFirstBlanks) {
  using Ids = std::vector<std::int32_t>;
  struct Case {
    const char* text;
    Ids llama2, llama3_1, qwen3;
  };
  const Case kCases[] = {
      {"\uff11\uff12\uff13\uff14\uff15",  // full-width digits
       {29871, 31936, 242, 191, 149, 242, 191, 150, 242, 191, 151, 242, 191, 152},
       {20713, 25963, 34617, 46702, 44597},
       {20109, 24918, 33517, 45602, 43497}},
      {"\u0661\u0662\u0663\u0664",  // Arabic-Indic
       {29871, 220, 164, 220, 165, 220, 166, 220, 167},
       {109610, 110546, 117413, 124079},
       {149, 94, 149, 95, 149, 96, 149, 97}},
      {"\u00bd \u00be \u2461\u00b3",  // numbers that are no digits
       {29871, 30226, 29871, 30642, 29871, 229, 148, 164, 30168},
       {27154, 220, 68496, 220, 119560, 44301},
       {26062, 220, 67396, 220, 48312, 94, 43201}},
      {"\U0001d7d8\U0001d7d9",  // mathematical digits
       {29871, 243, 160, 162, 155, 243, 160, 162, 156},
       {57352, 253, 246, 57352, 253, 247},
       {56252, 253, 246, 56252, 253, 247}},
      {"\u0958",  // excluded from composition: NFC takes it apart
       {29871, 227, 168, 155},
       {12906, 246},
       {64704, 5502, 120}},
      {"\u1100\u1161\u11a8",  // jamo of one syllable
       {29871, 228, 135, 131, 228, 136, 164, 228, 137, 171},
       {157, 226, 222, 157, 227, 94, 157, 228, 101},
       {126317}},
      {"\u0344", {29871, 208, 135}, {137, 226}, {136, 230, 53839}},
      {"q\u0307\u0323",  // marks that change places and do not compose
       {3855, 207, 138, 31214},
       {80, 136, 229, 105001},
       {80, 136, 96, 136, 229}},
      {"Hello", {15043}, {9906}, {9707}},
      {" Hello", {29871, 15043}, {22691}, {21927}},
      {"<s>Hello", {1, 15043}, {45147, 80597}, {44047, 79497}},
      {"<s> Hello", {1, 29871, 15043}, {45147, 29, 22691}, {44047, 29, 21927}},
      {"</s> <s>", {2, 259, 1}, {524, 82, 29, 366, 82, 29}, {522, 82, 29, 366, 82, 29}},
      {"a</s>b", {263, 2, 289}, {64, 524, 82, 52507}, {64, 522, 82, 51407}},
  };
  TESSERA_REQUIRE_DATA(llama2, "tokenizers/llama2");
  TESSERA_REQUIRE_DATA(llama3_1, "tokenizers/llama3_1");
  TESSERA_REQUIRE_DATA(qwen3, "tokenizers/qwen3");
  const Tokenizer first = Tokenizer::load(llama2);
  const Tokenizer second = Tokenizer::load(llama3_1);
  const Tokenizer third = Tokenizer::load(qwen3);
  for (const Case& one : kCases) {
    EXPECT_EQ(first.encode(one.text, false), one.llama2) << "llama2: " << one.text;
    EXPECT_EQ(second.encode(one.text, false), one.llama3_1) << "llama3_1: " << one.text;
    EXPECT_EQ(third.encode(one.text, false), one.qwen3) << "qwen3: " << one.text;
  }
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
