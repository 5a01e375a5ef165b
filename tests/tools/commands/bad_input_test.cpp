// What users get wrong, as they meet it: one clear message, the right exit code, no hang, nothing
// lost.
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temp_folder.h"
#include "tests/tools/commands/program.h"
#include "tests/tools/commands/small_run.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;

class BadInput : public ::testing::Test {
 protected:
  void SetUp() override {
    write_model_and_text(folder_);
    folder_.write("run.yaml", fmt::format(R"(
run: {{dir: {0}/run}}
model: {{path: {0}/model.json, init: random}}
train: {{sequence_length: 16, micro_batch_size: 1, global_batch_size: 4, max_steps: 4}}
optimizer: {{learning_rate: 1e-3}}
data: {{train: [{0}/text.txt], tokenizer: bytes, cache_dir: {0}/cache}}
checkpoint: {{every_steps: 2}}
)",
                                          folder_.path().string()));
  }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  Ended train(const std::string& more = "", Launcher launcher = Launcher::kThreads,
              int ranks = 1) const {
    return run_train(launcher, ranks, path("run.yaml") + " " + more);
  }
  // Ends with `code`, says every one of `parts`, and says "error:" once.
  static void expect_error(const Ended& ended, int code, const std::vector<std::string>& parts) {
    EXPECT_EQ(ended.code, code) << ended.output;
    for (const std::string& part : parts) {
      EXPECT_NE(ended.output.find(part), std::string::npos) << "no \"" << part << "\" in\n"
                                                            << ended.output;
    }
    const std::size_t first = ended.output.find("error:");
    EXPECT_NE(first, std::string::npos) << ended.output;
    EXPECT_EQ(ended.output.find("error:", first + 1), std::string::npos) << ended.output;
  }

  TempFolder folder_;
};

TEST_F(BadInput, MalformedConfigurationsNameFileAndLine) {
  folder_.write("bad.yaml", "run: {dir: x\ntrain: [\n");
  expect_error(run_tessera("train " + path("bad.yaml")), 2, {"bad.yaml:"});
  folder_.write("bad.json", "{\"run\": {\"dir\": \"x\"},,}");
  expect_error(run_tessera("train " + path("bad.json")), 2, {"bad.json:1"});
  expect_error(run_tessera("train " + path("missing.yaml")), 2, {"missing.yaml"});
}

TEST_F(BadInput, UnknownAndDoubledKeysAreReportedTogether) {
  folder_.write("keys.yaml", "train: {sequence_lenght: 16}\noptimizer: {eps: 1e-8, eps: 1e-6}\n");
  expect_error(run_tessera("train " + path("keys.yaml")), 2,
               {"keys.yaml:1", "sequence_lenght", "sequence_length", "keys.yaml:2", "eps"});
}

TEST_F(BadInput, ImpossibleLayoutsNameTheNumbers) {
  for (const Launcher launcher : {Launcher::kThreads, Launcher::kProcesses}) {
    expect_error(train("--set parallel.tensor=3", launcher, 3), 2, {"num_attention_heads 4"});
  }
  expect_error(train("--set parallel.tensor=2", Launcher::kThreads, 3), 2,
               {"parallel.tensor", "run.ranks 3"});
}

TEST_F(BadInput, TokenIdsOutOfRangeAreRefused) {
  folder_.write("rows.jsonl", "{\"input_ids\": [1, 2, 3, 264, 4]}\n");
  expect_error(train("--set 'data.train=[" + path("rows.jsonl") + "]'"), 2, {"264"});
  folder_.write("negative.jsonl", "{\"input_ids\": [1, -2, 3, 4]}\n");
  expect_error(train("--set 'data.train=[" + path("negative.jsonl") + "]'"), 2, {"-2"});
}

TEST_F(BadInput, DataWithoutATokenIsRefused) {
  folder_.write("empty.txt", "");
  expect_error(train("--set 'data.train=[" + path("empty.txt") + "]'"), 2, {"empty.txt"});
}

