#include "engine/train/run_config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "engine/core/error.h"
#include "engine/train/run_setup.h"

namespace tessera {
namespace {

constexpr const char* kSmallest =
    "model: {path: m}\n"
    "train: {max_steps: 10}\n"
    "optimizer: {learning_rate: 1e-4}\n"
    "data: {train: a.txt}\n";

RunConfig smallest(const std::vector<std::string>& overrides = {}) {
  return parse_run_config(kSmallest, "run.yaml", overrides);
}

template <typename Action>
std::string user_error(Action action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser) << error.what();
    return error.what();
  }
  return "";
}

std::string message_of(const std::string& text) {
  return user_error([&] { parse_run_config(text, "run.yaml"); });
}

std::string message_of_set(const std::vector<std::string>& overrides) {
  return user_error([&] { smallest(overrides); });
}

TEST(RunConfig, SmallestConfigurationIsValid) {
  const RunConfig c = smallest();
  EXPECT_EQ(c.run.dir, "runs/run");
  EXPECT_EQ(c.train.max_steps, 10);
  EXPECT_EQ(c.data.train.at(0).path, "a.txt");
  EXPECT_EQ(c.locate("train.max_steps"), "run.yaml:2 train.max_steps");
  EXPECT_EQ(c.locate("train.seed"), "run.yaml train.seed");
}

TEST(RunConfig, NothingAtAllNamesEverythingThatIsMissing) {
  EXPECT_EQ(message_of(""),
            "[config] run.yaml model.path is missing: name a Hugging Face folder or, with model.init random, a "
            "config.json file\n"
            "[config] run.yaml train.max_steps is missing: the length of the run is given by one of "
            "train.max_steps, train.epochs, train.max_tokens\n"
            "[config] run.yaml optimizer.learning_rate is missing; 1e-5 suits full fine-tuning, 3e-4 training "
            "from scratch\n"
            "[config] run.yaml data.train is missing: name at least one file or folder");
}

TEST(RunConfig, MistakesOfReadingAndOfMeaningComeTogetherInFileOrder) {
  EXPECT_EQ(message_of("model: {path: m}\n"
                       "train:\n"
                       "  max_stesp: 10\n"          // near enough: no complaint about a missing length
                       "  global_batch_size: 6\n"
                       "  micro_batch_size: 4\n"
                       "optimizer: {learning_rate: fast}\n"
                       "adapter: {type: lora}\n"
                       "parallel: {virtual_stages: 2}\n"
                       "data: {train: a.txt}\n"),
            "[config] run.yaml:3 train.max_stesp is not a key of train; did you mean train.max_steps?\n"
            "[config] run.yaml:5 train.micro_batch_size does not fit: train.global_batch_size 6 is no multiple "
            "of train.micro_batch_size 4\n"
            "[config] run.yaml:6 optimizer.learning_rate is fast; write a number\n"
            "[config] run.yaml:7 adapter is not available in this version: it trains all weights, without LoRA "
            "adapters\n"
            "[config] run.yaml:8 parallel.virtual_stages is 2; it needs parallel.pipeline above 1 and "
            "parallel.pipeline_schedule interleaved, but those are 1 and auto");
}

TEST(RunConfig, LengthIsGivenOnce) {
  EXPECT_EQ(message_of_set({"train.epochs=2"}),
            "[config] --set train.epochs is one of 2 keys for the length of the run: train.max_steps, "
            "train.epochs. Keep one; in --set, key=null removes one of the file");
  EXPECT_EQ(smallest({"train.epochs=2", "train.max_steps=null"}).train.epochs, 2);
}

