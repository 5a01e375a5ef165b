#include <gtest/gtest.h>

#include <numeric>

#include "engine/device/cpu/cpu_stream.h"
#include "parallel/peer_window.h"
#include "tests/parallel/thread_ranks.h"
#include "tests/parallel/window_harness.h"

namespace tessera::test {
namespace {

class ThreadWindow : public testing::TestWithParam<bool> {
 protected:
  ThreadRankOptions options(double timeout_seconds = 60) const {
    return {GetParam(), timeout_seconds};
  }
};

INSTANTIATE_TEST_SUITE_P(Streams, ThreadWindow, testing::Values(true, false),
                         [](const auto& info) { return info.param ? "Inline" : "Worker"; });

Tensor view(std::vector<float>& data) {
  return {data.data(), DType::kF32, {static_cast<std::int64_t>(data.size())}, Device{}};
}

TEST_P(ThreadWindow, PassesTheCasesOfAllWindows) {
  for (const int size : {1, 2, 3}) {
    run_thread_ranks(size, options(), [](RankEnv& env) {
      WindowEnv window{env.world.rank(), env.world.size(), env.context,
                       [&](const Tensor& memory, int num_flags) {
                         return env.world.make_window(memory, num_flags, env.context);
                       },
                       [&] { env.world.barrier(); }};
      for (const char* name : {"gathers", "poisoned"}) run_window_case(name, window);
    });
  }
}

// A gather by copies alone, over several rounds: put, signal, wait, read, tell that the place is
// free.
TEST_P(ThreadWindow, GathersByPuts) {
  constexpr int kPiece = 5000;
  for (const int size : {1, 2, 4}) {
    run_thread_ranks(size, options(), [&](RankEnv& env) {
      const int rank = env.world.rank();
      std::vector<float> memory(static_cast<std::size_t>(kPiece * size));
      std::vector<float> piece(kPiece);
      std::vector<float> sum(memory.size(), 0);
      // Flag r: the piece of rank r is here. Flag size + r: rank r has read everything.
      const auto window = env.world.make_window(view(memory), 2 * size, env.context);
      ASSERT_NE(window, nullptr);
      const auto copy = env.context.make_stream("copy");
      const auto compute = env.context.make_stream("compute");
      const auto event = env.context.make_event();
      for (std::uint64_t round = 1; round <= 5; ++round) {
        for (int r = 0; r < size; ++r) copy->wait(*event);
        for (int r = 0; r < size && round > 1; ++r) window->wait(size + r, round - 1, *copy);
        cpu::as_cpu(*copy).enqueue([&piece, rank, round] {
          for (std::size_t i = 0; i < piece.size(); ++i) {
            piece[i] = static_cast<float>(rank) * 1000 + static_cast<float>(round);
          }
        });
        for (int r = 0; r < size; ++r) {
          window->put(piece.data(), piece.size() * sizeof(float), r,
                      static_cast<std::size_t>(rank * kPiece) * sizeof(float), *copy);
          window->signal(r, rank, round, *copy);
        }
        for (int r = 0; r < size; ++r) window->wait(r, round, *compute);
        cpu::as_cpu(*compute).enqueue([&memory, &sum] {
          for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += memory[i];
        });
        for (int r = 0; r < size; ++r) window->signal(r, size + rank, round, *compute);
        compute->record(*event);
      }
      compute->synchronize();
      copy->synchronize();
      for (std::size_t i = 0; i < sum.size(); ++i) {
        const auto owner = static_cast<float>(i / kPiece);
        REQUIRE_THAT(sum[i] == 5 * owner * 1000 + 15, "element {} is {}", i, sum[i]);
      }
      env.world.barrier();
    });
  }
}

TEST_P(ThreadWindow, AbortEndsAWait) {
  run_thread_ranks(3, options(), [](RankEnv& env) {
    std::vector<float> memory(4);
    const auto window = env.world.make_window(view(memory), 1, env.context);
    const auto stream = env.context.make_stream("copy");
    if (env.world.rank() == 0) {
      env.world.abort("the sky fell");
      return;
    }
    try {
      window->wait(0, 1, *stream);
      stream->synchronize();
      TESSERA_FAIL(ErrorKind::kInternal, "the wait ended without a signal");
    } catch (const AbortedError& error) {
      REQUIRE_THAT(std::string(error.what()).find("the sky fell") != std::string::npos, "{}",
                   error.what());
    }
  });
}

TEST_P(ThreadWindow, PoisonEndsAWaitAndLaterPuts) {
  run_thread_ranks(2, options(), [](RankEnv& env) {
    std::vector<float> memory(4);
    const auto window = env.world.make_window(view(memory), 1, env.context);
    const auto stream = env.context.make_stream("copy");
    if (env.world.rank() == 0) window->poison("bad step");
    const auto is_poisoned = [&](auto&& body) {
      try {
        body();
        stream->synchronize();
      } catch (const AbortedError& error) {
        return std::string(error.what()).find("bad step") != std::string::npos;
      }
      return false;
    };
    REQUIRE_THAT(is_poisoned([&] { window->wait(0, 1, *stream); }), "the wait was not poisoned");
    REQUIRE_THAT(
        is_poisoned([&] { window->put(memory.data(), 4, 1 - env.world.rank(), 0, *stream); }),
        "the put was not poisoned");
    env.world.barrier();  // the group itself lives on
  });
}

TEST_P(ThreadWindow, FailedStreamPoisonsInsteadOfSignalling) {
  if (GetParam()) return;  // an inline stream fails at the call
  run_thread_ranks(2, options(), [](RankEnv& env) {
    std::vector<float> memory(4);
    const auto window = env.world.make_window(view(memory), 1, env.context);
    const auto stream = env.context.make_stream("copy");
    if (env.world.rank() == 0) {
      cpu::as_cpu(*stream).enqueue([] { throw Error(ErrorKind::kUser, "bad row"); });
      window->signal(1, 0, 1, *stream);
      EXPECT_THROW(stream->synchronize(), Error);
      return;
    }
    window->wait(0, 1, *stream);
    EXPECT_THROW(stream->synchronize(), AbortedError);
  });
}

TEST_P(ThreadWindow, LateSignalIsAnErrorThatNamesTheFlag) {
  run_thread_ranks(2, options(0.2), [](RankEnv& env) {
    std::vector<float> memory(4);
    const auto window = env.world.make_window(view(memory), 3, env.context);
    const auto stream = env.context.make_stream("copy");
    if (env.world.rank() == 1) {
      try {
        window->wait(2, 7, *stream);
        stream->synchronize();
        TESSERA_FAIL(ErrorKind::kInternal, "the wait ended without a signal");
      } catch (const Error& error) {
        REQUIRE_THAT(
            std::string(error.what()).find("flag 2 to reach 7; it is 0") != std::string::npos, "{}",
            error.what());
      }
    }
  });
}

TEST_P(ThreadWindow, WrongArgumentsAreRefused) {
  run_thread_ranks(2, options(), [](RankEnv& env) {
    std::vector<float> memory(env.world.rank() == 0 ? 4 : 8);
    const auto window = env.world.make_window(view(memory), 2, env.context);
    const auto stream = env.context.make_stream("copy");
    EXPECT_EQ(window->bytes_of(0), 16u);
    EXPECT_EQ(window->bytes_of(1), 32u);
    EXPECT_THROW(window->put(memory.data(), 4, 0, 13, *stream), Error);
    EXPECT_THROW(window->put(memory.data(), 4, 2, 0, *stream), Error);
    EXPECT_THROW(window->signal(0, 2, 1, *stream), Error);
    EXPECT_THROW(window->wait(-1, 1, *stream), Error);
    env.world.barrier();
  });
  // Ranks that disagree on the flags.
  EXPECT_THROW(run_thread_ranks(2, options(),
                                [](RankEnv& env) {
                                  std::vector<float> memory(4);
                                  env.world.make_window(view(memory), env.world.rank(), env.context);
                                }),
               Error);
}

}  // namespace
}  // namespace tessera::test