TEST_F(BadInput, EmptyAndHugeRowsTrain) {
  std::string rows = "{\"text\": \"\"}\n{\"text\": \"short\"}\n";
  rows += "{\"text\": \"" + std::string(3000000, 'x') + "\"}\n";
  folder_.write("rows.jsonl", rows);
  const Ended ended = train("--set 'data.train=[" + path("rows.jsonl") + "]'");
  EXPECT_EQ(ended.code, 0) << ended.output;
}

// B54 to B58: a header that lies must not be believed.
TEST_F(BadInput, HostileWeightsAreRefused) {
  const auto with_header = [](std::uint64_t length, const std::string& header,
                              std::size_t payload) {
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i) & 0xff);
    return bytes + header + std::string(payload, '\0');
  };
  const auto with_entry = [&](const std::string& entry) {
    const std::string header = "{\"model.norm.weight\":" + entry + "}";
    return with_header(header.size(), header, 128);
  };
  fs::create_directory(folder_ / "hf");
  fs::copy(folder_ / "model.json", folder_ / "hf/config.json");
  const std::string pretrained = "--set model.init=pretrained --set model.path=" + path("hf");
  expect_error(train(pretrained), 2, {"safetensors"});
  for (const std::string& bytes :
       {std::string(), std::string("short"), with_header(~0ull, "{}", 0),
        with_header(1ull << 40, "{}", 0), with_header(4, "{{{{", 0),
        with_entry(R"({"dtype":"F32","shape":[32],"data_offsets":[0,4096]})"),
        with_entry(R"({"dtype":"F32","shape":[32],"data_offsets":[128,0]})"),
        with_entry(R"({"dtype":"F32","shape":[-32],"data_offsets":[0,128]})"),
        with_entry(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,128]})"),
        with_entry(R"({"dtype":"F99","shape":[32],"data_offsets":[0,128]})"),
        with_entry(R"({"dtype":"F32","shape":[32],"data_offsets":[0,128]})")}) {
    folder_.write("hf/model.safetensors", bytes);
    expect_error(train(pretrained), 2, {"model"});
    EXPECT_FALSE(fs::exists(folder_ / "run/metrics.jsonl"));
  }
}

TEST_F(BadInput, AFolderThatCannotBeMadeEndsAtOnce) {
  folder_.write("file", "in the way");
  expect_error(train("--set run.dir=" + path("file/run")), 4, {"file/run"});
}

// A slip in run.dir must not cost the user a folder.
TEST_F(BadInput, OverwriteRemovesOnlyWhatARunWrote) {
  folder_.write("file", "in the way");
  expect_error(train("--overwrite --set run.dir=" + path("file")), 2, {path("file"), "not a folder"});
  EXPECT_EQ(read_file(folder_ / "file"), "in the way");

  // Saves in a folder of their own end with the run, too: a later start would go on from them.
  const std::string there = "--set checkpoint.dir=" + path("saves");
  ASSERT_EQ(train(there).code, 0);
  folder_.write("run/notes.txt", "mine");
  folder_.write("saves/notes.txt", "mine");
  ASSERT_EQ(train(there + " --overwrite --set train.max_steps=2").code, 0);
  EXPECT_EQ(read_file(folder_ / "run/notes.txt"), "mine");
  EXPECT_EQ(read_file(folder_ / "saves/notes.txt"), "mine");
  EXPECT_TRUE(fs::exists(folder_ / "saves/step-000002"));
  EXPECT_FALSE(fs::exists(folder_ / "saves/step-000004"));
  const Ended again = train(there);
  EXPECT_EQ(again.code, 0) << again.output;
  EXPECT_NE(again.output.find("step-000002"), std::string::npos) << again.output;
}