TEST(RunConfig, RulesBetweenKeysAreChecked) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"train.global_batch_size=8", "train.gradient_accumulation_steps=2"}, "the size of an update"},
      {{"schedule.warmup_steps=1", "schedule.warmup_ratio=0.1"}, "the warm-up"},
      {{"schedule.warmup_steps=11"}, "schedule.warmup_steps 11 is more than train.max_steps 10"},
      {{"schedule.name=wsd", "schedule.decay_steps=6", "schedule.warmup_steps=5"},
       "schedule.warmup_steps 5 and schedule.decay_steps 6 are more than train.max_steps 10"},
      {{"schedule.name=constant", "schedule.decay_steps=5"}, "constant does not decay"},
      {{"optimizer.betas=[0.9]"}, "has 1 numbers; write two"},
      {{"run.ranks=6", "parallel.tensor=4"}, "run.ranks 6 is no multiple of parallel.tensor 4"},
      {{"run.ranks=4", "parallel.tensor=2", "train.global_batch_size=3"},
       "train.global_batch_size 3 is no multiple of train.micro_batch_size 1 on 2 data-parallel ranks"},
      {{"data.train=[]"}, "data.train is missing"},
      {{"data.train=[{format: text}]"}, "data.train has no path on source number 1"},
      {{"data.train=[{path: a, weight: 0.6}, b, {path: c, weight: 0.4}]"},
       "has weights that add up to 1 on 2 of its 3 sources"},
      {{"data.eval=b.txt", "data.eval_fraction=0.1"}, "contradicts"},
      {{"eval.every_steps=5"}, "eval.every_steps needs data to evaluate on"},
      {{"eval.keep_best=true", "data.eval_fraction=0.1"}, "needs eval.every_steps"},
      {{"model.init=random", "model.from_checkpoint=x"}, "contradicts"},
      {{"faults.collective_timeout=soon"}, "write a duration"},
      {{"memory.limit=much"}, "write a size"},
      {{"parallel.tensor=0"}, "it must be at least 1"},
      {{"optimizer.learning_rate=0"}, "it must be above 0"},
  };
  for (const auto& [overrides, expected] : cases) {
    EXPECT_NE(message_of_set(overrides).find(expected), std::string::npos)
        << expected << "\ngot: " << message_of_set(overrides);
  }
}

TEST(RunConfig, UnavailableFeaturesAreRefusedByName) {
  const std::pair<const char*, const char*> cases[] = {
      {"train.stage=sft", "train.stage is sft, which is not available in this version"},
      {"train.stage=dpo", "train.stage is dpo, which is not available in this version"},
      {"model.quantization=nf4", "model.quantization is nf4, which is not available"},
      {"precision.fp8=delayed", "is delayed, which is not available in this version; write current"},
      {"precision.fp8=rowwise",
       "is rowwise, which is not available in this version; write current, blockwise or none"},
      {"faults.spike=skip", "faults.spike is skip, which is not available"},
      {"faults.nan=rollback", "faults.nan is rollback, which is not available"},
      {"dpo.beta=0.1", "dpo is not available in this version"},
      {"data.train_on=last", "data.train_on is not available in this version"},
      {"optimizer.adam_beta2=0.99", "optimizer.adam_beta2 is written as the second of optimizer.betas"},
      {"checkpoint.local_dir=/tmp", "checkpoint.local_dir is not available in this version"},
  };
  for (const auto& [assignment, expected] : cases) {
    EXPECT_NE(message_of_set({assignment}).find(expected), std::string::npos) << message_of_set({assignment});
  }
}

TEST(RunConfig, ShardsByNodeFollowTheLayout) {
  const auto shard = [](std::int64_t ranks, std::int64_t per_node, std::vector<std::string> overrides) {
    overrides.push_back("parallel.shard_group=node");
    return mesh_shape(smallest(overrides), ranks, per_node).shard_size();
  };
  EXPECT_EQ(shard(32, 8, {}), 8);
  EXPECT_EQ(shard(32, 8, {"parallel.tensor=2"}), 4);
  EXPECT_EQ(shard(32, 8, {"parallel.tensor=8"}), 1);
  EXPECT_EQ(shard(32, 8, {"parallel.tensor=2", "parallel.pipeline=8"}), 2);  // a node holds two stages
  EXPECT_EQ(shard(8, 0, {}), 8);
  EXPECT_EQ(mesh_shape(smallest(), 32, 8).shard_size(), 32);
  EXPECT_NE(user_error([&] { shard(32, 8, {"parallel.tensor=16"}); }).find("parallel.shard_group is node"),
            std::string::npos);
  EXPECT_NE(user_error([&] { shard(12, 8, {}); }).find("12 data-parallel ranks"), std::string::npos);
}

