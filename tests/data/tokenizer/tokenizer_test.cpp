// Merges, added tokens, spans, threads, streams, export and the byte tokenizer.
#include <gtest/gtest.h>

#include <fstream>
#include <random>
#include <sstream>

#include "data/tokenizer/decode_stream.h"
#include "tests/data/tokenizer/tokenizer_test_support.h"

namespace tessera {
namespace {

using test::Json;
using test::TokenizerSpec;
using test::tokens_of;
using Ids = std::vector<std::int32_t>;
using Texts = std::vector<std::string>;

// B69
TEST(Bpe, MergesMayBeStringsOrPairs) {
  TokenizerSpec spec({"a", " ", "b", "a b", " b"}, {});
  spec.json["model"]["merges"] = Json::array({Json::array({" ", "b"}), Json::array({"a", " b"})});
  EXPECT_EQ(tokens_of(spec.load(), "a b"), (Texts{"a b"}));
  spec.json["model"]["merges"] = Json::array({"#version: 0.2"});
  EXPECT_EQ(tokens_of(spec.load(), "ab"), (Texts{"a", "b"}));
  spec.json["model"]["merges"] = Json::array({"a b c"});
  EXPECT_NE(test::user_error([&] { spec.load(); }).find("\"a b c\""), std::string::npos);
}

TEST(Bpe, TheLowestRankGoesFirstAndTheLeftmostAmongEquals) {
  const Tokenizer tokenizer =
      TokenizerSpec({"a", "b", "c", "bc", "ab", "aa"}, {"b c", "a b", "a a"}).load();
  EXPECT_EQ(tokens_of(tokenizer, "abc"), (Texts{"a", "bc"}));
  EXPECT_EQ(tokens_of(tokenizer, "aaa"), (Texts{"aa", "a"}));
}

// B68
TEST(Bpe, IgnoreMergesTakesAWholeWord) {
  TokenizerSpec spec = TokenizerSpec::byte_level({"ab", "abc"}, {"a b"});
  EXPECT_EQ(tokens_of(spec.load(), "abc"), (Texts{"ab", "c"}));
  spec.json["model"]["ignore_merges"] = true;
  EXPECT_EQ(tokens_of(spec.load(), "abc"), (Texts{"abc"}));
}

TEST(Bpe, UnknownCharactersBecomeBytesOrUnkOrNothing) {
  TokenizerSpec spec({"<unk>", "a", "b", "ab"}, {"a b"});
  EXPECT_EQ(tokens_of(spec.load(), "aéb"), (Texts{"ab"}));  // it vanishes and its neighbours meet
  spec.json["model"]["unk_token"] = "<unk>";
  EXPECT_EQ(tokens_of(spec.load(), "aéöb"), (Texts{"a", "<unk>", "<unk>", "b"}));
  spec.json["model"]["fuse_unk"] = true;
  EXPECT_EQ(tokens_of(spec.load(), "aéöb"), (Texts{"a", "<unk>", "b"}));
  std::vector<std::string> tokens = {"<unk>", "a"};
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", byte);
    tokens.emplace_back(name);
  }
  TokenizerSpec fallback(tokens, {});
  fallback.json["model"]["unk_token"] = "<unk>";
  fallback.json["model"]["byte_fallback"] = true;
  EXPECT_EQ(tokens_of(fallback.load(), "aé"), (Texts{"a", "<0xC3>", "<0xA9>"}));
}

TEST(Bpe, PrefixesAndSuffixesOfWords) {
  TokenizerSpec suffix({"a", "b", "b</w>", "ab</w>", "a</w>"}, {"a b</w>"});
  suffix.json["model"]["end_of_word_suffix"] = "</w>";
  suffix.json["pre_tokenizer"] = {{"type", "WhitespaceSplit"}};
  EXPECT_EQ(tokens_of(suffix.load(), "ab a"), (Texts{"ab</w>", "a</w>"}));
  TokenizerSpec prefix({"a", "##b", "ab", "##c"}, {"a ##b"});
  prefix.json["model"]["continuing_subword_prefix"] = "##";
  EXPECT_EQ(tokens_of(prefix.load(), "abc"), (Texts{"ab", "##c"}));
}

TEST(Bpe, RandomMergesAreRefused) {
  TokenizerSpec spec({"a"}, {});
  spec.json["model"]["dropout"] = 0.1;
  EXPECT_NE(test::user_error([&] { spec.load(); }).find("dropout"), std::string::npos);
  spec.json["model"]["dropout"] = 0.0;
  EXPECT_EQ(spec.load().vocab_size(), 1);
}

// Short words are merged by scanning, long ones through a queue: the same text in one word and in
// parts that nothing joins must agree.
TEST(Bpe, LongWordsAreMergedLikeShortOnes) {
  const std::vector<std::string> merges = {"a b",  "b c", "ab c", "a a",
                                           "aa b", "c c", "cc a", "abc abc"};
  std::vector<std::string> made;
  for (const std::string& merge : merges) {
    const std::size_t blank = merge.find(' ');
    made.push_back(merge.substr(0, blank) + merge.substr(blank + 1));
  }
  made.push_back("-");
  const Tokenizer tokenizer = TokenizerSpec(
                                  [&] {
                                    std::vector<std::string> tokens = {"a", "b", "c"};
                                    tokens.insert(tokens.end(), made.begin(), made.end());
                                    return tokens;
                                  }(),
                                  merges)
                                  .load();
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    std::string parts[12];
    std::string whole;
    Ids expected;
    const std::int32_t dash = *tokenizer.token_to_id("-");
    for (std::string& part : parts) {
      for (int i = 0; i < 20; ++i) part += static_cast<char>('a' + random() % 3);
      const Ids ids = tokenizer.encode(part, false);
      expected.insert(expected.end(), ids.begin(), ids.end());
      expected.push_back(dash);
      whole += part + "-";
    }
    ASSERT_EQ(tokenizer.encode(whole, false), expected) << whole;
  }
}