// A small tmpfs that fills up: the run reports it, and what was saved before stays usable.
TEST_F(BadInput, AFullDiskLosesNothingSaved) {
  if (geteuid() != 0) GTEST_SKIP() << "mounting a small disk needs root";
  fs::create_directory(folder_ / "disk");
  const std::string mount =
      fmt::format("mount -t tmpfs -o size=1m tmpfs '{}' 2>/dev/null", path("disk"));
  if (std::system(mount.c_str()) != 0) GTEST_SKIP() << "a small disk cannot be mounted here";
  struct Unmount {
    std::string command;
    ~Unmount() { [[maybe_unused]] const int ignored = std::system(command.c_str()); }
  } unmount{fmt::format("umount '{}'", path("disk"))};
  const std::string there =
      "--set checkpoint.on_error=stop --set checkpoint.dir=" + path("disk/saves");
  const Ended first = train(there + " --set train.max_steps=2");
  ASSERT_EQ(first.code, 0) << first.output;
  folder_.write("disk/filler", "");
  std::ofstream(folder_ / "disk/filler") << std::string(4 << 20, 'x');  // as much as there is room
  expect_error(train(there), 4, {"[checkpoint]"});
  fs::remove(folder_ / "disk/filler");
  const Ended again = train(there);
  EXPECT_EQ(again.code, 0) << again.output;
  EXPECT_NE(again.output.find("step-000002"), std::string::npos) << again.output;
}

// A disk that has become read-only: as with a full one.
TEST_F(BadInput, AReadOnlyDiskLosesNothingSaved) {
  if (geteuid() != 0) GTEST_SKIP() << "mounting a small disk needs root";
  fs::create_directory(folder_ / "disk");
  if (::mount("tmpfs", path("disk").c_str(), "tmpfs", 0, "size=4m") != 0) {
    GTEST_SKIP() << "a small disk cannot be mounted here";
  }
  struct Unmount {
    std::string at;
    ~Unmount() { ::umount2(at.c_str(), MNT_DETACH); }
  } unmount{path("disk")};
  const auto make_read_only = [&](bool on) {
    return ::mount("tmpfs", path("disk").c_str(), "tmpfs", MS_REMOUNT | (on ? MS_RDONLY : 0),
                   nullptr) == 0;
  };
  const std::string there = "--set run.dir=" + path("disk/run");
  const Ended first = train(there + " --set train.max_steps=2");
  ASSERT_EQ(first.code, 0) << first.output;
  ASSERT_TRUE(make_read_only(true));
  for (const Launcher launcher : {Launcher::kThreads, Launcher::kProcesses}) {
    expect_error(train(there, launcher, 2), 4, {"disk/run", "ead-only"});
  }
  ASSERT_TRUE(make_read_only(false));
  const Ended again = train(there);
  EXPECT_EQ(again.code, 0) << again.output;
  EXPECT_NE(again.output.find("step-000002"), std::string::npos) << again.output;
}

// B58: the index says what belongs to the model, and all of it must be there.
TEST_F(BadInput, MissingAndStrayShardsAreNamed) {
  ASSERT_EQ(train().code, 0);
  const fs::path hf = folder_ / "run/final";
  const std::string pretrained = "--overwrite --set run.dir=" + path("second") +
                                 " --set model.init=pretrained --set model.path=" + hf.string();
  fs::rename(hf / "model.safetensors", hf / "model-00001-of-00002.safetensors");
  const auto index = [&](const std::string& shard) {
    std::ofstream(hf / "model.safetensors.index.json")
        << "{\"weight_map\":{\"model.norm.weight\":\"model-00001-of-00002.safetensors\","
           "\"model.embed_tokens.weight\":\""
        << shard << "\"}}";
  };
  index("model-00002-of-00002.safetensors");
  for (const Launcher launcher : {Launcher::kThreads, Launcher::kProcesses}) {
    expect_error(train(pretrained, launcher, 2), 2, {"model-00002-of-00002.safetensors"});
  }
  // Every shard is there, but the index leaves tensors of the model out.
  index("model-00001-of-00002.safetensors");
  expect_error(train(pretrained), 2, {"model.layers.0."});
  EXPECT_FALSE(fs::exists(folder_ / "second/metrics.jsonl"));
}

TEST_F(BadInput, DoubledKeysOfJsonFilesAreRefused) {
  folder_.write("doubled.json", "{\"train\": {\"max_steps\": 1,\n \"max_steps\": 2}}");
  expect_error(run_tessera("train " + path("doubled.json")), 2, {"doubled.json:2", "max_steps"});
}

