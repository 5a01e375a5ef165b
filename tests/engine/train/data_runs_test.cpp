// Whole runs as far as their data goes: data.add_tokens and what a run with them writes, resumes in
// later epochs and under accumulation (kinds B26, B28), models with more rows than tokens (B59).
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/safetensors_folder.h"
#include "data/tokenizer/tokenizer.h"
#include "engine/core/log.h"
#include "engine/train/trainer.h"
#include "models/hf/names.h"
#include "parallel/launch.h"
#include "tests/support/temp_folder.h"
#include "tests/support/test_data.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;

struct Matrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<float> values;
  std::vector<float> row(std::int64_t index) const {
    return {values.begin() + index * cols, values.begin() + (index + 1) * cols};
  }
};

class AddedTokens : public ::testing::Test {
 protected:
  void SetUp() override {
    log::set_console(false);
    std::ofstream text(folder_.path() / "text.txt");
    for (int i = 0; i < 60; ++i) text << "<|user|>" << i << " squared?<|bot|>" << i * i << ".\n";
  }
  void TearDown() override { log::set_console(true); }

  // A model folder with `rows` in its vocabulary and the byte tokenizer, whose ids end at 258.
  void make_base(std::int64_t rows, bool is_tied) {
    std::ofstream(folder_.path() / "model.json") << fmt::format(
        R"({{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": {},
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "max_position_embeddings": 64,
        "rope_theta": 10000.0, "tie_word_embeddings": {}, "hidden_act": "silu", "eos_token_id": 257,
        "torch_dtype": "float32"}})",
        rows, is_tied);
    ASSERT_EQ(train("base", 1, 2, "model.json",
                    {"model.init=random", "data.tokenizer=bytes", "optimizer.learning_rate=1e-2"}),
              0)
        << failure_;
  }

  // The learning rate moves no weight: what is exported is what was loaded.
  int train(const std::string& run, int ranks, int max_steps, const std::string& model,
            const std::vector<std::string>& overrides = {}) {
    const std::string text = fmt::format(
        "run: {{dir: {0}/{1}, device: cpu}}\n"
        "model: {{path: {0}/{3}}}\n"
        "train: {{sequence_length: 16, micro_batch_size: 1, global_batch_size: 4, max_steps: "
        "{2}}}\n"
        "optimizer: {{learning_rate: 1e-30}}\n"
        "schedule: {{name: constant}}\n"
        "data: {{train: [{0}/text.txt], cache_dir: {0}/cache}}\n"
        "checkpoint: {{every_steps: 2}}\n",
        folder_.path().string(), run, max_steps, model);
    const RunConfig config = parse_run_config(text, "run.yaml", overrides);
    RunRanksOptions launch;
    launch.world_size = ranks;
    launch.handles_signals = false;
    launch.on_failure = [&](const FailureReport& failure) { failure_ = failure.text; };
    return run_ranks(launch, [&](RankContext& rank) {
      const auto context = make_context(Device{});
      RunConfig resolved = config;
      resolve(resolved, rank.world_size, false);
      Trainer trainer(std::move(resolved), {}, std::move(rank.world), *context, rank.control);
      return trainer.run();
    });
  }

  fs::path final_folder(const std::string& run) const { return folder_.path() / run / "final"; }
  Matrix tensor(const std::string& run, std::string_view name) const {
    const SafetensorsFolder folder(final_folder(run));
    const SafetensorsFolder::Entry& entry = folder.get(name);
    Matrix matrix{entry.tensor->shape.at(0), entry.tensor->shape.at(1), {}};
    EXPECT_EQ(entry.tensor->dtype, DType::kF32);
    matrix.values.resize(static_cast<std::size_t>(matrix.rows * matrix.cols));
    entry.file->read_elements(*entry.tensor, 0, matrix.rows * matrix.cols, matrix.values.data());
    return matrix;
  }
  std::string weights(const std::string& run) const {
    std::ifstream file(final_folder(run) / "model.safetensors", std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::int64_t exported_vocab_size(const std::string& run) const {
    std::ifstream file(final_folder(run) / "config.json");
    return nlohmann::json::parse(file).at("vocab_size");
  }

  // Rows that are new hold the mean of base rows [0, known); all others those of the base.
  void check_rows(const std::string& run, std::string_view name, std::int64_t known,
                  const std::vector<std::int64_t>& added) const {
    const Matrix base = tensor("base", name);
    const Matrix extended = tensor(run, name);
    for (std::int64_t row = 0; row < extended.rows; ++row) {
      if (std::find(added.begin(), added.end(), row) == added.end()) {
        ASSERT_LT(row, base.rows);
        EXPECT_EQ(extended.row(row), base.row(row)) << name << " row " << row;
        continue;
      }
      for (std::int64_t col = 0; col < base.cols; ++col) {
        double sum = 0;
        for (std::int64_t r = 0; r < known; ++r) sum += base.row(r)[static_cast<std::size_t>(col)];
        const auto mean = static_cast<float>(sum / static_cast<double>(known));
        EXPECT_EQ(extended.row(row)[static_cast<std::size_t>(col)], mean)
            << name << " row " << row << " column " << col;
      }
    }
  }

  TempFolder folder_;
  std::string failure_;
};

const std::string kAdd = "data.add_tokens=[<|user|>, <|bot|>, <|eos|>, <|user|>]";

// 259 rows become 261, which tp 2 pads inside; the same weights come out of every layout.
TEST_F(AddedTokens, NewRowsAreTheMeanUnderEveryLayout) {
  for (const bool is_tied : {true, false}) {
    make_base(259, is_tied);
    for (const auto& [ranks, overrides] :
         {std::pair{1, std::vector<std::string>{kAdd}},
          std::pair{2, std::vector<std::string>{kAdd, "parallel.tensor=2"}},
          std::pair{4, std::vector<std::string>{kAdd, "parallel.tensor=2", "parallel.zero=1"}}}) {
      const std::string run = fmt::format("ranks{}", ranks);
      ASSERT_EQ(train(run, ranks, 2, "base/final", overrides), 0) << failure_;
      EXPECT_EQ(exported_vocab_size(run), 261);
      check_rows(run, kEmbeddingName, 259, {259, 260});
      if (!is_tied) check_rows(run, kLmHeadName, 259, {259, 260});
      EXPECT_EQ(weights(run), weights("ranks1")) << ranks << " ranks";
    }
    for (const char* run : {"base", "ranks1", "ranks2", "ranks4"}) {
      fs::remove_all(folder_.path() / run);
    }
  }
}

TEST_F(AddedTokens, TheExportedTokenizerKnowsThem) {
  make_base(259, true);
  ASSERT_EQ(train("run", 1, 2, "base/final", {kAdd}), 0) << failure_;
  const Tokenizer tokenizer = Tokenizer::load(final_folder("run"));
  EXPECT_EQ(tokenizer.vocab_size(), 261);
  EXPECT_EQ(tokenizer.encode("a<|bot|><|user|>", false),
            (std::vector<std::int32_t>{'a', 260, 259}));
  EXPECT_TRUE(tokenizer.is_special(259));
  EXPECT_EQ(tokenizer.special_ids().eos, 257);
  // The exported model is a base like any other: its tokens are not new a second time.
  ASSERT_EQ(train("again", 1, 2, "run/final", {kAdd}), 0) << failure_;
  EXPECT_EQ(weights("again"), weights("run"));
  EXPECT_EQ(exported_vocab_size("again"), 261);
}

// As in Qwen's models: more rows than tokens. A token takes a spare row, and only it changes.
TEST_F(AddedTokens, SpareRowsAreTakenFirst) {
  make_base(264, false);
  ASSERT_EQ(train("run", 2, 2, "base/final", {kAdd, "parallel.tensor=2"}), 0) << failure_;
  EXPECT_EQ(exported_vocab_size("run"), 264);
  check_rows("run", kEmbeddingName, 259, {259, 260});
  check_rows("run", kLmHeadName, 259, {259, 260});
}

TEST_F(AddedTokens, AResumeContinuesToTheBit) {
  make_base(259, true);
  const std::vector<std::string> overrides = {kAdd, "optimizer.learning_rate=1e-2"};
  ASSERT_EQ(train("whole", 1, 4, "base/final", overrides), 0) << failure_;
  ASSERT_EQ(train("parts", 1, 2, "base/final", overrides), 0) << failure_;
  ASSERT_EQ(train("parts", 1, 4, "base/final", overrides), 0) << failure_;
  EXPECT_EQ(weights("parts"), weights("whole"));
  const std::vector<float> row = tensor("whole", kEmbeddingName).row(259);
  EXPECT_NE(row, tensor("whole", kEmbeddingName).row(260)) << "both are in the data and trained";
  EXPECT_EQ(train("parts", 1, 6, "base/final", {"optimizer.learning_rate=1e-2"}), 2);
  EXPECT_NE(failure_.find("data.add_tokens"), std::string::npos) << failure_;
}

TEST_F(AddedTokens, WithoutATokenizerTheyAreRefused) {
  make_base(259, true);
  fs::remove(final_folder("base") / "tokenizer.json");
  EXPECT_EQ(train("run", 1, 2, "base/final", {kAdd}), 2);
  EXPECT_NE(failure_.find("data.add_tokens"), std::string::npos) << failure_;
}

// Ten records, each a row: an epoch is ten rows.
class LaterEpochs : public AddedTokens {
 protected:
  void SetUp() override {
    AddedTokens::SetUp();
    std::ofstream rows(folder_.path() / "ten.jsonl");
    for (int i = 0; i < 10; ++i)
      rows << "{\"text\": \"" << std::string(5, static_cast<char>('a' + i)) << "\"}\n";
    rows.close();
    make_base(259, true);
  }
  int train_rows(const std::string& run, int ranks, int steps, int global_batch) {
    return train(
        run, ranks, steps, "base/final",
        {fmt::format("data.train=[{}/ten.jsonl]", folder_.path().string()), "data.packing=false",
         fmt::format("train.global_batch_size={}", global_batch), "optimizer.learning_rate=1e-2"});
  }
  // Of each step; the last row of a step wins.
  std::map<int, double> losses(const std::string& run) const {
    std::map<int, double> result;
    std::ifstream file(folder_.path() / run / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      const auto row = nlohmann::json::parse(line);
      if (row.at("kind") == "train") result[row.at("step")] = row.at("loss");
    }
    return result;
  }
};

TEST_F(LaterEpochs, AResumeInTheSecondEpochIsBitIdentical) {
  ASSERT_EQ(train_rows("whole", 1, 30, 1), 0) << failure_;
  ASSERT_EQ(losses("whole").size(), 30u);
  for (const int stop : {10, 14, 21}) {
    const std::string run = fmt::format("stop{}", stop);
    ASSERT_EQ(train_rows(run, 1, stop, 1), 0) << failure_;
    ASSERT_EQ(train_rows(run, 1, 30, 1), 0) << failure_;
    EXPECT_EQ(losses(run), losses("whole")) << stop;
    EXPECT_EQ(weights(run), weights("whole")) << stop;
  }
}

// Accumulation 4 on two ranks: eight rows a step, and two at the end of each epoch.
TEST_F(LaterEpochs, AResumeUnderAccumulationReadsNothingTwice) {
  ASSERT_EQ(train_rows("whole", 2, 9, 8), 0) << failure_;
  ASSERT_EQ(train_rows("parts", 2, 5, 8), 0) << failure_;
  ASSERT_EQ(train_rows("parts", 2, 9, 8), 0) << failure_;
  EXPECT_EQ(losses("parts"), losses("whole"));
  EXPECT_EQ(weights("parts"), weights("whole"));
  // Other numbers of ranks train on the same rows: the loss of a step is the same but for rounding.
  for (const int ranks : {1, 4}) {
    const std::string run = fmt::format("ranks{}", ranks);
    ASSERT_EQ(train_rows(run, ranks, 9, 8), 0) << failure_;
    for (const auto& [step, loss] : losses("whole")) {
      EXPECT_NEAR(losses(run).at(step), loss, 1e-4 * loss) << ranks << " ranks, step " << step;
    }
  }
}

// Qwen3's files: 151936 rows, 151669 tokens.
TEST(RunTokenizer, FewerTokensThanRowsAreAccepted) {
  TESSERA_REQUIRE_DATA(tokenizer_folder, "tokenizers/qwen3");
  TESSERA_REQUIRE_DATA(model_folder, "configs/Qwen3-8B");
  RunConfig config;
  config.model.path = model_folder.string();
  config.data.tokenizer = tokenizer_folder.string();
  RunTokenizer tokenizer = load_run_tokenizer(config);
  EXPECT_EQ(tokenizer.encoder->vocab_size, 151669);
  EXPECT_EQ(load_run_model(config, tokenizer).model.vocab_size, 151936);
  const std::string plain = tokenizer.encoder->fingerprint;
  // An added token takes a spare row; the 268th needs one more.
  config.data.add_tokens = {"<|mine|>", "<|im_end|>"};
  tokenizer = load_run_tokenizer(config);
  EXPECT_EQ(tokenizer.new_ids, (std::vector<std::int64_t>{151669}));
  EXPECT_EQ(load_run_model(config, tokenizer).model.vocab_size, 151936);
  EXPECT_NE(tokenizer.encoder->fingerprint, plain)
      << "prepared data must not be taken for that of another";
  for (int i = 0; i < 267; ++i) config.data.add_tokens.push_back(fmt::format("<|more_{}|>", i));
  tokenizer = load_run_tokenizer(config);
  EXPECT_EQ(tokenizer.new_ids.back(), 151936);
  EXPECT_EQ(load_run_model(config, tokenizer).model.vocab_size, 151937);
}

}  // namespace
}  // namespace tessera::test