// B74
TEST(AddedTokens, BlanksAreTakenOnTheFlaggedSideOnly) {
  TokenizerSpec spec = TokenizerSpec::byte_level({"Hello"}, {});
  spec.json["model"]["ignore_merges"] = true;
  spec.add(257, "<|user|>", {{"rstrip", true}, {"special", true}});
  spec.add(258, "<mask>", {{"lstrip", true}, {"special", true}});
  const Tokenizer tokenizer = spec.load();
  EXPECT_EQ(tokens_of(tokenizer, "<|user|>Hello"), (Texts{"<|user|>", "Hello"}));
  EXPECT_EQ(tokens_of(tokenizer, "<|user|>  Hello"), (Texts{"<|user|>", "Hello"}));
  EXPECT_EQ(tokens_of(tokenizer, "a  <mask> b"), (Texts{"a", "<mask>", "Ġ", "b"}));
  EXPECT_EQ(tokens_of(tokenizer, " <|user|> <mask>"), (Texts{"Ġ", "<|user|>", "<mask>"}));
}

TEST(AddedTokens, SingleWordAsksForBordersOnBothSides) {
  TokenizerSpec spec = TokenizerSpec::byte_level();
  spec.add(256, "ab", {{"single_word", true}});
  const Tokenizer tokenizer = spec.load();
  EXPECT_EQ(tokens_of(tokenizer, "ab"), (Texts{"ab"}));
  EXPECT_EQ(tokens_of(tokenizer, "(ab)"), (Texts{"(", "ab", ")"}));
  EXPECT_EQ(tokens_of(tokenizer, "abc"), (Texts{"a", "b", "c"}));
  EXPECT_EQ(tokens_of(tokenizer, "éab").back(), "b");
  EXPECT_EQ(tokens_of(tokenizer, "_ab").back(), "b");
}

TEST(AddedTokens, TheLongestAtTheLeftmostPlaceWins) {
  TokenizerSpec spec = TokenizerSpec::byte_level();
  spec.add(256, "<a").add(257, "<ab>").add(258, "b>");
  const Tokenizer tokenizer = spec.load();
  EXPECT_EQ(tokens_of(tokenizer, "<ab>"), (Texts{"<ab>"}));
  EXPECT_EQ(tokens_of(tokenizer, "<ab<ab>"), (Texts{"<a", "b", "<ab>"}));
}