TEST_F(BadInput, LabelsThatFitNothingAreRefused) {
  folder_.write("rows.jsonl", "{\"input_ids\": [1, 2, 3, 4], \"labels\": [9, 8, 7, 6]}\n");
  expect_error(train("--set 'data.train=[" + path("rows.jsonl") + "]'"), 2,
               {"rows.jsonl", "labels"});
}

// Every command meets a hostile file with the same care.
TEST_F(BadInput, OtherCommandsRefuseHostileWeights) {
  ASSERT_EQ(train().code, 0);
  const std::string hf = path("run/final");
  fs::resize_file(folder_ / "run/final/model.safetensors",
                  fs::file_size(folder_ / "run/final/model.safetensors") - 1);
  for (const std::string& command :
       {"eval --device cpu --model " + hf + " --data " + path("text.txt"),
        "generate --device cpu --model " + hf + " --prompt x",
        "export --model " + hf + " --output " + path("copy")}) {
    SCOPED_TRACE(command);
    expect_error(run_tessera(command), 2, {"model.safetensors"});
  }
  EXPECT_FALSE(fs::exists(folder_ / "copy/model.safetensors"));
  EXPECT_EQ(run_tessera("verify " + hf).code, 1);
}

// A newer checkpoint that is damaged is passed over, and the user is told.
TEST_F(BadInput, ADamagedCheckpointIsPassedOverAloud) {
  ASSERT_EQ(train().code, 0);
  fs::remove(folder_ / "run/checkpoints/step-000004/commit.json");
  const Ended again = train("--set train.max_steps=5");
  EXPECT_EQ(again.code, 0) << again.output;
  EXPECT_NE(again.output.find("warning: [resume]"), std::string::npos) << again.output;
  EXPECT_NE(again.output.find("at step 2"), std::string::npos) << again.output;
}

// B24: however the ranks were started, all of them end with the first error.
TEST_F(BadInput, ALossThatIsNotFiniteEndsEveryRank) {
  for (const Launcher launcher : {Launcher::kThreads, Launcher::kProcesses, Launcher::kMpirun}) {
    if (launcher == Launcher::kMpirun && !has_mpirun()) continue;
    const Ended ended =
        train("--overwrite --set optimizer.learning_rate=1e30 --set optimizer.max_grad_norm=0",
              launcher, 4);
    EXPECT_EQ(ended.code, 3) << ended.output;
    EXPECT_NE(ended.output.find("not finite"), std::string::npos) << ended.output;
  }
}

// A launcher may start its ranks on other files or options: no step is made with two learning rates.
TEST_F(BadInput, RanksWithOtherConfigurationsAreRefused) {
  if (!has_mpirun()) GTEST_SKIP() << "there is no mpirun";
  const std::string rank = fmt::format("-n 1 '{}' train {} --set run.device=cpu", TESSERA_PROGRAM,
                                       path("run.yaml"));
  const auto ended_with = [&](const std::string& other) {
    return run_tessera(
        fmt::format("train {} --set run.device=cpu : {} --set {}", path("run.yaml"), rank, other),
        "mpirun --allow-run-as-root --oversubscribe -n 1");
  };
  for (const char* other : {"optimizer.learning_rate=2e-3", "parallel.tensor=2"}) {
    const Ended ended = ended_with(other);
    EXPECT_EQ(ended.code, 2) << ended.output;
    const std::string key(other, std::string_view(other).find('='));
    EXPECT_NE(ended.output.find("error: rank 1: [config] rank 1 was started with " + key),
              std::string::npos)
        << ended.output;
    EXPECT_FALSE(fs::exists(folder_ / "run/metrics.jsonl"));
  }
  const Ended ended = ended_with("data.cache_dir=" + path("cache2"));
  EXPECT_EQ(ended.code, 0) << ended.output;
}

TEST_F(BadInput, InitOffersOnlyWhatIsAccepted) {
  const Ended init = run_tessera("init");
  ASSERT_EQ(init.code, 0) << init.output;
  for (const char* word : {"sft", "dpo", "rollback", "nf4"}) {
    EXPECT_EQ(init.output.find(word), std::string::npos) << word;
  }
}

}  // namespace
}  // namespace tessera::test