TEST(RunConfig, NamesOfOtherToolsAreReadAndWrittenCanonically) {
  std::vector<std::string> notes;
  const RunConfig c = parse_run_config(
      "model: {model_name_or_path: m}\n"
      "train: {per_device_train_batch_size: 2, gradient_accumulation_steps: 4, num_train_epochs: 3, cutoff_len: 512}\n"
      "optimizer: {optim: adamw_torch, lr: 5e-5, clip_grad: 0.5}\n"
      "schedule: {lr_scheduler_type: constant_with_warmup, lr_warmup_iters: 10}\n"
      "parallel: {tensor_model_parallel_size: 2}\n"
      "memory: {gradient_checkpointing: true}\n"
      "checkpoint: {save_steps: 100, save_total_limit: 3}\n"
      "data: {train: [{path: a.json}], sample_packing: false}\n",
      "axolotl.yml", {}, &notes);
  EXPECT_EQ(c.train.micro_batch_size, 2);
  EXPECT_EQ(c.train.epochs, 3);
  EXPECT_EQ(c.train.sequence_length, 512);
  EXPECT_EQ(c.optimizer.name, "adamw");
  EXPECT_EQ(c.schedule.name, "constant");
  EXPECT_EQ(c.parallel.tensor, 2);
  EXPECT_EQ(c.memory.recompute, "full");
  EXPECT_EQ(c.checkpoint.keep_last, 3);
  EXPECT_FALSE(c.data.packing);
  EXPECT_EQ(notes.size(), 14u);
  EXPECT_EQ(notes.front(), "axolotl.yml:1 model.model_name_or_path is read as model.path");
  const std::string text = write_run_config(c);
  EXPECT_NE(text.find("  micro_batch_size: 2\n"), std::string::npos);
  EXPECT_EQ(text.find("per_device"), std::string::npos);
}

TEST(RunConfig, WrittenConfigurationReadsBackTheSame) {
  RunConfig c = smallest({"data.train=[{path: 'a: b', columns: {text: x}}, {path: c}]", "run.time_limit=1h30m",
                          "schedule.warmup_ratio=0.05", "checkpoint.export.every_steps=50"});
  resolve(c, 1, false);
  const std::string text = write_run_config(c);
  const RunConfig again = parse_run_config(text, "config.yaml");
  EXPECT_EQ(write_run_config(again), text);
  EXPECT_EQ(again.run.dir, "runs/run");
  EXPECT_TRUE(changed_keys(c, again).empty());
  // The commented form says the same.
  const RunConfig commented = parse_run_config(write_run_config(c, true), "config.yaml");
  EXPECT_EQ(write_run_config(commented), text);
}

TEST(RunConfig, BatchShapeFollowsTheLayout) {
  const RunConfig c = smallest({"train.global_batch_size=24", "train.micro_batch_size=2"});
  const BatchShape shape = batch_shape(c, 4);
  EXPECT_EQ(shape.gradient_accumulation_steps, 3);
  EXPECT_EQ(shape.global_batch_size, 24);
  EXPECT_EQ(user_error([&] { batch_shape(c, 5); }),
            "[config] --set train.global_batch_size is 24; it must be a multiple of 10: train.micro_batch_size 2 "
            "on 5 data-parallel ranks");
  const RunConfig accumulated = smallest({"train.gradient_accumulation_steps=3", "train.micro_batch_size=2"});
  EXPECT_EQ(batch_shape(accumulated, 4).global_batch_size, 24);
  EXPECT_EQ(batch_shape(smallest(), 4).global_batch_size, 4);
}

TEST(RunConfig, DataParallelSizeIsWhatTheModelLeaves) {
  const RunConfig c = smallest({"parallel.tensor=4"});
  EXPECT_EQ(data_parallel_size(c, 4), 1);
  EXPECT_EQ(data_parallel_size(c, 12), 3);
  for (const std::int64_t ranks : {1, 2, 6}) {
    EXPECT_NE(user_error([&] { data_parallel_size(c, ranks); }).find("--set parallel.tensor is 4"),
              std::string::npos);
  }
}

