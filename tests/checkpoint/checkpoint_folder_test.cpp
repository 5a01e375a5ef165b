#include "checkpoint/checkpoint_folder.h"

#include <gtest/gtest.h>

#include "tests/checkpoint/support/checkpoint_ranks.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using test::HostStates;
using test::Rank;

// Saves the steps one after the other with one rank.
void save_steps(const fs::path& folder, const std::vector<std::int64_t>& steps,
                CheckpointWriterOptions options = {}, std::set<std::int64_t> kept = {}) {
  test::run_ranks(1, [&](Rank& rank) {
    CheckpointWriter writer(folder, rank.world, rank.stream, options);
    writer.set_kept_steps(kept);
    for (const std::int64_t step : steps) {
      HostStates states = test::banded_states(0, 1, 8, 4);
      states.fill(step);
      writer.save(step, states.states(), "{}", rank.stream);
    }
  });
}

CheckpointWriterOptions keep_all() {
  CheckpointWriterOptions options;
  options.keep_last = 0;
  return options;
}

std::vector<std::int64_t> steps_in(const fs::path& folder) {
  std::vector<std::int64_t> steps;
  for (const CheckpointInfo& info : list_checkpoints(folder)) {
    if (info.is_complete()) steps.push_back(info.step);
  }
  return steps;
}

std::int64_t latest_step(const fs::path& folder, std::string* note = nullptr) {
  const auto path = find_latest_checkpoint(folder, note);
  return path ? CheckpointReader(*path).step() : -1;
}

TEST(CheckpointFolder, Names) {
  EXPECT_EQ(step_folder_name(500), "step-000500");
  EXPECT_EQ(step_folder_name(12'345'678), "step-12345678");
  EXPECT_EQ(parse_step_folder_name("step-000500"), 500);
  EXPECT_EQ(parse_step_folder_name("step-12345678"), 12'345'678);
  for (const char* name : {"step-500", "step-", "step-0000500", "step-000500x", "step-000500.partial-1-2",
                           "Step-000500", "step-00050a", "step--00500", "step-99999999999999999999",
                           "step-000500.removed", "step-000500/", ""}) {
    EXPECT_FALSE(parse_step_folder_name(name).has_value()) << name;
  }
}

TEST(CheckpointFolder, MissingOrEmptyFolderHasNone) {
  const test::TempFolder folder;
  EXPECT_FALSE(find_latest_checkpoint(folder / "none").has_value());
  EXPECT_TRUE(list_checkpoints(folder / "none").empty());
  EXPECT_FALSE(find_latest_checkpoint(folder.path()).has_value());
}

TEST(CheckpointFolder, LatestIsFoundWithoutAGoodMarker) {
  const test::TempFolder folder;
  save_steps(folder.path(), {1, 2, 3}, keep_all());
  EXPECT_EQ(test::read_file(folder / "latest"), "step-000003\n");
  EXPECT_EQ(latest_step(folder.path()), 3);

  std::string note;
  folder.write("latest", "step-000002\n");
  EXPECT_EQ(latest_step(folder.path(), &note), 2);  // the marker decides
  EXPECT_EQ(note, "");
  fs::remove(folder / "latest");
  EXPECT_EQ(latest_step(folder.path(), &note), 3);
  EXPECT_NE(note.find("latest"), std::string::npos);
  for (const char* text : {"", "rubbish", "step-000009\n", "../step-000001\n", "step-000003.partial-x\n"}) {
    folder.write("latest", text);
    note.clear();
    EXPECT_EQ(latest_step(folder.path(), &note), 3) << text;
    EXPECT_NE(note.find("latest"), std::string::npos);
  }
  fs::remove(folder / "latest");
  fs::create_directory(folder / "latest");
  EXPECT_EQ(latest_step(folder.path()), 3);
}

TEST(CheckpointFolder, DamagedOnesArePassedOver) {
  const test::TempFolder folder;
  save_steps(folder.path(), {1, 2, 3, 4}, keep_all());
  fs::remove(folder / "step-000004/rank-00000.safetensors");
  fs::resize_file(folder / "step-000003/rank-00000.safetensors", 4097);
  std::string note;
  EXPECT_EQ(latest_step(folder.path(), &note), 2);
  EXPECT_NE(note.find("step-000004/rank-00000.safetensors is missing"), std::string::npos) << note;
  EXPECT_NE(note.find("has 4097 bytes"), std::string::npos) << note;
  fs::remove(folder / "step-000002/commit.json");
  EXPECT_EQ(latest_step(folder.path()), 1);
  fs::rename(folder / "step-000001", folder / "step-000007");  // not the step it says
  EXPECT_EQ(latest_step(folder.path()), -1);
  EXPECT_EQ(list_checkpoints(folder.path()).size(), 4u);
}

TEST(CheckpointFolder, NewestIsTheLastSavedNotTheHighestStep) {
  const test::TempFolder folder;
  save_steps(folder.path(), {100, 200, 300}, keep_all());
  save_steps(folder.path(), {150}, keep_all());  // a run that went back
  EXPECT_EQ(latest_step(folder.path()), 150);
  fs::remove(folder / "latest");
  EXPECT_EQ(latest_step(folder.path()), 150);
  EXPECT_EQ(steps_in(folder.path()), (std::vector<std::int64_t>{150, 300, 200, 100}));
}

