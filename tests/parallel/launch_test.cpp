// Whole jobs of small programs (launch_program_harness.cpp): how they end, what they print, that
// they end at all.
#include "parallel/launch.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>

#include "parallel/mpi_loader.h"
#include "tests/parallel/communicator_conformance.h"

namespace tessera::test {
namespace {

struct Ended {
  int code = -1;
  std::string output;

  int count(const std::string& part) const {
    int found = 0;
    for (std::size_t at = 0; (at = output.find(part, at)) != std::string::npos; at += part.size())
      ++found;
    return found;
  }
};

// Variables that a launcher around the tests may have set.
std::string clean_environment() {
  std::string text = "env";
  for (const char* name :
       {"TESSERA_RANK", "TESSERA_WORLD_SIZE", "TESSERA_RENDEZVOUS", "RANK", "WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_JOB_ID",
        "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"}) {
    text += std::string(" -u ") + name;
  }
  return text;
}

std::string program(const std::string& what, const std::string& before = "") {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  return fmt::format(
      "{} TESSERA_TEST_LAUNCH='{}' timeout -k 1 100 {} '{}' --gtest_also_run_disabled_tests "
      "--gtest_filter=LaunchProgram.DISABLED_Run",
      clean_environment(), what, before, self);
}

// Runs a shell command to its end; `on_line` sees each line of its output as it comes.
Ended run_command(const std::string& command,
                  const std::function<void(const std::string&)>& on_line = {}) {
  Ended ended;
  std::FILE* pipe = popen(fmt::format("( {} ) 2>&1 < /dev/null", command).c_str(), "r");
  if (pipe == nullptr) return ended;
  char line[4096];
  while (std::fgets(line, sizeof line, pipe) != nullptr) {
    ended.output += line;
    if (on_line) on_line(line);
  }
  const int status = pclose(pipe);
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return ended;
}

Ended run_program(const std::string& what,
                  const std::function<void(const std::string&)>& on_line = {}) {
  return run_command(program(what), on_line);
}

void expect_end(const Ended& ended, int code, const std::string& text) {
  EXPECT_EQ(ended.code, code) << ended.output;
  EXPECT_EQ(ended.count(text), 1) << ended.output;
}

// The launcher above a rank; 0 if it cannot be told. Never init: a test must not signal that.
pid_t parent_of(pid_t process) {
  pid_t parent = 0;
  std::FILE* file = std::fopen(fmt::format("/proc/{}/stat", process).c_str(), "r");
  if (file == nullptr) return 0;
  if (std::fscanf(file, "%*d %*s %*c %d", &parent) != 1 || parent <= 1) parent = 0;
  std::fclose(file);
  return parent;
}

class Launch : public testing::TestWithParam<const char*> {
 protected:
  std::string mode() const { return GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Modes, Launch, testing::Values("threads", "processes"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(Launch, RunsEveryRank) {
  for (const int size : {1, 3}) {
    const Ended ended = run_program(fmt::format("{} {} ok", mode(), size));
    EXPECT_EQ(ended.code, 0) << ended.output;
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(ended.count(fmt::format("sum {} on rank {} of {}, local {}", size * (size + 1) / 2,
                                        rank, size, rank)),
                1)
          << ended.output;
    }
  }
}

TEST_P(Launch, CodeOfTheBodiesIsTheCodeOfTheJob) {
  const Ended ended = run_program(mode() + " 2 returns_75");
  EXPECT_EQ(ended.code, 75) << ended.output;
  EXPECT_EQ(ended.count("error"), 0) << ended.output;
}

TEST_P(Launch, FirstErrorEndsTheJob) {
  expect_end(run_program(mode() + " 3 throws_user"), 2, "error: rank 2: row 7 is bad");
  expect_end(run_program(mode() + " 3 throws_standard"), 3, "error: rank 2: index 9 of 3");
  expect_end(run_program(mode() + " 3 throws_below_a_mesh"), 4, "error: rank 2: the disk is full");
  expect_end(run_program(mode() + " 3 throws_late"), 4, "error: rank 2: the disk is full");
}

TEST_P(Launch, CommonErrorIsToldOnce) {
  const Ended ended = run_program(mode() + " 4 all_throw");
  expect_end(ended, 2, "the layout does not fit");
}

TEST_P(Launch, SleepingRankIsNamedAndEnded) {
  const Ended ended = run_program(mode() + " 3 sleeps");
  EXPECT_EQ(ended.code, 4) << ended.output;
  EXPECT_EQ(ended.count("waited 1 s for rank 2 (which has called nothing yet)"), 1) << ended.output;
}

TEST_P(Launch, StopsAtOneEdge) {
  // The first process that says who it is gets the signal: a rank, which with threads is the job. It
  // is sent again until it is answered: under the thread sanitizer a signal can be lost.
  pid_t process = 0;
  std::jthread sender;
  const Ended ended = run_program(mode() + " 3 stops_when_asked", [&](const std::string& line) {
    int rank = 0;
    int number = 0;
    if (std::sscanf(line.c_str(), "rank %d is process %d", &rank, &number) == 2) process = number;
    if (line.find("SIGTERM") != std::string::npos) sender.request_stop();
    if (line != "running\n" || sender.joinable() || process <= 1) return;
    sender = std::jthread([process](const std::stop_token& stop) {
      for (int wait = 0; !stop.stop_requested(); ++wait) {
        if (wait % 20 == 0) kill(process, SIGTERM);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
    });
  });
  sender.request_stop();
  EXPECT_EQ(ended.code, 75) << ended.output;
  EXPECT_EQ(ended.count("stops at"), 3) << ended.output;
  EXPECT_EQ(ended.count("SIGTERM"), 3 + ended.count("SIGTERM received")) << ended.output;
  const std::size_t at = ended.output.find("stops at ");
  ASSERT_NE(at, std::string::npos);
  const std::string edge = ended.output.substr(at, ended.output.find(" for", at) - at);
  EXPECT_EQ(ended.count(edge + " for"), 3) << ended.output;
}

TEST_P(Launch, SecondInterruptEndsAtOnce) {
  pid_t process = 0;
  int sent = 0;
  const Ended ended = run_program(mode() + " 2 ignores_requests", [&](const std::string& line) {
    int rank = 0;
    int number = 0;
    if (std::sscanf(line.c_str(), "rank %d is process %d", &rank, &number) == 2) process = number;
    const bool is_ready =
        line == "running\n" || line.find("press Ctrl-C again") != std::string::npos;
    if (!is_ready || process == 0 || sent == 2) return;
    // Ctrl-C reaches the launcher: with processes that is the rank's parent.
    const pid_t target = mode() == "processes" ? parent_of(process) : process;
    if (target == 0 || (sent == 1 && line == "running\n")) return;
    kill(target, SIGINT);
    ++sent;
  });
  EXPECT_EQ(sent, 2) << ended.output;
  EXPECT_EQ(ended.code, 130) << ended.output;
}

TEST(LaunchProcesses, LostRankEndsTheJob) {
  expect_end(run_program("processes 3 killed"), 4, "was ended by SIGKILL");
  expect_end(run_program("processes 3 exits_with_0"), 4, "rank 2 (");
  expect_end(run_program("processes 3 exits"), 4, "ended with exit code 7");
  expect_end(run_program("processes 3 crashes"), 3, "was ended by SIGABRT");
}

TEST(LaunchProcesses, NobodyOutlivesTheLauncher) {
  std::vector<pid_t> ranks;
  run_program("processes 2 ignores_requests", [&](const std::string& line) {
    int rank = 0;
    int number = 0;
    if (std::sscanf(line.c_str(), "rank %d is process %d", &rank, &number) != 2) return;
    ranks.push_back(number);
    if (ranks.size() < 2) return;
    const pid_t launcher = parent_of(number);
    ASSERT_NE(launcher, 0);
    kill(launcher, SIGKILL);
  });
  // The pipe of their output closed, so they are gone.
  EXPECT_EQ(ranks.size(), 2u);
}

// Ranks that a launcher with TESSERA_* (a script, say) has started, meeting over TCP.
TEST(LaunchExternal, MeetsByTheEnvironment) {
  const auto rank_of = [](int rank, const std::string& what, int port) {
    return fmt::format("TESSERA_RANK={} TESSERA_WORLD_SIZE=3 TESSERA_RENDEZVOUS=127.0.0.1:{}", rank,
                       port) +
           " " + what;
  };
  const auto job = [&](const std::string& name, int port) {
    std::string command;
    for (int rank = 0; rank < 3; ++rank) {
      command += "( " + program("external 3 " + name, "env " + rank_of(rank, "", port)) +
                 fmt::format("; echo code of rank {} is $? ) & ", rank);
    }
    return run_command(command + " wait");
  };
  const int port = 20000 + static_cast<int>(getpid() % 9000);
  const Ended good = job("ok", port);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(good.count(fmt::format("sum 6 on rank {}", rank)), 1) << good.output;
    EXPECT_EQ(good.count(fmt::format("code of rank {} is 0", rank)), 1) << good.output;
  }
  const Ended bad = job("throws_user", port + 1);
  EXPECT_EQ(bad.count("row 7 is bad"), 1) << bad.output;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(bad.count(fmt::format("code of rank {} is 2", rank)), 1) << bad.output;
  }
  const Ended killed = job("killed", port + 2);
  EXPECT_EQ(killed.count("rank 2 ("), 1) << killed.output;
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(killed.count(fmt::format("code of rank {} is 4", rank)), 1) << killed.output;
  }
}

TEST(LaunchExternal, WrongWorldIsRefused) {
  const Ended other = run_command(program(
      "external 4 ok", "env TESSERA_RANK=0 TESSERA_WORLD_SIZE=3 TESSERA_RENDEZVOUS=127.0.0.1:1"));
  EXPECT_EQ(other.code, 2) << other.output;
  EXPECT_EQ(other.count("started 3 ranks, but the configuration asks for 4"), 1) << other.output;
  const Ended alone = run_program("external 4 ok");
  EXPECT_EQ(alone.code, 2) << alone.output;
  EXPECT_EQ(alone.count("none is at work"), 1) << alone.output;
}

class LaunchMpi : public testing::Test {
 protected:
  void SetUp() override {
    if (std::system("mpirun --version > /dev/null 2>&1") != 0) GTEST_SKIP() << "there is no mpirun";
    const auto module =
        std::filesystem::read_symlink("/proc/self/exe").parent_path() / "libtessera_mpi.so";
    if (std::getenv("TESSERA_MPI_MODULE") == nullptr && !std::filesystem::exists(module)) {
      GTEST_SKIP() << "the MPI module is not built";
    }
  }
  static Ended mpirun(int ranks, const std::string& name) {
    return run_command(
        program(fmt::format("external {} {}", ranks, name),
                fmt::format("mpirun --allow-run-as-root --oversubscribe -n {}", ranks)));
  }
};

TEST_F(LaunchMpi, PassesLastingCases) {
  for (const int ranks : {2, 3, 4}) {
    const Ended ended = mpirun(ranks, "lasting");
    EXPECT_EQ(ended.code, 0) << ended.output;
    EXPECT_EQ(ended.count("passed lasting"), ranks) << ended.output;
  }
}

TEST_F(LaunchMpi, OneRankNeedsNoMpi) {
  const Ended ended = mpirun(1, "lasting");
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_EQ(ended.count("passed lasting"), 1) << ended.output;
}

TEST_F(LaunchMpi, PassesEndingCases) {
  for (const ConformanceCase& one : ending_cases()) {
    if (std::string(one.name) == "timeout") continue;  // its short timeout is for groups of its own
    const Ended ended = mpirun(3, one.name);
    EXPECT_EQ(ended.count(fmt::format("passed {}", one.name)), 3) << one.name << "\n"
                                                                  << ended.output;
  }
}

TEST_F(LaunchMpi, FirstErrorEndsTheJob) {
  expect_end(mpirun(3, "throws_user"), 2, "error: rank 2: row 7 is bad");
  const Ended sleeping = mpirun(3, "sleeps");
  EXPECT_EQ(sleeping.code, 4) << sleeping.output;
  EXPECT_EQ(sleeping.count("waited 1 s for rank 2"), 1) << sleeping.output;
  const Ended killed = mpirun(3, "killed");
  EXPECT_NE(killed.code, 0) << killed.output;
}

TEST_F(LaunchMpi, MissingModuleIsNotNeededOnOneMachine) {
  const Ended ended = run_command(program(
      "external 2 ok",
      "env TESSERA_MPI_MODULE=/nonexistent mpirun --allow-run-as-root --oversubscribe -n 2"));
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_EQ(ended.count("sum 3 on rank"), 2) << ended.output;
}

// CUDA IPC: processes that share a GPU, or have one each.
TEST(LaunchOnGpus, ProcessesReachEachOthersMemory) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  for (const int ranks : {1, 2, 3}) {
    for (const char* name : {"gathers", "poisoned", "late"}) {
      const Ended ended = run_program(fmt::format("processes {} window_{}", ranks, name));
      EXPECT_EQ(ended.code, 0) << ended.output;
      EXPECT_EQ(ended.count(fmt::format("passed window_{} on rank", name)), ranks) << ended.output;
    }
  }
}

}  // namespace
}  // namespace tessera::test
