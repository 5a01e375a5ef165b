#include "parallel/processes/process_communicator.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "tests/parallel/communicator_conformance.h"

namespace tessera::test {
namespace {

struct Outcome {
  int status = 0;
  std::string text;  // of the error, if any
};

// Runs a body in forked processes, one per rank; an error ends the others through their group.
std::vector<Outcome> run_process_ranks(int size, bool inline_streams, double timeout_seconds,
                                       const std::function<void(RankEnv&)>& body) {
  const std::string path = make_process_board(size);
  std::vector<pid_t> children;
  std::vector<int> pipes;
  for (int rank = 0; rank < size; ++rank) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      alarm(120);  // a hang must not outlive the test
      std::string text;
      try {
        const auto world = join_process_board(path, rank, size, timeout_seconds);
        ContextOptions options;
        options.inline_streams = inline_streams;
        const auto context = make_context(Device{}, options);
        RankEnv env{*world, *context};
        try {
          body(env);
          // A rank that left early would be taken for one that broke off.
          try {
            world->barrier();
          } catch (const AbortedError&) {
          }
        } catch (const std::exception& error) {
          world->abort(error.what());
          throw;
        }
      } catch (const std::exception& error) {
        text = error.what();
      }
      [[maybe_unused]] const ssize_t put = write(ends[1], text.data(), text.size());
      _exit(text.empty() ? 0 : 3);
    }
    close(ends[1]);
    children.push_back(child);
    pipes.push_back(ends[0]);
  }
  std::vector<Outcome> outcomes;
  for (std::size_t i = 0; i < children.size(); ++i) {
    Outcome outcome;
    char buffer[4096];
    for (ssize_t got = 0; (got = read(pipes[i], buffer, sizeof buffer)) > 0;) {
      outcome.text.append(buffer, static_cast<std::size_t>(got));
    }
    close(pipes[i]);
    waitpid(children[i], &outcome.status, 0);
    outcomes.push_back(outcome);
  }
  remove_process_board(path);
  return outcomes;
}

void expect_success(const std::vector<Outcome>& outcomes) {
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    EXPECT_TRUE(WIFEXITED(outcomes[r].status) && WEXITSTATUS(outcomes[r].status) == 0)
        << "rank " << r << ": " << outcomes[r].text << " (status " << outcomes[r].status << ")";
  }
}

TEST(ProcessCommunicator, PassesLastingCases) {
  for (const auto& [size, inline_streams] :
       std::vector<std::pair<int, bool>>{{1, true}, {2, true}, {3, false}, {4, true}}) {
    SCOPED_TRACE(size);
    expect_success(run_process_ranks(size, inline_streams, 60, [](RankEnv& env) {
      for (const ConformanceCase& one : lasting_cases()) one.run(env);
    }));
  }
}

TEST(ProcessCommunicator, PassesEndingCases) {
  for (const auto& [size, inline_streams] :
       std::vector<std::pair<int, bool>>{{2, true}, {3, false}}) {
    for (const ConformanceCase& one : ending_cases()) {
      SCOPED_TRACE(one.name);
      const double timeout = std::string(one.name) == "timeout" ? kShortTimeout : 60;
      expect_success(run_process_ranks(size, inline_streams, timeout, one.run));
    }
  }
}

// kill -9 of one rank: the others, in the world and below it, end with an error that names it.
TEST(ProcessCommunicator, KilledRankEndsTheOthers) {
  const auto outcomes = run_process_ranks(3, true, 60, [](RankEnv& env) {
    const auto stream = env.context.make_stream("comm");
    const auto group = env.world.split(0, 0, "sub");
    if (env.world.rank() == 1) kill(getpid(), SIGKILL);
    std::vector<float> data(100000);
    group->all_reduce({data.data(), DType::kF32, {100000}, Device{}}, ReduceOp::kSum, *stream);
  });
  EXPECT_TRUE(WIFSIGNALED(outcomes[1].status) && WTERMSIG(outcomes[1].status) == SIGKILL);
  for (const int r : {0, 2}) {
    EXPECT_NE(outcomes[static_cast<std::size_t>(r)].text.find("rank 1 was lost"), std::string::npos)
        << outcomes[static_cast<std::size_t>(r)].text;
  }
}

TEST(ProcessCommunicator, KilledSenderEndsTheReceiver) {
  const auto outcomes = run_process_ranks(2, false, 60, [](RankEnv& env) {
    const auto stream = env.context.make_stream("comm");
    if (env.world.rank() == 1) kill(getpid(), SIGKILL);
    std::vector<float> data(10);
    env.world.recv({data.data(), DType::kF32, {10}, Device{}}, 1, *stream);
    stream->synchronize();
  });
  EXPECT_NE(outcomes[0].text.find("rank 1 was lost"), std::string::npos) << outcomes[0].text;
}

TEST(ProcessCommunicator, RankThatLeavesIsNotWaitedFor) {
  const auto outcomes = run_process_ranks(2, true, 60, [](RankEnv& env) {
    // As an exception that leaves a rank without a word would.
    if (env.world.rank() == 1) throw Error(ErrorKind::kUser, "row 7 is bad");
    const auto stream = env.context.make_stream("comm");
    std::vector<float> data(10);
    env.world.all_reduce({data.data(), DType::kF32, {10}, Device{}}, ReduceOp::kSum, *stream);
  });
  EXPECT_EQ(outcomes[1].text, "row 7 is bad");
  EXPECT_NE(outcomes[0].text.find("row 7 is bad"), std::string::npos) << outcomes[0].text;
}

TEST(ProcessCommunicator, TwoProcessesCannotBeOneRank) {
  const std::string path = make_process_board(2);
  const auto first = join_process_board(path, 0, 2, 1);
  EXPECT_THROW(join_process_board(path, 0, 2, 1), Error);
  remove_process_board(path);
  EXPECT_THROW(join_process_board(path, 1, 2, 1), Error);  // it has no name any more
}

TEST(ProcessCommunicator, MeetsOverTheControlPlane) {
  auto planes = make_local_control_planes(3);
  std::vector<std::thread> threads;
  for (auto& plane : planes) {
    threads.emplace_back([&control = *plane] {
      const auto world = make_process_communicator(control, 60);
      const auto context = make_context(Device{});
      RankEnv env{*world, *context};
      for (const char* name : {"all_reduce", "send_recv", "split"}) {
        EXPECT_NO_THROW(find_case(name).run(env)) << name;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace tessera::test