TEST(CheckpointFolder, SavingAStepAgainReplacesIt) {
  const test::TempFolder folder;
  save_steps(folder.path(), {5}, keep_all());
  const std::string before = test::read_file(folder / "step-000005/index.json");
  folder.write("step-000005/stray", "x");
  test::run_ranks(1, [&](Rank& rank) {
    CheckpointWriter writer(folder.path(), rank.world, rank.stream, keep_all());
    HostStates states = test::banded_states(0, 1, 8, 4);
    states.fill(77);
    writer.save(5, states.states(), "{\"again\":1}", rank.stream);
    HostStates read = test::banded_states(0, 1, 8, 4);
    CheckpointReader(folder / "step-000005").read(read.states(), rank.stream);
    EXPECT_EQ(read.difference(77), "");
  });
  EXPECT_NE(test::read_file(folder / "step-000005/index.json"), before);
  EXPECT_FALSE(fs::exists(folder / "step-000005/stray"));
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"latest", "step-000005"}));
}

TEST(CheckpointFolder, AnInterruptedReplacementIsFoundAndPutBack) {
  const test::TempFolder folder;
  save_steps(folder.path(), {5}, keep_all());
  fs::rename(folder / "step-000005", folder / replaced_folder_name(5));
  EXPECT_EQ(latest_step(folder.path()), 5);
  remove_partial_saves(folder.path());
  EXPECT_TRUE(fs::exists(folder / "step-000005/commit.json"));
  EXPECT_FALSE(fs::exists(folder / replaced_folder_name(5)));
  // With both there the replacement had happened.
  fs::create_directory(folder / replaced_folder_name(5));
  remove_partial_saves(folder.path());
  EXPECT_EQ(latest_step(folder.path()), 5);
  EXPECT_FALSE(fs::exists(folder / replaced_folder_name(5)));
}

TEST(CheckpointFolder, LeftoversGoAndStrangersStay) {
  const test::TempFolder folder;
  save_steps(folder.path(), {1}, keep_all());
  for (const char* name : {"step-000002.partial-deadbeef-0", "step-000001.removed"}) {
    fs::create_directory(folder / name);
    folder.write(std::string(name) + "/rank-00000.safetensors", "half");
  }
  folder.write(".latest.tmp-123", "step-000009\n");
  folder.write(".probe-0000000000000000", "");
  folder.write("notes.txt", "mine");
  folder.write("step-000003", "a file, not a folder");
  fs::create_directory(folder / "best");
  fs::create_directory(folder / "step-12.partial-x");  // not a name of ours
  EXPECT_EQ(latest_step(folder.path()), 1);

  save_steps(folder.path(), {2, 4});  // keeps two
  EXPECT_EQ(steps_in(folder.path()), (std::vector<std::int64_t>{4, 2}));
  for (const char* gone : {"step-000002.partial-deadbeef-0", "step-000001.removed", ".latest.tmp-123",
                           ".probe-0000000000000000", "step-000001"}) {
    EXPECT_FALSE(fs::exists(folder / gone)) << gone;
  }
  for (const char* stays : {"notes.txt", "step-000003", "best", "step-12.partial-x"}) {
    EXPECT_TRUE(fs::exists(folder / stays)) << stays;
  }

  remove_all_saves(folder.path());
  EXPECT_EQ(steps_in(folder.path()), (std::vector<std::int64_t>{}));
  EXPECT_FALSE(fs::exists(folder / "latest"));
  for (const char* stays : {"notes.txt", "step-000003", "best", "step-12.partial-x"}) {
    EXPECT_TRUE(fs::exists(folder / stays)) << stays;
  }
  remove_all_saves(folder / "nowhere");
}

TEST(CheckpointFolder, RetentionKeepsTheNewestAndEverySoManySteps) {
  const test::TempFolder folder;
  CheckpointWriterOptions options;
  options.keep_last = 2;
  options.keep_every = 40;
  save_steps(folder.path(), {10, 20, 30, 40, 50, 60, 70, 80, 90, 100}, options, {30});
  EXPECT_EQ(steps_in(folder.path()), (std::vector<std::int64_t>{100, 90, 80, 40, 30}));
  // A damaged one is neither counted nor touched.
  fs::remove(folder / "step-000090/index.json");
  options.keep_last = 1;
  options.keep_every = 0;
  save_steps(folder.path(), {110}, options);
  EXPECT_EQ(steps_in(folder.path()), (std::vector<std::int64_t>{110}));
  EXPECT_TRUE(fs::exists(folder / "step-000090"));
}

TEST(CheckpointFolder, RetentionPolicy) {
  std::vector<CheckpointInfo> complete;
  for (const std::int64_t step : {9, 8, 7, 6, 5, 4}) {
    complete.push_back({{}, step, static_cast<std::uint64_t>(step), 0, ""});
  }
  EXPECT_EQ(steps_to_remove(complete, 9, {2, 0, {}}), (std::vector<std::int64_t>{7, 6, 5, 4}));
  EXPECT_EQ(steps_to_remove(complete, 5, {1, 0, {}}), (std::vector<std::int64_t>{8, 7, 6, 4}));
  EXPECT_EQ(steps_to_remove(complete, 9, {1, 4, {6}}), (std::vector<std::int64_t>{7, 5}));
  EXPECT_TRUE(steps_to_remove(complete, 9, {0, 0, {}}).empty());
  EXPECT_TRUE(steps_to_remove(complete, std::nullopt, {6, 0, {}}).empty());
  EXPECT_TRUE(steps_to_remove({}, std::nullopt, {1, 0, {}}).empty());
}

}  // namespace
}  // namespace tessera
