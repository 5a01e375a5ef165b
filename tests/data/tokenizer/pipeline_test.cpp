// Pre-tokenizers, normalizers, post-processors and decoders of small hand-made files.
#include <gtest/gtest.h>

#include "tests/data/tokenizer/tokenizer_test_support.h"

namespace tessera {
namespace {

using test::Json;
using test::TokenizerSpec;
using test::tokens_of;
using Texts = std::vector<std::string>;

// A file whose tokens are single characters and words that merges build.
TokenizerSpec words() {
  return TokenizerSpec({"<unk>", "▁", "a", "b", "H", "i", "ab", "▁a", "▁ab", "Hi", "▁Hi"},
                       {"a b", "▁ ab", "▁ a", "H i", "▁ Hi"});
}

Json metaspace(const std::string& scheme, bool split = true) {
  return {
      {"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", scheme}, {"split", split}};
}

// B76: where the blank before a text comes from is the file's business.
TEST(Metaspace, PrependSchemeDecidesAboutTheFirstBlank) {
  TokenizerSpec spec = words();
  spec.json["model"]["unk_token"] = "<unk>";
  spec.add(0, "<unk>", {{"special", true}});
  spec.json["pre_tokenizer"] = metaspace("never");
  EXPECT_EQ(tokens_of(spec.load(), "Hi"), (Texts{"Hi"}));
  EXPECT_EQ(tokens_of(spec.load(), " Hi"), (Texts{"▁Hi"}));
  spec.json["pre_tokenizer"] = metaspace("always");
  EXPECT_EQ(tokens_of(spec.load(), "Hi"), (Texts{"▁Hi"}));
  EXPECT_EQ(tokens_of(spec.load(), " Hi"), (Texts{"▁Hi"}));
  EXPECT_EQ(tokens_of(spec.load(), "<unk>Hi"), (Texts{"<unk>", "▁Hi"}));
  spec.json["pre_tokenizer"] = metaspace("first");
  EXPECT_EQ(tokens_of(spec.load(), "Hi<unk>Hi"), (Texts{"▁Hi", "<unk>", "Hi"}));
  EXPECT_EQ(tokens_of(spec.load(), "<unk>Hi"), (Texts{"<unk>", "Hi"}));
}

TEST(Metaspace, FirstLooksAtTheOriginalEvenBehindANormalizer) {
  TokenizerSpec spec = words();
  spec.add(0, "<unk>", {{"special", true}});
  spec.json["normalizer"] = {{"type", "Strip"}, {"strip_left", true}, {"strip_right", true}};
  spec.json["pre_tokenizer"] = metaspace("first");
  EXPECT_EQ(tokens_of(spec.load(), "Hi"), (Texts{"▁Hi"}));
  EXPECT_EQ(tokens_of(spec.load(), " Hi"), (Texts{"Hi"}));  // it began at byte 1
  EXPECT_EQ(tokens_of(spec.load(), "<unk> Hi"), (Texts{"<unk>", "Hi"}));
}

// What a normalizer takes away whole has no words, whoever puts blanks before them.
TEST(PreTokenizer, NothingComesOfATextThatANormalizerEmptied) {
  TokenizerSpec spec = words();
  spec.json["normalizer"] = {{"type", "Strip"}, {"strip_left", true}, {"strip_right", true}};
  spec.json["pre_tokenizer"] = metaspace("always");
  EXPECT_EQ(tokens_of(spec.load(), " \n "), (Texts{}));
  EXPECT_EQ(tokens_of(spec.load(), ""), (Texts{}));
  spec.json["normalizer"] = {{"type", "StripAccents"}};
  EXPECT_EQ(tokens_of(spec.load(), "\u0356\u0346"), (Texts{}));
  spec.json["pre_tokenizer"] = {
      {"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", false}};
  EXPECT_EQ(tokens_of(spec.load(), "\u0356\u0346"), (Texts{}));
}

TEST(Metaspace, OldFilesSayAddPrefixSpace) {
  TokenizerSpec spec = words();
  spec.json["pre_tokenizer"] = {
      {"type", "Metaspace"}, {"replacement", "▁"}, {"add_prefix_space", false}};
  EXPECT_NE(test::user_error([&] {
              spec.json["pre_tokenizer"]["prepend_scheme"] = "always";
              spec.load();
            }).find("add_prefix_space"),
            std::string::npos);
  spec.json["pre_tokenizer"].erase("prepend_scheme");
  EXPECT_EQ(tokens_of(spec.load(), "Hi"), (Texts{"Hi"}));
}

TEST(PreTokenizer, SplitBehavioursShareOutTheMatches) {
  const auto pieces = [](const char* behavior, bool invert) {
    // Without merges across words, ids show the words: each word becomes one token or <unk> parts.
    TokenizerSpec spec({"a", "-", "b", "a-", "-b", "--", "a-b", "-a", "b-"},
                       {"a -", "- b", "- -", "- a", "b -"});
    spec.json["pre_tokenizer"] = {{"type", "Split"},
                                  {"pattern", {{"String", "-"}}},
                                  {"behavior", behavior},
                                  {"invert", invert}};
    return tokens_of(spec.load(), "a--b");
  };
  EXPECT_EQ(pieces("Isolated", false), (Texts{"a", "-", "-", "b"}));
  EXPECT_EQ(pieces("Removed", false), (Texts{"a", "b"}));
  EXPECT_EQ(pieces("Removed", true), (Texts{"-", "-"}));
  EXPECT_EQ(pieces("MergedWithPrevious", false), (Texts{"a-", "-", "b"}));
  EXPECT_EQ(pieces("MergedWithNext", false), (Texts{"a", "-", "-b"}));
  EXPECT_EQ(pieces("Contiguous", false), (Texts{"a", "--", "b"}));
}

TEST(PreTokenizer, ByteLevelTakesThePatternOfGpt2AndAPrefixBlank) {
  TokenizerSpec spec = TokenizerSpec::byte_level({"Ġa", "aa", "'s"}, {"Ġ a", "a a", "' s"});
  spec.json["pre_tokenizer"]["use_regex"] = true;
  EXPECT_EQ(tokens_of(spec.load(), "aa a's"), (Texts{"aa", "Ġa", "'s"}));
  spec.json["pre_tokenizer"]["add_prefix_space"] = true;
  EXPECT_EQ(tokens_of(spec.load(), "aa"), (Texts{"Ġa", "a"}));
}

TEST(PreTokenizer, StagesAfterByteLevelSeeItsAlphabet) {
  TokenizerSpec spec = TokenizerSpec::byte_level({"ab", "ĠĠ"}, {"a b", "Ġ Ġ"});
  const Json byte_level = spec.json["pre_tokenizer"];
  spec.json["pre_tokenizer"] = {{"type", "Sequence"},
                                {"pretokenizers",
                                 {byte_level,
                                  {{"type", "Split"},
                                   {"pattern", {{"String", "Ġ"}}},
                                   {"behavior", "Isolated"},
                                   {"invert", false}}}}};
  EXPECT_EQ(tokens_of(spec.load(), "ab  ab"), (Texts{"ab", "Ġ", "Ġ", "ab"}));
}

TEST(PreTokenizer, DigitsPunctuationAndBlanks) {
  TokenizerSpec spec({"1", "2", "a", "!", "?", "12", "!?", "a1", "a!"},
                     {"1 2", "! ?", "a 1", "a !"});
  spec.json["pre_tokenizer"] = {{"type", "Digits"}, {"individual_digits", true}};
  EXPECT_EQ(tokens_of(spec.load(), "a12"), (Texts{"a", "1", "2"}));
  spec.json["pre_tokenizer"]["individual_digits"] = false;
  EXPECT_EQ(tokens_of(spec.load(), "a12"), (Texts{"a", "12"}));
  spec.json["pre_tokenizer"] = {{"type", "Punctuation"}, {"behavior", "Contiguous"}};
  EXPECT_EQ(tokens_of(spec.load(), "a!?"), (Texts{"a", "!?"}));
  spec.json["pre_tokenizer"] = {{"type", "Whitespace"}};
  EXPECT_EQ(tokens_of(spec.load(), " a1 !?"), (Texts{"a1", "!?"}));
  spec.json["pre_tokenizer"] = {{"type", "WhitespaceSplit"}};
  EXPECT_EQ(tokens_of(spec.load(), "a! 12"), (Texts{"a!", "12"}));
}

TEST(Normalizer, StepsRunInOrder) {
  TokenizerSpec spec({"▁", "a", "b", "ab", "▁ab"}, {"a b", "▁ ab"});
  spec.json["normalizer"] = {
      {"type", "Sequence"},
      {"normalizers",
       {{{"type", "Lowercase"}},
        {{"type", "Strip"}, {"strip_left", false}, {"strip_right", true}},
        {{"type", "Prepend"}, {"prepend", "▁"}},
        {{"type", "Replace"}, {"pattern", {{"Regex", " +"}}}, {"content", "▁"}}}}};
  EXPECT_EQ(tokens_of(spec.load(), "AB   Ab  "), (Texts{"▁ab", "▁ab"}));
  EXPECT_EQ(tokens_of(spec.load(), ""), Texts{});
}

TEST(Normalizer, UnicodeForms) {
  TokenizerSpec spec({"f", "i", "\u00e9", "e", "\u0301", "\ufb01"}, {});
  const auto with = [&](const char* form) {
    spec.json["normalizer"] = {{"type", form}};
    return tokens_of(spec.load(), "\ufb01\u00e9e\u0301");
  };
  EXPECT_EQ(with("NFC"), (Texts{"\ufb01", "\u00e9", "\u00e9"}));
  EXPECT_EQ(with("NFD"), (Texts{"\ufb01", "e", "\u0301", "e", "\u0301"}));
  EXPECT_EQ(with("NFKC"), (Texts{"f", "i", "\u00e9", "\u00e9"}));
  EXPECT_EQ(with("NFKD"), (Texts{"f", "i", "e", "\u0301", "e", "\u0301"}));
}

// The reference library's tables stop at Unicode 9: younger characters stay as they are.
TEST(Normalizer, YoungerCharactersAreLeftAlone) {
  TokenizerSpec spec({"\u32FF", "\u4EE4", "\u548C"}, {});
  spec.json["normalizer"] = {{"type", "NFKC"}};
  EXPECT_EQ(tokens_of(spec.load(), "\u32FF"), (Texts{"\u32FF"}));
}

TEST(PostProcessor, TemplatesSurroundTheText) {
  TokenizerSpec spec({"<s>", "</s>", "a"}, {});
  const Json special = {{"<s>", {{"id", "<s>"}, {"ids", {0}}, {"tokens", {"<s>"}}}},
                        {"</s>", {{"id", "</s>"}, {"ids", {1}}, {"tokens", {"</s>"}}}}};
  spec.json["post_processor"] = {{"type", "TemplateProcessing"},
                                 {"single",
                                  {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}},
                                   {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
                                   {{"SpecialToken", {{"id", "</s>"}, {"type_id", 0}}}}}},
                                 {"pair", Json::array()},
                                 {"special_tokens", special}};
  EXPECT_EQ(spec.load().encode("a", true), (std::vector<std::int32_t>{0, 2, 1}));
  EXPECT_EQ(spec.load().encode("a", false), (std::vector<std::int32_t>{2}));
  spec.json["post_processor"] = {{"type", "RobertaProcessing"},
                                 {"sep", {"</s>", 1}},
                                 {"cls", {"<s>", 0}},
                                 {"trim_offsets", true},
                                 {"add_prefix_space", false}};
  EXPECT_EQ(spec.load().encode("a", true), (std::vector<std::int32_t>{0, 2, 1}));
}

TEST(PostProcessor, FilesWithoutOneFollowTheSwitchesOfTheConfig) {
  const test::ScratchFolder folder;
  TokenizerSpec spec({"<s>", "</s>", "a"}, {});
  folder.write("tokenizer.json", spec.json.dump());
  folder.write("tokenizer_config.json",
               R"({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": true})");
  EXPECT_EQ(Tokenizer::load(folder.path()).encode("a", true), (std::vector<std::int32_t>{0, 2}));
}