// Failure kind B04: 7 rows, micro-batch 1, accumulation 4, 2 epochs; and 3 rows.
TEST(RunConfig, StepsOfAnEpochIncludeThePartialUpdate) {
  TrainOptions train;
  train.epochs = 2;
  EXPECT_EQ(total_steps(train, 4, 7), 4);
  train.epochs = 1;
  EXPECT_EQ(total_steps(train, 4, 3), 1);
  EXPECT_EQ(total_steps(train, 4, 8), 2);
  train.epochs = 1.5;
  EXPECT_EQ(total_steps(train, 4, 7), 3);
  train.epochs = 0.01;
  EXPECT_EQ(total_steps(train, 4, 7), 1);
  train.epochs = 0.1;
  EXPECT_EQ(total_steps(train, 1, 30), 3);
  EXPECT_NE(user_error([&] { total_steps(train, 4, 0); }), "");
}

TEST(RunConfig, StepsOfTokensAreWholeUpdates) {
  TrainOptions train;
  train.sequence_length = 1024;
  train.max_tokens = 1;
  EXPECT_EQ(total_steps(train, 8), 1);
  train.max_tokens = 8 * 1024;
  EXPECT_EQ(total_steps(train, 8), 1);
  train.max_tokens = 8 * 1024 + 1;
  EXPECT_EQ(total_steps(train, 8), 2);
  train.max_tokens = 9'000'000'000'000'000'000;
  EXPECT_EQ(total_steps(train, 1ll << 40), 7994);
  train.max_steps = 5;
  EXPECT_EQ(total_steps(train, 8), 5);
}

TEST(RunConfig, ResolveFillsInWhatIsLeftToTheProgram) {
  RunConfig c = smallest({"parallel.tensor=2", "train.gradient_accumulation_steps=4", "train.micro_batch_size=3"});
  resolve(c, 8, false);
  EXPECT_EQ(c.train.global_batch_size, 48);
  EXPECT_FALSE(c.train.gradient_accumulation_steps.has_value());
  EXPECT_EQ(c.precision.compute, "fp32");
  EXPECT_EQ(c.parallel.sequence_parallel, true);
  EXPECT_EQ(c.parallel.zero, 1);
  validate(c);

  RunConfig single = smallest({"precision.compute=bf16"});
  resolve(single, 1, false);
  EXPECT_EQ(single.precision.compute, "bf16");
  EXPECT_EQ(single.parallel.sequence_parallel, false);
  EXPECT_EQ(single.parallel.zero, 0);
  RunConfig gpu = smallest();
  resolve(gpu, 1, true);
  EXPECT_EQ(gpu.precision.compute, "bf16");
}

RunConfig resolved(const std::vector<std::string>& overrides, std::int64_t ranks = 1) {
  RunConfig c = smallest(overrides);
  resolve(c, ranks, false);
  return c;
}

TEST(ResumeRule, FreeKeysMayChange) {
  const RunConfig saved = resolved({"train.global_batch_size=8"}, 1);
  const RunConfig now = resolved(
      {"train.global_batch_size=8", "train.max_steps=20", "train.micro_batch_size=2", "parallel.tensor=2",
       "parallel.zero=0", "memory.recompute=full", "checkpoint.every_steps=5", "checkpoint.export.every_steps=7",
       "log.every_steps=3", "data.eval=[b.txt]", "eval.every_steps=4", "run.dir=elsewhere", "run.time_limit=1h",
       "faults.nan=skip", "data.cache_dir=/tmp/x"},
      4);
  EXPECT_TRUE(changed_keys(saved, now).empty());
  check_resumable(saved, now, 5, {});
}

