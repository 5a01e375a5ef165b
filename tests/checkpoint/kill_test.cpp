// kill -9 at any moment of a save: the last complete checkpoint is found, whole, without help.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "parallel/processes/process_communicator.h"
#include "tests/checkpoint/support/checkpoint_ranks.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using test::HostStates;
using test::Rank;

// About 600 kB over all ranks, in 40 blocks.
HostStates some_states(int rank, int ranks) { return test::banded_states(rank, ranks, 500, 300); }

struct Loop {
  fs::path folder;
  bool is_async = false;
  bool repeats_step = false;  // the same step again and again: every save replaces one
};

// Saves without end, beginning behind the newest checkpoint; writes each committed step to `report`.
void save_forever(const Loop& loop, Communicator& world, int report) {
  const auto context = make_context(Device{}, {});
  const auto stream = context->make_stream("main");
  CheckpointWriterOptions options;
  options.block_bytes = 16384;
  options.is_async = loop.is_async;
  options.exit_grace_seconds = 0.5;
  CheckpointWriter writer(loop.folder, world, *stream, options);
  const auto latest = find_latest_checkpoint(loop.folder);
  std::int64_t step = latest ? CheckpointReader(*latest).step() : 0;
  HostStates states = some_states(world.rank(), world.size());
  for (;;) {
    if (!loop.repeats_step || step == 0) ++step;
    writer.before_update(*stream);
    states.fill(step);
    writer.save(step, states.states(), "{}", *stream);
    for (const SaveOutcome& outcome : writer.take_outcomes()) {
      if (world.rank() != 0) continue;
      [[maybe_unused]] const ssize_t put = ::write(report, &outcome.step, sizeof(outcome.step));
    }
  }
}

struct Child {
  pid_t process = -1;
  int report = -1;  // end of a pipe
};

Child start(const Loop& loop, const std::string& board, int rank, int ranks) {
  int ends[2] = {-1, -1};
  EXPECT_EQ(::pipe(ends), 0);
  Child child;
  child.process = ::fork();
  if (child.process == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::alarm(120);  // a hang must not outlive the test
    ::close(ends[0]);
    try {
      const auto world = ranks == 1 ? make_self_communicator()
                                    : join_process_board(board, rank, ranks, 60);
      save_forever(loop, *world, ends[1]);
    } catch (const std::exception&) {
      ::_exit(3);  // a peer is gone
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  child.report = ends[0];
  return child;
}

// The last step the child reported as saved; closes the pipe.
std::int64_t last_report(Child& child) {
  std::int64_t step = 0;
  std::int64_t last = 0;
  while (::read(child.report, &step, sizeof(step)) == sizeof(step)) last = step;
  ::close(child.report);
  return last;
}

void check_latest(const fs::path& folder, std::int64_t at_least) {
  const auto latest = find_latest_checkpoint(folder);
  if (at_least > 0) {
    ASSERT_TRUE(latest.has_value());
  }
  if (!latest) return;
  const std::vector<CheckpointDamage> damages = verify_checkpoint(*latest);
  EXPECT_TRUE(damages.empty()) << damages[0].text;
  const CheckpointReader reader(*latest);
  EXPECT_GE(reader.step(), at_least);
  test::run_ranks(1, [&](Rank& rank) {
    HostStates states = some_states(0, 1);
    reader.read(states.states(), rank.stream);
    EXPECT_EQ(states.difference(reader.step()), "");
  });
}

// When to kill: at any moment of the first three saves, whose time depends on the disk.
class KillTime {
 public:
  explicit KillTime(unsigned seed) : random_(seed) {}

  // In the first round waits for two saves, so that there is a checkpoint; then for a random time.
  void wait(Child& child) {
    if (window_ == 0) {
      const auto begin = std::chrono::steady_clock::now();
      std::int64_t step = 0;
      for (int i = 0; i < 2; ++i) {
        ASSERT_EQ(::read(child.report, &step, sizeof(step)), ssize_t{sizeof(step)});
        saved_ = step;
      }
      window_ = std::chrono::duration_cast<std::chrono::microseconds>(
                    std::chrono::steady_clock::now() - begin)
                    .count();
      window_ += window_ / 2;
    }
    sleep(static_cast<std::uint64_t>(window_));
  }
  void sleep(std::uint64_t at_most) {
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % std::max<std::uint64_t>(1, at_most)));
  }
  std::int64_t saved() const { return saved_; }
  std::size_t victim(std::size_t count) { return random_() % count; }

 private:
  std::mt19937 random_;
  std::int64_t window_ = 0;
  std::int64_t saved_ = 0;
};

void kill_one_process(Loop loop, int rounds, unsigned seed) {
  const test::TempFolder folder;
  loop.folder = folder.path();
  KillTime time(seed);
  std::int64_t saved = 0;
  for (int round = 0; round < rounds; ++round) {
    Child child = start(loop, "", 0, 1);
    time.wait(child);
    saved = std::max(saved, time.saved());
    ::kill(child.process, SIGKILL);
    ::waitpid(child.process, nullptr, 0);
    saved = std::max(saved, last_report(child));
    check_latest(folder.path(), saved);
  }
}

TEST(KilledSave, Synchronous) { kill_one_process({}, 17, 1); }
TEST(KilledSave, Asynchronous) { kill_one_process({{}, true, false}, 17, 2); }
TEST(KilledSave, ReplacingAStep) { kill_one_process({{}, false, true}, 17, 3); }

// One rank of four is killed. Its peers notice and end; half the time they are killed as well, a little
// later, as a launcher does.
TEST(KilledSave, OneRankOfFour) {
  constexpr int kRanks = 4;
  const test::TempFolder folder;
  KillTime time(4);
  std::int64_t saved = 0;
  for (int round = 0; round < 12; ++round) {
    const Loop loop{folder.path(), round % 2 == 1, false};
    const std::string board = make_process_board(kRanks);
    std::vector<Child> children;
    for (int rank = 0; rank < kRanks; ++rank) children.push_back(start(loop, board, rank, kRanks));
    time.wait(children[0]);
    saved = std::max(saved, time.saved());
    const std::size_t victim = time.victim(kRanks);
    ::kill(children[victim].process, SIGKILL);
    if (round % 4 < 2) {
      time.sleep(20'000);
      for (const Child& child : children) ::kill(child.process, SIGKILL);
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      Child& child = children[static_cast<std::size_t>(rank)];
      saved = std::max(saved, last_report(child));
      int status = 0;
      ::waitpid(child.process, &status, 0);
      // Killed by this test or ended by the loss of a peer, never by the alarm.
      EXPECT_TRUE((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) ||
                  (WIFEXITED(status) && WEXITSTATUS(status) == 3))
          << status;
    }
    remove_process_board(board);
    check_latest(folder.path(), saved);
  }
}

}  // namespace
}  // namespace tessera