TEST(AddedTokens, NormalizedOnesAreMatchedInTheirNormalForm) {
  TokenizerSpec spec({"a", "b", "c", "A", "B"}, {});
  spec.json["normalizer"] = {{"type", "Lowercase"}};
  spec.add(5, "Abc", {{"normalized", true}}).add(6, "BB", {{"normalized", false}});
  const Tokenizer tokenizer = spec.load();
  EXPECT_EQ(tokenizer.encode("aBCBb", false), (Ids{5, 1, 1}));
  EXPECT_EQ(tokenizer.encode("abcBBA", false), (Ids{5, 6, 0}));
}

TEST(AddedTokens, SpecialOnesCanBeReadAsPlainText) {
  TokenizerSpec spec = TokenizerSpec::byte_level();
  spec.add(256, "<e>", {{"special", true}}).add(257, "ab");
  const Tokenizer tokenizer = spec.load();
  Ids ids;
  tokenizer.encode_append("<e>ab", {.split_special_tokens = true}, ids);
  EXPECT_EQ(ids, (Ids{'<', 'e', '>', 257}));
  EXPECT_EQ(tokenizer.encode("<e>ab", false), (Ids{256, 257}));
  EXPECT_EQ(tokenizer.decode(Ids{256, 257}, true), "ab");
  EXPECT_EQ(tokenizer.decode(Ids{256, 257}, false), "<e>ab");
}

TEST(AddedTokens, AnIdThatIsTakenIsRefused) {
  TokenizerSpec spec = TokenizerSpec::byte_level();
  spec.add(65, "<new>");
  const std::string message = test::user_error([&] { spec.load(); });
  EXPECT_NE(message.find("<new>"), std::string::npos) << message;
  EXPECT_NE(message.find("65"), std::string::npos) << message;
}

TEST(AddedTokens, TheConfigBesideAddsThoseThatTheFileLacks) {
  const test::ScratchFolder folder;
  TokenizerSpec spec = TokenizerSpec::byte_level();
  spec.add(256, "<e>", {{"special", true}});
  folder.write("tokenizer.json", spec.json.dump());
  folder.write("tokenizer_config.json",
               R"({"eos_token": "<e>", "pad_token": "<none>", "added_tokens_decoder": {
                   "256": {"content": "<e>", "special": false}, "257": {"content": "<p>", "special": true}}})");
  const Tokenizer tokenizer = Tokenizer::load(folder.path());
  EXPECT_EQ(tokenizer.encode("<e><p>", false), (Ids{256, 257}));
  EXPECT_TRUE(tokenizer.is_special(256));  // tokenizer.json decides about its own tokens
  EXPECT_EQ(tokenizer.special_ids().eos, 256);
  EXPECT_EQ(tokenizer.special_ids().pad, -1);
  EXPECT_EQ(tokenizer.vocab_size(), 258);
}

TEST(Spans, TokensCoverTheBytesTheyStandFor) {
  TokenizerSpec spec = TokenizerSpec::byte_level({"Ġa", "ab"}, {"Ġ a", "a b"});
  spec.add(258, "<e>", {{"special", true}, {"lstrip", true}});
  const Encoding encoding = spec.load().encode_with_spans("ab a  <e>é");
  EXPECT_EQ(encoding.ids, (Ids{257, 256, 258, 0xC3, 0xA9}));
  EXPECT_EQ(encoding.spans, (std::vector<TextSpan>{{0, 2}, {2, 4}, {4, 9}, {9, 11}, {9, 11}}));
}