TEST(ResumeRule, OtherKeysAreRefusedInTheDocumentedWords) {
  const RunConfig saved = resolved({});
  const RunConfig now = resolved({"optimizer.learning_rate=2e-4", "run.dir=no-such-runs/sft"});
  EXPECT_EQ(user_error([&] { check_resumable(saved, now, 500, {}); }),
            "[resume] no-such-runs/sft holds step 500 with optimizer.learning_rate 1e-4; the config says 2e-4. "
            "Continue: --allow-change optimizer.learning_rate. Start anew: --set run.dir=no-such-runs/sft-2.");
  check_resumable(saved, now, 500, {"optimizer.learning_rate"});
  check_resumable(saved, now, 500, {"optimizer"});
}

TEST(ResumeRule, SeveralChangesAreListedTogether) {
  const RunConfig saved = resolved({"data.train=[a, b]", "schedule.warmup_steps=2", "run.dir=no-such-runs/x-2"});
  const RunConfig now = resolved({"train.seed=1", "data.train=[a]", "run.dir=no-such-runs/x-2"});
  const auto changed = changed_keys(saved, now);
  std::vector<std::string> names;
  for (const ChangedKey& key : changed) names.push_back(key.name + ": " + key.saved + " -> " + key.now);
  EXPECT_EQ(names, (std::vector<std::string>{
                       "train.seed: 42 -> 1", "schedule.warmup_steps: 2 -> unset", "data.train[1].path: b -> unset",
                       "data.train[1].format: auto -> unset", "data.train[1].columns: {} -> unset",
                       "data.train[1].labels: auto -> unset"}));
  check_resumable(saved, now, 1, {"train.seed", "schedule", "data.train"});
  const std::string message = user_error([&] { check_resumable(saved, now, 1, {"data"}); });
  EXPECT_EQ(message,
            "[resume] no-such-runs/x-2 holds step 1 with train.seed 42 (the config says 1), schedule.warmup_steps 2 "
            "(the config says unset). Continue: --allow-change train.seed --allow-change schedule.warmup_steps. "
            "Start anew: --set run.dir=no-such-runs/x-3.");
}

TEST(ResumeRule, AllowedNamesMustBeKeys) {
  const RunConfig c = resolved({});
  EXPECT_EQ(user_error([&] { check_resumable(c, c, 1, {"optimizer.learning_rat"}); }),
            "[resume] --allow-change optimizer.learning_rat is not a key of the configuration; did you mean "
            "optimizer.learning_rate?");
  check_resumable(c, c, 1, {"data.train[0].path", "data.train[0]", "model"});
}

TEST(ResumeRule, AnotherGlobalBatchIsAChange) {
  const RunConfig saved = resolved({"train.gradient_accumulation_steps=4"}, 2);
  const RunConfig now = resolved({"train.gradient_accumulation_steps=4"}, 4);
  const auto changed = changed_keys(saved, now);
  ASSERT_EQ(changed.size(), 1u);
  EXPECT_EQ(changed[0].name, "train.global_batch_size");
  EXPECT_EQ(changed[0].saved, "8");
  EXPECT_EQ(changed[0].now, "16");
}

TEST(ShippedConfigs, AllAreValid) {
  const std::filesystem::path root = std::filesystem::path(__FILE__).parent_path() / "../../..";
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(root / "configs/runs")) {
    std::vector<std::string> notes;
    const RunConfig c = load_run_config(entry.path().string(), {"data.train=[book.txt]"}, &notes);
    EXPECT_TRUE(notes.empty()) << entry.path() << " uses another tool's name for a key";
    EXPECT_TRUE(std::filesystem::exists(root / c.model.path)) << c.model.path;
    ++count;
  }
  EXPECT_GE(count, 2);
}

TEST(ShippedConfigs, NoTwoKeysOfASectionShareAName) {
  RunConfig c;
  std::map<std::string, std::string> owner;
  for (const FieldRecord& record : describe_fields([&c](FieldVisitor& v) { c.visit(v); })) {
    const std::string section = record.name.substr(0, record.name.rfind('.') + 1);
    std::vector<std::string> names = record.options.aliases;
    names.push_back(record.name.substr(section.size()));
    for (const std::string& name : names) {
      const auto [found, is_new] = owner.emplace(section + name, record.name);
      EXPECT_TRUE(is_new) << section + name << " means " << found->second << " and " << record.name;
    }
  }
}

}  // namespace
}  // namespace tessera
