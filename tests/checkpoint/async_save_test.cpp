// Asynchronous saves: what is saved is the state at the call, whatever happens to it afterwards.
#include <gtest/gtest.h>

#include <chrono>

#include "tests/checkpoint/support/checkpoint_ranks.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using test::HostStates;
using test::Rank;

CheckpointWriterOptions slow_async(double bytes_per_second) {
  CheckpointWriterOptions options;
  options.is_async = true;
  options.block_bytes = 4096;
  options.keep_last = 0;
  options.bytes_per_second = bytes_per_second;
  return options;
}

// The content of a checkpoint, whole, by one rank.
std::string difference_at(const fs::path& checkpoint, std::int64_t salt) {
  std::string result;
  test::run_ranks(1, [&](Rank& rank) {
    HostStates states = test::banded_states(0, 1);
    CheckpointReader(checkpoint).read(states.states(), rank.stream);
    result = states.difference(salt);
  });
  return result;
}

class AsyncSave : public ::testing::TestWithParam<bool> {};

TEST_P(AsyncSave, LaterChangesAreNotInTheFile) {
  const test::TempFolder folder;
  const test::TempFolder reference;
  const auto with_inline_streams = GetParam();
  test::run_ranks(
      3,
      [&](Rank& rank) {
        HostStates states = test::banded_states(rank.rank(), 3);
        for (NamedState& state : states.states()) {
          state.changes_only_in_update = state.name != "counter";
        }
        CheckpointWriter writer(folder.path(), rank.world, rank.stream, slow_async(30'000));
        CheckpointWriter synchronous(reference.path(), rank.world, rank.stream);
        for (int step = 1; step <= 6; ++step) {
          // "Forward": only the counter may change. "Update": everything. A write of the host is not ordered
          // by the stream, which copies the counter at once, so it waits for the stream.
          rank.stream.synchronize();
          *static_cast<std::int64_t*>(states.states()[2].pieces[0].data.data) = -step;
          writer.before_update(rank.stream);
          rank.stream.synchronize();
          states.fill(step);
          if (step != 3) continue;
          synchronous.save(3, states.states(), "{}", rank.stream);
          writer.save(3, states.states(), "{\"step\":3}", rank.stream);
        }
        EXPECT_TRUE(writer.is_saving());
        EXPECT_FALSE(fs::exists(folder / "step-000003"));
        EXPECT_TRUE(writer.finish(rank.stream));
        EXPECT_FALSE(writer.is_saving());
      },
      with_inline_streams);
  EXPECT_EQ(difference_at(folder / "step-000003", 3), "");
  for (const char* name : {"rank-00000.safetensors", "rank-00001.safetensors",
                           "rank-00002.safetensors"}) {
    EXPECT_EQ(test::read_file(folder / "step-000003" / name),
              test::read_file(reference / "step-000003" / name));
  }
}

TEST_P(AsyncSave, SavesFasterThanTheyFinishAreAllKept) {
  const test::TempFolder folder;
  test::run_ranks(
      2,
      [&](Rank& rank) {
        HostStates states = test::banded_states(rank.rank(), 2);
        CheckpointWriter writer(folder.path(), rank.world, rank.stream, slow_async(100'000));
        for (int step = 1; step <= 4; ++step) {
          rank.stream.synchronize();
          states.fill(step);
          EXPECT_TRUE(writer.save(step, states.states(), "{}", rank.stream));
        }
        rank.stream.synchronize();
        states.fill(9);
        EXPECT_TRUE(writer.finish(rank.stream));
        EXPECT_TRUE(writer.finish(rank.stream));  // nothing left
        const std::vector<SaveOutcome> outcomes = writer.take_outcomes();
        ASSERT_EQ(outcomes.size(), 4u);
        for (int step = 1; step <= 4; ++step) {
          const SaveOutcome& outcome = outcomes[static_cast<std::size_t>(step - 1)];
          EXPECT_EQ(outcome.step, step);
          EXPECT_TRUE(outcome.is_saved);
          EXPECT_EQ(outcome.error, "");
          EXPECT_GT(outcome.bytes, 64u * 48u * 4u);
          EXPECT_GT(outcome.seconds, 0);
        }
        EXPECT_TRUE(writer.take_outcomes().empty());
      },
      GetParam());
  for (int step = 1; step <= 4; ++step) {
    EXPECT_EQ(difference_at(folder / step_folder_name(step), step), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Streams, AsyncSave, ::testing::Bool(), [](const auto& info) {
  return info.param ? std::string("Inline") : std::string("Worker");
});

// Rank 0 commits on its own when the last rank's file is there: the training threads do nothing.
TEST(AsyncCommit, NeedsNoFurtherCall) {
  const test::TempFolder folder;
  test::run_ranks(3, [&](Rank& rank) {
    HostStates states = test::banded_states(rank.rank(), 3);
    states.fill(1);
    CheckpointWriter writer(folder.path(), rank.world, rank.stream, slow_async(0));
    writer.save(1, states.states(), "{}", rank.stream);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!fs::exists(folder / "step-000001") && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    EXPECT_TRUE(fs::exists(folder / "step-000001/commit.json"));
    if (rank.rank() == 0) {
      while (writer.is_saving() && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      const std::vector<SaveOutcome> early = writer.take_outcomes();
      ASSERT_EQ(early.size(), 1u);
      EXPECT_TRUE(early[0].is_saved);
    }
    writer.finish(rank.stream);
    EXPECT_EQ(writer.take_outcomes().size(), rank.rank() == 0 ? 0u : 1u);
  });
  EXPECT_EQ(difference_at(folder / "step-000001", 1), "");
}

// An error ends the run while a save is in flight: its files are completed if that is quick.
TEST(AsyncCommit, ASaveInFlightSurvivesTheEndOfTheRun) {
  const test::TempFolder folder;
  EXPECT_THROW(test::run_ranks(2,
                               [&](Rank& rank) {
                                 HostStates states = test::banded_states(rank.rank(), 2);
                                 states.fill(4);
                                 CheckpointWriter writer(folder.path(), rank.world, rank.stream,
                                                         slow_async(200'000));
                                 writer.save(4, states.states(), "{}", rank.stream);
                                 throw std::runtime_error("training failed");
                               }),
               std::runtime_error);
  EXPECT_EQ(difference_at(folder / "step-000004", 4), "");
}

TEST(AsyncCommit, AHopelessSaveInFlightIsGivenUp) {
  const test::TempFolder folder;
  const auto start = std::chrono::steady_clock::now();
  test::run_ranks(2, [&](Rank& rank) {
    HostStates states = test::banded_states(rank.rank(), 2);
    CheckpointWriterOptions options = slow_async(10);  // hours
    options.exit_grace_seconds = 0.1;
    CheckpointWriter writer(folder.path(), rank.world, rank.stream, options);
    writer.save(4, states.states(), "{}", rank.stream);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(2));
  EXPECT_FALSE(find_latest_checkpoint(folder.path()).has_value());
  test::run_ranks(1, [&](Rank& rank) {  // the next run cleans up
    CheckpointWriter writer(folder.path(), rank.world, rank.stream);
    EXPECT_TRUE(fs::is_empty(folder.path()));
  });
}

}  // namespace
}  // namespace tessera
