// Pre-tokenised rows: how labels are read, which pairs are trained, masks, and ids out of range.
#include <fstream>
#include <nlohmann/json.hpp>

#include "data/batch.h"
#include "tests/data/data_test_support.h"
#include "tests/support/test_data.h"

namespace tessera {
namespace {

using test::all_rows;
using test::DataTest;
using Ids = std::vector<std::int32_t>;

class Labels : public DataTest {
 protected:
  Labels() { settings.encoder = nullptr; }
};

TEST_F(Labels, WithoutLabelsEveryNextTokenIsTrained) {
  const auto rows = all_rows(*prepare_file("a.jsonl", "{\"input_ids\":[5,6,7,8]}\n"));
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].inputs, Ids({5, 6, 7}));
  EXPECT_EQ(rows[0].targets, Ids({6, 7, 8}));
}

TEST_F(Labels, AlignedAsInHuggingFace) {
  const auto data =
      prepare_file("a.jsonl", "{\"input_ids\":[5,6,7,8,9],\"labels\":[-100,-100,7,-100,9]}\n");
  EXPECT_EQ(data->sources()[0].documents->alignment(), LabelAlignment::kAligned);
  const auto rows = all_rows(*data);
  EXPECT_EQ(rows[0].inputs, Ids({5, 6, 7, 8}));
  EXPECT_EQ(rows[0].targets, Ids({-100, 7, -100, 9}));
}

TEST_F(Labels, Shifted) {
  const auto data = prepare_file("a.jsonl", "{\"input_ids\":[5,6,7,8],\"labels\":[-100,7,8,3]}\n");
  EXPECT_EQ(data->sources()[0].documents->alignment(), LabelAlignment::kShifted);
  const auto rows = all_rows(*data);
  EXPECT_EQ(rows[0].inputs, Ids({5, 6, 7, 8}));
  EXPECT_EQ(rows[0].targets, Ids({-100, 7, 8, 3}));
}

TEST_F(Labels, ShiftedWithoutALastLabel) {
  const auto rows =
      all_rows(*prepare_file("a.jsonl", "{\"input_ids\":[5,6,7,8],\"labels\":[6,-100,8,-100]}\n"));
  EXPECT_EQ(rows[0].inputs, Ids({5, 6, 7}));
  EXPECT_EQ(rows[0].targets, Ids({6, -100, 8}));
}

TEST_F(Labels, TheWholeSourceDecides) {
  // The first row alone looks like both.
  const std::string first = "{\"input_ids\":[4,4,4],\"labels\":[4,4,4]}\n";
  settings.sequence_length = 3;
  options.packing = false;
  auto data = prepare_file("a.jsonl", first + "{\"input_ids\":[5,6],\"labels\":[5,6]}\n");
  EXPECT_EQ(data->sources()[0].documents->alignment(), LabelAlignment::kAligned);
  EXPECT_EQ(all_rows(*data)[0].targets, Ids({4, 4}));
  data = prepare_file("b.jsonl", first + "{\"input_ids\":[5,6],\"labels\":[6,7]}\n");
  EXPECT_EQ(data->sources()[0].documents->alignment(), LabelAlignment::kShifted);
  EXPECT_EQ(all_rows(*data)[0].targets, Ids({4, 4, 4}));

  EXPECT_NE(error_of_file("c.jsonl", first).find("say which is meant"), std::string::npos);
  options.train.clear();
  add_source(write("c.jsonl", first));
  options.train[0].labels = "shifted";
  EXPECT_EQ(all_rows(*prepare().train)[0].targets, Ids({4, 4, 4}));
}

TEST_F(Labels, NeitherFits) {
  const std::string message = error_of_file(
      "a.jsonl",
      "{\"input_ids\":[5,6,7],\"labels\":[5,6,7]}\n{\"input_ids\":[5,6,7],\"labels\":[9,9,9]}\n");
  EXPECT_NE(message.find("first difference: "), std::string::npos) << message;
  EXPECT_NE(message.find("a.jsonl:2)"), std::string::npos) << message;
}

TEST_F(Labels, AWrongOptionIsRefused) {
  add_source(write("a.jsonl", "{\"input_ids\":[5,6,7],\"labels\":[6,7,8]}\n"));
  options.train[0].labels = "aligned";
  try {
    prepare();
    FAIL() << "aligned was accepted for shifted labels";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("labels: shifted"), std::string::npos) << error.what();
  }
}