TEST(Decoder, SentencePieceChain) {
  TokenizerSpec spec({"<unk>", "▁a", "b", "<0xC3>", "<0xA9>"}, {});
  spec.json["decoder"] = {{"type", "Sequence"},
                          {"decoders",
                           {{{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}},
                            {{"type", "ByteFallback"}},
                            {{"type", "Fuse"}},
                            {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}};
  const Tokenizer tokenizer = spec.load();
  EXPECT_EQ(tokenizer.decode(std::vector<std::int32_t>{1, 1, 2, 3, 4}, false), "a abé");
  EXPECT_EQ(tokenizer.decode(std::vector<std::int32_t>{3}, false), "\uFFFD");
  EXPECT_EQ(tokenizer.decode(std::vector<std::int32_t>{77, -1}, false), "");
}

TEST(Decoder, WithoutOneTokensAreJoinedByBlanks) {
  EXPECT_EQ(TokenizerSpec({"a", "b"}, {}).load().decode(std::vector<std::int32_t>{0, 1}, false),
            "a b");
}

TEST(Refusal, EveryUnknownPartIsNamed) {
  const auto message = [](const char* part, const Json& value) {
    TokenizerSpec spec({"a"}, {});
    spec.json[part] = value;
    return test::user_error([&] { spec.load(); });
  };
  const auto names = [](const std::string& text, const char* wanted) {
    EXPECT_NE(text.find(wanted), std::string::npos) << text;
    EXPECT_NE(text.find("tokenizer.json"), std::string::npos) << text;
  };
  names(message("normalizer", {{"type", "Precompiled"}}), "normalizer \"Precompiled\"");
  names(message("normalizer", {{"type", "BertNormalizer"}}), "normalizer \"BertNormalizer\"");
  names(message("pre_tokenizer", {{"type", "UnicodeScripts"}}), "pre_tokenizer \"UnicodeScripts\"");
  names(message("post_processor", {{"type", "Mystery"}}), "post_processor \"Mystery\"");
  names(message("decoder", {{"type", "CTC"}}), "decoder \"CTC\"");
  names(message("pre_tokenizer", {{"type", "Split"},
                                  {"pattern", {{"Regex", R"(\bx)"}}},
                                  {"behavior", "Isolated"},
                                  {"invert", false}}),
        "\\bx");
  names(message("pre_tokenizer", {{"type", "Split"},
                                  {"pattern", {{"String", "x"}}},
                                  {"behavior", "Sideways"},
                                  {"invert", false}}),
        "Sideways");
  names(message("version", "2.0"), "version");
  names(
      message("model", {{"type", "Unigram"}, {"unk_id", 0}, {"vocab", Json::array({{"a", -1.0}})}}),
      "Unigram");
  names(message("model", {{"type", "WordPiece"}, {"vocab", {{"a", 0}}}}), "WordPiece");
}

TEST(Refusal, DamagedFilesAreNamedToo) {
  const test::ScratchFolder folder;
  const auto message = [&](const std::string& text) {
    const std::string path = folder.write("tokenizer.json", text);
    return test::user_error([&] { Tokenizer::load(path); });
  };
  EXPECT_NE(message("{\"model\": ").find("not valid JSON"), std::string::npos);
  EXPECT_NE(message("[]").find("not a JSON object"), std::string::npos);
  EXPECT_NE(message("{}").find("no \"model\""), std::string::npos);
  EXPECT_NE(message(R"({"model": {"type": "BPE", "vocab": {"a": 0}}})").find("merges"),
            std::string::npos);
  EXPECT_NE(message(R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []}})")
                .find("\"b\""),
            std::string::npos);
  EXPECT_NE(
      message(R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}})").find("\"b\""),
      std::string::npos);
  EXPECT_NE(
      test::user_error([&] { Tokenizer::load(folder.path() / "missing"); }).find("does not exist"),
      std::string::npos);
  const test::ScratchFolder sentencepiece;
  sentencepiece.write("tokenizer.model", "x");
  EXPECT_NE(test::user_error([&] { Tokenizer::load(sentencepiece.path()); }).find("convert it"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera
