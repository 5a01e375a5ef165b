// Disks that are full, read-only or fail: the run hears of it on every rank, and what was saved before
// stays as it was.
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <optional>

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/checkpoint/support/checkpoint_ranks.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using test::HostStates;
using test::Rank;

// A file system of its own in memory; only root may make one.
class TinyDisk {
 public:
  explicit TinyDisk(const std::string& options) {
    is_mounted_ = ::mount("tmpfs", folder_.path().c_str(), "tmpfs", 0, options.c_str()) == 0;
  }
  ~TinyDisk() {
    if (is_mounted_) ::umount2(folder_.path().c_str(), MNT_DETACH);
  }
  bool is_mounted() const { return is_mounted_; }
  void make_read_only(bool on) {
    unsigned long flags = MS_REMOUNT;
    if (on) flags |= MS_RDONLY;
    ASSERT_EQ(::mount("tmpfs", folder_.path().c_str(), "tmpfs", flags, nullptr), 0);
  }
  const fs::path& path() const { return folder_.path(); }
  fs::path operator/(const std::string& name) const { return folder_ / name; }
  std::uint64_t free_bytes() const { return fs::space(folder_.path()).available; }
  // Takes the free space but for `left` bytes.
  void fill_up(std::uint64_t left) const {
    std::ofstream out(folder_ / "filler", std::ios::binary | std::ios::trunc);
    const std::uint64_t free = free_bytes();
    if (free > left) out << std::string(free - left, 'x');
  }

 private:
  test::TempFolder folder_;
  bool is_mounted_ = false;
};

#define REQUIRE_TINY_DISK(name, options)                                             \
  TinyDisk name(options);                                                            \
  if (!name.is_mounted()) GTEST_SKIP() << "mounting a small tmpfs needs root rights"

// About 400 kB over all ranks.
HostStates some_states(int rank, int ranks) { return test::banded_states(rank, ranks, 512, 200); }

std::string difference_at(const fs::path& checkpoint, std::int64_t salt) {
  std::string result;
  test::run_ranks(1, [&](Rank& rank) {
    HostStates states = some_states(0, 1);
    CheckpointReader(checkpoint).read(states.states(), rank.stream);
    result = states.difference(salt);
  });
  return result;
}

// No partial folder, and `latest` and the checkpoint of that step are as they were.
void expect_only_step(const fs::path& folder, std::int64_t step) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    EXPECT_TRUE(name == "latest" || name == "filler" || name == step_folder_name(step)) << name;
  }
  const auto latest = find_latest_checkpoint(folder);
  ASSERT_TRUE(latest.has_value());
  EXPECT_EQ(latest->filename(), step_folder_name(step));
  EXPECT_EQ(difference_at(*latest, step), "");
}

TEST(SaveFailure, ATooSmallDiskIsKnownAtTheStart) {
  REQUIRE_TINY_DISK(disk, "size=300k");
  test::run_ranks(2, [&](Rank& rank) {
    HostStates states = some_states(rank.rank(), 2);
    CheckpointWriter writer(disk.path(), rank.world, rank.stream);
    test::expect_error(ErrorKind::kTransient, {"bytes", "are free", "checkpoint.dir"},
                       [&] { writer.check_space(states.states(), rank.stream); });
  });
}

TEST(SaveFailure, AFullDiskLeavesTheEarlierCheckpoint) {
  REQUIRE_TINY_DISK(disk, "size=1m");
  test::run_ranks(3, [&](Rank& rank) {
    HostStates states = some_states(rank.rank(), 3);
    CheckpointWriter writer(disk.path(), rank.world, rank.stream);
    states.fill(1);
    writer.check_space(states.states(), rank.stream);
    writer.save(1, states.states(), "{}", rank.stream);
    rank.world.barrier();
    if (rank.rank() == 0) disk.fill_up(130'000);  // 30 % of the save
    rank.world.barrier();
    states.fill(2);
    test::expect_error(ErrorKind::kTransient, {"step 2 was not saved (rank 0)", "are free"},
                       [&] { writer.save(2, states.states(), "{}", rank.stream); });
  });
  expect_only_step(disk.path(), 1);
}

// The space is there when the save begins and gone when files are written.
TEST(SaveFailure, ADiskThatFillsUpInTheSave) {
  for (const std::uint64_t left : {0ul, 8'000ul, 16'000ul, 24'000ul, 32'000ul, 40'000ul}) {
    REQUIRE_TINY_DISK(disk, "size=1200k");
    std::atomic<bool> saved{true};
    test::run_ranks(3, [&](Rank& rank) {
      HostStates states = some_states(rank.rank(), 3);
      CheckpointWriterOptions options;
      options.is_async = true;
      options.block_bytes = 4096;
      options.bytes_per_second = 700'000;
      options.on_error = OnSaveError::kContinue;
      CheckpointWriter writer(disk.path(), rank.world, rank.stream, options);
      states.fill(1);
      writer.save(1, states.states(), "{}", rank.stream);
      EXPECT_TRUE(writer.finish(rank.stream));
      states.fill(2);
      EXPECT_TRUE(writer.save(2, states.states(), "{}", rank.stream));
      rank.world.barrier();
      if (rank.rank() == 0) disk.fill_up(left);
      rank.world.barrier();
      const bool is_good = writer.finish(rank.stream);
      writer.take_outcomes();
      if (!is_good) {
        saved = false;
        if (rank.rank() == 0) {
          EXPECT_EQ(find_latest_checkpoint(disk.path())->filename(), "step-000001");
          fs::remove(disk / "filler");
        }
        rank.world.barrier();
      }
      // With space again the run saves again.
      states.fill(3);
      if (!is_good) {
        EXPECT_TRUE(writer.save(3, states.states(), "{}", rank.stream));
        EXPECT_TRUE(writer.finish(rank.stream));
        const std::vector<SaveOutcome> outcomes = writer.take_outcomes();
        ASSERT_EQ(outcomes.size(), 1u);
        EXPECT_TRUE(outcomes[0].is_saved);
      }
    });
    const auto latest = find_latest_checkpoint(disk.path());
    ASSERT_TRUE(latest.has_value());
    EXPECT_EQ(latest->filename(), saved ? "step-000002" : "step-000003");
    EXPECT_EQ(difference_at(*latest, saved ? 2 : 3), "");
    if (left == 0) {
      EXPECT_FALSE(saved);
    }
  }
}

TEST(SaveFailure, AReadOnlyDiskLeavesTheEarlierCheckpoint) {
  REQUIRE_TINY_DISK(disk, "size=2m");
  test::run_ranks(2, [&](Rank& rank) {
    HostStates states = some_states(rank.rank(), 2);
    CheckpointWriterOptions options;
    options.on_error = OnSaveError::kContinue;
    CheckpointWriter writer(disk.path(), rank.world, rank.stream, options);
    states.fill(1);
    EXPECT_TRUE(writer.save(1, states.states(), "{}", rank.stream));
    rank.world.barrier();
    if (rank.rank() == 0) disk.make_read_only(true);
    rank.world.barrier();
    states.fill(2);
    EXPECT_FALSE(writer.save(2, states.states(), "{}", rank.stream));
    const std::vector<SaveOutcome> outcomes = writer.take_outcomes();
    ASSERT_EQ(outcomes.size(), 2u);
    EXPECT_FALSE(outcomes[1].is_saved);
    EXPECT_NE(outcomes[1].error.find("Read-only file system"), std::string::npos)
        << outcomes[1].error;
    rank.world.barrier();
    if (rank.rank() == 0) {
      expect_only_step(disk.path(), 1);
      disk.make_read_only(false);
    }
    rank.world.barrier();
    EXPECT_TRUE(writer.save(2, states.states(), "{}", rank.stream));
  });
  EXPECT_EQ(find_latest_checkpoint(disk.path())->filename(), "step-000002");
}

TEST(SaveFailure, AFolderThatCannotBeWrittenIsRefusedAtTheStart) {
  if (::geteuid() == 0) {
    REQUIRE_TINY_DISK(disk, "size=100k");
    disk.make_read_only(true);
    test::run_ranks(2, [&](Rank& rank) {
      test::expect_error(ErrorKind::kTransient, {"Read-only file system"}, [&] {
        CheckpointWriter writer(disk.path(), rank.world, rank.stream);
      });
    });
    return;
  }
  const test::TempFolder folder;
  fs::permissions(folder.path(), fs::perms::owner_read | fs::perms::owner_exec);
  test::run_ranks(2, [&](Rank& rank) {
    test::expect_error(ErrorKind::kTransient, {"Permission denied", "folder"}, [&] {
      CheckpointWriter writer(folder.path(), rank.world, rank.stream);
    });
  });
  fs::permissions(folder.path(), fs::perms::owner_all);
}

TEST(SaveFailure, APathThatIsAFileIsRefused) {
  const test::TempFolder folder;
  folder.write("checkpoints", "not a folder");
  test::run_ranks(2, [&](Rank& rank) {
    EXPECT_THROW(CheckpointWriter(folder / "checkpoints", rank.world, rank.stream), Error);
  });
}

// One rank's part cannot be written: in a process of its own, whose files may not grow past a limit.
TEST(SaveFailure, AWriteErrorOnOneRankFailsTheSaveOnAll) {
  const test::TempFolder folder;
  const ::pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100'000, 100'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    int failed_ranks = 0;
    bool is_clean = true;
    try {
      std::atomic<int> failures{0};
      test::run_ranks(3, [&](Rank& rank) {
        HostStates states;
        NamedState& state = states.add("weight/matrix", DType::kF32, {1000, 100});
        // Rank 1 alone has more than a file may hold.
        if (rank.rank() == 0) states.add_piece(state, 0, 10, 0, 100);
        if (rank.rank() == 1) states.add_piece(state, 10, 980, 0, 100);
        if (rank.rank() == 2) states.add_piece(state, 990, 10, 0, 100);
        CheckpointWriter writer(folder.path(), rank.world, rank.stream);
        try {
          writer.save(1, states.states(), "{}", rank.stream);
        } catch (const Error& error) {
          const std::string text = error.what();
          if (error.kind() == ErrorKind::kTransient &&
              text.find("(rank 1)") != std::string::npos &&
              text.find("rank-00001.safetensors") != std::string::npos) {
            ++failures;
          }
        }
      });
      failed_ranks = failures;
      is_clean = fs::is_empty(folder.path());
    } catch (...) {
      ::_exit(100);
    }
    ::_exit(failed_ranks == 3 && is_clean ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// A state that is wrong on one rank must not leave the others waiting.
TEST(SaveFailure, AWrongStateOnOneRankIsTheSameErrorOnAll) {
  const test::TempFolder folder;
  std::atomic<int> failures{0};
  test::run_ranks(3, [&](Rank& rank) {
    HostStates states = test::banded_states(rank.rank(), 3);
    if (rank.rank() == 2) states.states()[0].pieces[0].rows += 1;
    CheckpointWriterOptions options;
    options.on_error = OnSaveError::kContinue;  // which is for disks, not for bugs
    CheckpointWriter writer(folder.path(), rank.world, rank.stream, options);
    test::expect_error(ErrorKind::kInternal, {"step 5 was not saved (rank 2)", "weight/matrix"},
                       [&] { writer.save(5, states.states(), "{}", rank.stream); });
    ++failures;
  });
  EXPECT_EQ(failures, 3);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

// Ranks whose "shared" folder is not the same one.
TEST(SaveFailure, AFolderThatIsNotSharedIsRefused) {
  const test::TempFolder folder;
  const test::TempFolder other;
  test::run_ranks(2, [&](Rank& rank) {
    CheckpointWriterOptions options;
    options.timeout_seconds = 0.2;
    test::expect_error(ErrorKind::kUser, {"rank 1", "does not see", "share"}, [&] {
      CheckpointWriter writer(rank.rank() == 0 ? folder.path() : other.path(), rank.world,
                              rank.stream, options);
    });
  });
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

}  // namespace
}  // namespace tessera