TEST_F(Labels, RowsWithAndWithoutLabelsMix) {
  settings.sequence_length = 3;
  const auto rows = all_rows(*prepare_file(
      "a.jsonl",
      "{\"input_ids\":[5,6,7,8]}\n{\"input_ids\":[5,6,7,8],\"labels\":[-100,-100,7,8]}\n"
      "{\"input_ids\":[1,2,3,4]}\n"));
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].targets, Ids({6, 7, 8}));
  EXPECT_EQ(rows[1].targets, Ids({-100, 7, 8}));
  EXPECT_EQ(rows[2].targets, Ids({2, 3, 4}));
}

// Kind B02: a row without a target adds nothing; data without any is an error.
TEST_F(Labels, RowsWithoutATargetAreCountedAndLeftOut) {
  const auto data = prepare_file("a.jsonl",
                                 "{\"input_ids\":[5,6,7],\"labels\":[-100,-100,-100]}\n"
                                 "{\"input_ids\":[5,6,7],\"labels\":[-100,6,7]}\n");
  EXPECT_EQ(data->num_rows(), 1);
  EXPECT_EQ(data->sources()[0].rows->counts().without_target, 1);
  EXPECT_NE(error_of_file("b.jsonl", "{\"input_ids\":[5,6,7],\"labels\":[-100,-100,-100]}\n")
                .find("nothing would be trained"),
            std::string::npos);
  // The only label is that of the first token, which nothing predicts.
  EXPECT_NE(error_of_file("c.jsonl", "{\"input_ids\":[5,6,7],\"labels\":[5,-100,-100]}\n")
                .find("1 without a target"),
            std::string::npos);
  EXPECT_NE(error_of_file("d.jsonl", "").find("has no row"), std::string::npos);
  EXPECT_NE(error_of_file("e.jsonl", "{\"input_ids\":[5]}\n").find("1 shorter than two tokens"),
            std::string::npos);
}

TEST_F(Labels, PaddingGoesByTheMask) {
  // Kind B87: the end token is also the padding token; only the real one is trained.
  const auto rows = all_rows(*prepare_file(
      "a.jsonl",
      "{\"input_ids\":[5,6,2,2,2],\"labels\":[5,6,2,-100,-100],\"attention_mask\":[1,1,1,0,0]}\n"
      "{\"input_ids\":[2,2,7,8,2],\"labels\":[-100,-100,7,8,2],\"attention_mask\":[0,0,1,1,1]}\n"));
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].inputs, Ids({5, 6, 7, 8}));
  EXPECT_EQ(rows[0].targets, Ids({6, 2, 8, 2}));
  EXPECT_EQ(rows[0].positions, Ids({0, 1, 0, 1}));
  EXPECT_EQ(rows[0].lengths, Ids({2, 2}));
}

TEST_F(Labels, PositionsAndMaskNumbersSeparateDocuments) {
  auto rows = all_rows(
      *prepare_file("a.jsonl", "{\"input_ids\":[5,6,7,8,9],\"position_ids\":[0,1,0,1,2]}\n"));
  EXPECT_EQ(rows[0].inputs, Ids({5, 7, 8}));
  EXPECT_EQ(rows[0].targets, Ids({6, 8, 9}));
  rows = all_rows(
      *prepare_file("b.jsonl", "{\"input_ids\":[5,6,7,8,9],\"attention_mask\":[1,1,2,2,0]}\n"));
  EXPECT_EQ(rows[0].inputs, Ids({5, 7}));
  EXPECT_EQ(rows[0].targets, Ids({6, 8}));
}