TEST(Spans, NormalFormsPointBackToTheOriginal) {
  TokenizerSpec spec({"▁", "é", "x", "▁x"}, {"▁ x"});
  spec.json["normalizer"] = {{"type", "NFC"}};
  spec.json["pre_tokenizer"] = {
      {"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "always"}, {"split", true}};
  const Encoding encoding = spec.load().encode_with_spans("e\u0301 x");
  EXPECT_EQ(encoding.ids, (Ids{0, 1, 3}));
  // The blank in front stands for nothing of its own: it has the place of the first character.
  EXPECT_EQ(encoding.spans, (std::vector<TextSpan>{{0, 3}, {0, 3}, {3, 5}}));
}

TEST(Spans, AddedSpecialTokensAreEmpty) {
  TokenizerSpec spec({"<s>", "a"}, {});
  spec.json["post_processor"] = {
      {"type", "RobertaProcessing"}, {"sep", {"<s>", 0}}, {"cls", {"<s>", 0}}};
  const Encoding encoding = spec.load().encode_with_spans("aa");
  EXPECT_EQ(encoding.ids, (Ids{0, 1, 1, 0}));
  EXPECT_EQ(encoding.spans, (std::vector<TextSpan>{{0, 0}, {0, 1}, {1, 2}, {2, 2}}));
}

TEST(Spans, UnknownCharactersKeepTheirPlaces) {
  TokenizerSpec spec({"<unk>", "a"}, {});
  const auto spans = [&] { return spec.load().encode_with_spans("éaéé").spans; };
  EXPECT_EQ(spans(), (std::vector<TextSpan>{{2, 3}}));
  spec.json["model"]["unk_token"] = "<unk>";
  EXPECT_EQ(spans(), (std::vector<TextSpan>{{0, 2}, {2, 3}, {3, 5}, {5, 7}}));
  spec.json["model"]["fuse_unk"] = true;
  EXPECT_EQ(spans(), (std::vector<TextSpan>{{0, 2}, {2, 3}, {3, 7}}));
}

TEST(Encode, BatchesOnThreadsGiveWhatOneTextAfterAnotherGives) {
  TokenizerSpec spec = TokenizerSpec::byte_level({"ab", "abab", "Ġab"}, {"a b", "ab ab", "Ġ ab"});
  spec.json["pre_tokenizer"]["use_regex"] = true;
  const Tokenizer tokenizer = spec.load();
  std::mt19937 random(1);
  std::vector<std::string> texts(503);
  for (std::string& text : texts) {
    const auto length = random() % 60;
    for (std::size_t i = 0; i < length; ++i) text += "ab 1\n"[random() % 5];
  }
  const std::vector<std::string_view> views(texts.begin(), texts.end());
  for (const int threads : {0, 1, 3}) {
    const auto batch = tokenizer.encode_batch(views, {}, threads);
    ASSERT_EQ(batch.size(), texts.size());
    for (std::size_t i = 0; i < texts.size(); ++i)
      EXPECT_EQ(batch[i], tokenizer.encode(texts[i], true));
  }
  EXPECT_TRUE(tokenizer.encode_batch({}, {}, 2).empty());
}

TEST(Encode, BrokenUtf8IsNamedByItsByte) {
  TokenizerSpec spec = TokenizerSpec::byte_level();
  spec.json["pre_tokenizer"]["use_regex"] = true;
  const Tokenizer tokenizer = spec.load();
  for (const char* text :
       {"ab\xff", "ab\xC3", "ab\xED\xA0\x80", "ab\xC0\x80", "ab\xF4\x90\x80\x80"}) {
    const std::string message = test::user_error([&] { tokenizer.encode(text, false); });
    EXPECT_NE(message.find("byte 2"), std::string::npos) << message;
    const std::string_view view = text;
    EXPECT_NE(test::user_error([&] { tokenizer.encode_batch({{view}}, {}, 2); }).find("byte 2"),
              std::string::npos);
  }
}

TEST(ByteTokenizer, TakesAnyBytes) {
  const Tokenizer tokenizer = Tokenizer::bytes();
  EXPECT_EQ(tokenizer.vocab_size(), 259);
  EXPECT_EQ(tokenizer.special_ids().bos, 256);
  EXPECT_EQ(tokenizer.special_ids().eos, 257);
  EXPECT_EQ(tokenizer.special_ids().pad, 258);
  std::string all;
  Ids expected;
  for (int byte = 0; byte < 256; ++byte) {
    all += static_cast<char>(byte);
    expected.push_back(byte);
  }
  EXPECT_EQ(tokenizer.encode(all, true), expected);
  EXPECT_EQ(tokenizer.encode("a<|eos|>", true), (Ids{'a', 257}));
  EXPECT_EQ(tokenizer.decode(Ids{256, 'h', 0xC3, 0xA9, 257}, true), "hé");
  EXPECT_EQ(tokenizer.decode(Ids{'h', 0xC3, 'a'}, true), "h\uFFFDa");
}

TEST(DecodeStream, CharactersComeOutWhole) {
  const Tokenizer tokenizer = Tokenizer::bytes();
  DecodeStream stream(tokenizer);
  const std::string text = "h\u00e9\u4e2d\U0001f600!";
  std::string out;
  for (const std::int32_t id : tokenizer.encode(text, false)) {
    const std::string piece = stream.step(id);
    EXPECT_EQ(piece.find("\uFFFD"), std::string::npos);
    out += piece;
  }
  EXPECT_EQ(out + stream.finish(), text);
  EXPECT_EQ(stream.step(0xE4), "");
  EXPECT_EQ(stream.finish(), "\uFFFD");
  for (int i = 0; i < 100; ++i)
    out += stream.step(0x80);  // never valid: it must not be held for ever
  EXPECT_GT(out.size(), text.size() + 200);
}

TEST(DecodeStream, BlanksBetweenTokensSurvive) {
  TokenizerSpec spec({"▁a", "▁b", "c"}, {});
  spec.json["decoder"] = {{"type", "Sequence"},
                          {"decoders",
                           {{{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}},
                            {{"type", "Fuse"}},
                            {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}};
  const Tokenizer tokenizer = spec.load();
  DecodeStream stream(tokenizer);
  EXPECT_EQ(stream.step(0), "a");
  EXPECT_EQ(stream.step(1), " b");
  EXPECT_EQ(stream.step(2), "c");
  EXPECT_EQ(stream.step(0), " a");
  EXPECT_EQ(stream.finish(), "");
}

TEST(Save, FilesComeBackWithTheTokensAdded) {
  const test::ScratchFolder source;
  TokenizerSpec spec = TokenizerSpec::byte_level({"ab"}, {"a b"});
  spec.add(257, "<e>", {{"special", true}});
  source.write("tokenizer.json", spec.json.dump());
  source.write("tokenizer_config.json",
               R"({"eos_token": "<e>", "added_tokens_decoder": {}, "chat_template": "x"})");
  source.write("chat_template.jinja", "{{ messages }}");
  Tokenizer tokenizer = Tokenizer::load(source.path());
  EXPECT_EQ(tokenizer.side_file("chat_template.jinja"), "{{ messages }}");
  EXPECT_EQ(tokenizer.side_file("missing"), "");

  const test::ScratchFolder plain;
  tokenizer.save(plain.path());
  const auto read = [](const std::filesystem::path& path) {
    std::ifstream in(path, std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    return std::move(text).str();
  };
  EXPECT_EQ(read(plain.path() / "tokenizer.json"), read(source.path() / "tokenizer.json"));
  EXPECT_EQ(read(plain.path() / "chat_template.jinja"), "{{ messages }}");

  AddedToken token;
  token.content = "<|new|>";
  token.normalized = false;
  token.rstrip = true;
  EXPECT_EQ(tokenizer.add_tokens({{token}}), (Ids{258}));
  token.content = "ab";
  EXPECT_EQ(tokenizer.add_tokens({{token}}), (Ids{256}));  // it has an id already
  const test::ScratchFolder changed;
  tokenizer.save(changed.path());
  const Tokenizer again = Tokenizer::load(changed.path());
  EXPECT_EQ(again.vocab_size(), 259);
  EXPECT_EQ(again.special_ids().eos, 257);
  EXPECT_EQ(again.encode("x<|new|> ab<e>", false), (Ids{'x', 258, 256, 257}));
  EXPECT_EQ(again.encode("x<|new|> ab<e>", false), tokenizer.encode("x<|new|> ab<e>", false));
  const auto config = Json::parse(read(changed.path() / "tokenizer_config.json"));
  EXPECT_EQ(config["added_tokens_decoder"]["258"]["content"], "<|new|>");
  EXPECT_EQ(config["chat_template"], "x");
}

TEST(Save, TheByteTokenizerIsAFolderLikeAnyOther) {
  const test::ScratchFolder folder;
  const Tokenizer tokenizer = Tokenizer::bytes();
  tokenizer.save(folder.path());
  const Tokenizer again = Tokenizer::load(folder.path());
  EXPECT_EQ(again.special_ids().pad, 258);
  EXPECT_EQ(again.encode("né<|pad|>", true), tokenizer.encode("né<|pad|>", true));
}

TEST(Save, AFolderThatCannotBeWrittenIsATransientError) {
  try {
    Tokenizer::bytes().save("/nonexistent/folder");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kTransient);
  }
}

}  // namespace
}  // namespace tessera