// Kind B59.
TEST_F(Labels, IdsOutsideOfTheVocabularyAreFoundBeforeTheFirstStep) {
  settings.vocab_size = 512;
  settings.encoder = &encoder;
  const std::string rows = "{\"input_ids\":[5,6]}\n\n{\"input_ids\":[1,512]}\n";
  std::string message = error_of_file("a.jsonl", rows);
  EXPECT_NE(message.find("a.jsonl:3: token id 512 is outside"), std::string::npos) << message;
  // Also where the cache was made for a larger vocabulary.
  settings.vocab_size = 1000;
  prepare_file("b.jsonl", rows);
  settings.vocab_size = 512;
  message = error_of_file("b.jsonl", rows);
  EXPECT_NE(message.find("b.jsonl:3: token id 512 is outside"), std::string::npos) << message;
  // The name of the token, where the tokenizer has one.
  settings.vocab_size = 256;
  message = error_of_file("c.jsonl", "{\"text\":\"a\"}\n");
  EXPECT_NE(message.find("c.jsonl:1: token id 257 (<|eos|>) is outside"), std::string::npos)
      << message;
  // A label is an id too.
  settings.vocab_size = 512;
  message = error_of_file("d.jsonl", "{\"input_ids\":[5,6],\"labels\":[6,600]}\n");
  EXPECT_NE(message.find("d.jsonl:1: token id 600"), std::string::npos) << message;
}

TEST_F(Labels, TextNeedsATokenizer) {
  EXPECT_NE(error_of_file("a.jsonl", "{\"text\":\"a\"}\n").find("set data.tokenizer"),
            std::string::npos);
}

TEST_F(Labels, WideIds) {
  settings.vocab_size = 200000;
  const auto rows = all_rows(*prepare_file("a.jsonl", "{\"input_ids\":[5,131072,199999]}\n"));
  EXPECT_EQ(rows[0].inputs, Ids({5, 131072}));
  EXPECT_EQ(rows[0].targets, Ids({131072, 199999}));
}

// The reference cases of stories260K, whose labels are shifted, reach the model as they are.
TEST_F(Labels, GoldenCasesBecomeTheirRows) {
  TESSERA_REQUIRE_DATA(path, "golden/stories260K_reference.json");
  const auto golden = nlohmann::json::parse(std::ifstream(path));
  settings.sequence_length = 1024;
  settings.vocab_size = 512;
  int seen = 0;
  for (const auto& one : golden["cases"]) {
    if (!one.contains("input_ids")) continue;
    ++seen;
    SCOPED_TRACE(one["name"].get<std::string>());
    nlohmann::json row = {{"input_ids", one["input_ids"]}, {"labels", one["labels"]}};
    if (one.contains("position_ids")) row["position_ids"] = one["position_ids"];
    const auto data = prepare_file(one["name"].get<std::string>() + ".jsonl", row.dump() + "\n");
    DataLoader loader(data, {.vocab_size = 512});
    const MicroBatch batch = loader.load(0, 0);
    EXPECT_EQ(batch.target_tokens, one["tokens"].get<std::int64_t>());
    const auto inputs = one["input_ids"].get<Ids>();
    const auto labels = one["labels"].get<Ids>();
    // Positions behind the last target train nothing and may be left out.
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      ASSERT_EQ(batch.targets[i], labels[i]) << i;
      if (labels[i] != kIgnoredTarget) {
        ASSERT_EQ(batch.inputs[i], inputs[i]) << i;
      }
    }
    if (one.contains("position_ids")) {
      const auto positions = one["position_ids"].get<Ids>();
      for (std::size_t i = 0; i < inputs.size(); ++i) ASSERT_EQ(batch.positions[i], positions[i]);
      EXPECT_EQ(batch.documents[1], 256);
      EXPECT_EQ(batch.documents[2], 512);
      EXPECT_EQ(batch.documents[3], 734);
    }
  }
  EXPECT_EQ(seen, 6);
}

TEST_F(Labels, OutsideGoldenOfAnotherTrainerIsAligned) {
  TESSERA_REQUIRE_DATA(path, "sft/axolotl_conversation.tokenized_llama2chat.json");
  const auto golden = nlohmann::json::parse(std::ifstream(path));
  settings.vocab_size = 32000;
  settings.sequence_length = 4096;
  options.train.clear();
  add_source(path.string());
  const auto data = prepare().train;
  EXPECT_EQ(data->sources()[0].documents->alignment(), LabelAlignment::kAligned);
  const auto labels = golden["labels"].get<Ids>();
  const auto trained =
      std::count_if(labels.begin() + 1, labels.end(), [](int id) { return id >= 0; });
  EXPECT_EQ(data->sources()[0].rows->counts().target_tokens, trained);
}

}  // namespace
}  // namespace tessera
