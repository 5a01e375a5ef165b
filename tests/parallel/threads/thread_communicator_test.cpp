#include <gtest/gtest.h>

#include "tests/parallel/thread_ranks.h"

namespace tessera::test {
namespace {

struct Setting {
  int size;
  bool inline_streams;
};

class ThreadCommunicator : public testing::TestWithParam<Setting> {
 protected:
  void run(const ConformanceCase& one, double timeout_seconds) {
    const ThreadRankOptions options{GetParam().inline_streams, timeout_seconds};
    try {
      run_thread_ranks(GetParam().size, options, one.run);
    } catch (const std::exception& error) {
      ADD_FAILURE() << one.name << ": " << error.what();
    }
  }
};

TEST_P(ThreadCommunicator, PassesLastingCases) {
  // All in one group, one after the other.
  const ThreadRankOptions options{GetParam().inline_streams, 60};
  try {
    run_thread_ranks(GetParam().size, options, [](RankEnv& env) {
      for (const ConformanceCase& one : lasting_cases()) {
        try {
          one.run(env);
        } catch (const AbortedError&) {
          throw;
        } catch (const Error& error) {
          throw Error(error.kind(), fmt::format("{}: {}", one.name, error.what()));
        }
      }
    });
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

TEST_P(ThreadCommunicator, PassesEndingCases) {
  if (GetParam().size == 1) return;  // one rank cannot disagree
  for (const ConformanceCase& one : ending_cases()) {
    run(one, std::string(one.name) == "timeout" ? kShortTimeout : 60);
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ThreadCommunicator,
                         testing::Values(Setting{1, true}, Setting{2, true}, Setting{3, true},
                                         Setting{4, true}, Setting{7, true}, Setting{1, false},
                                         Setting{2, false}, Setting{3, false}, Setting{4, false},
                                         Setting{7, false}),
                         [](const auto& info) {
                           return (info.param.inline_streams ? "Inline" : "Worker") +
                                  std::to_string(info.param.size);
                         });

// A rank that throws while the others wait: its own error is what comes out.
TEST(ThreadRanks, FirstErrorEndsTheOthers) {
  for (const bool inline_streams : {true, false}) {
    try {
      run_thread_ranks(3, {inline_streams, 60}, [](RankEnv& env) {
        if (env.world.rank() == 1) throw Error(ErrorKind::kUser, "row 7 is bad");
        const auto stream = env.context.make_stream("comm");
        std::vector<float> data(5000);
        env.world.all_reduce({data.data(), DType::kF32, {5000}, Device{}}, ReduceOp::kSum, *stream);
        stream->synchronize();
      });
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "row 7 is bad");
    }
  }
}

// Ranks leave through an exception while their peers are in the middle of a collective: nobody may
// read memory that is gone (AddressSanitizer sees it).
TEST(ThreadRanks, AbortLeavesNoReaderBehind) {
  for (int round = 0; round < 40; ++round) {
    EXPECT_THROW(
        run_thread_ranks(4, {round % 2 == 0, 60},
                         [&](RankEnv& env) {
                           const auto stream = env.context.make_stream("comm");
                           for (int i = 0;; ++i) {
                             std::vector<float> data(20000);
                             std::vector<float> got(20000);
                             const Tensor tensor{data.data(), DType::kF32, {20000}, Device{}};
                             const Tensor other{got.data(), DType::kF32, {20000}, Device{}};
                             struct Drain {
                               Stream& stream;
                               ~Drain() {
                                 try {
                                   stream.synchronize();
                                 } catch (const Error&) {
                                 }
                               }
                             } drain{*stream};
                             env.world.all_reduce(tensor, ReduceOp::kSum, *stream);
                             {
                               GroupScope group(env.world);
                               env.world.send(tensor, (env.world.rank() + 1) % 4, *stream);
                               env.world.recv(other, (env.world.rank() + 3) % 4, *stream);
                             }
                             stream->synchronize();
                             if (i == round % 5 && env.world.rank() == 2) env.world.abort("enough");
                           }
                         }),
        AbortedError);
  }
}

TEST(ThreadRanks, ManyRanksOnFewCores) {
  run_thread_ranks(64, {true, 60}, [](RankEnv& env) {
    const auto stream = env.context.make_stream("comm");
    std::vector<std::int64_t> data(1000, env.world.rank());
    const Tensor tensor{data.data(), DType::kI64, {1000}, Device{}};
    for (int i = 0; i < 5; ++i) env.world.all_reduce(tensor, ReduceOp::kMax, *stream);
    for (const std::int64_t value : data) REQUIRE_THAT(value == 63, "a maximum is {}", value);
  });
}

TEST(ThreadCommunicatorChecks, WrongArgumentsAreRefused) {
  run_thread_ranks(2, {}, [](RankEnv& env) {
    const auto stream = env.context.make_stream("comm");
    std::vector<float> data(12);
    const auto at = [&](int begin, int count) {
      return Tensor{data.data() + begin, DType::kF32, {count}, Device{}};
    };
    EXPECT_THROW(env.world.all_gather(at(0, 3), at(3, 7), *stream), Error);
    EXPECT_THROW(env.world.all_gather(at(1, 4), at(0, 8), *stream), Error);  // not the own piece
    EXPECT_THROW(env.world.all_to_all(at(0, 4), at(2, 4), *stream), Error);
    EXPECT_THROW(env.world.broadcast(at(0, 4), 2, *stream), Error);
    EXPECT_THROW(env.world.send(at(0, 4), env.world.rank(), *stream), Error);
    Tensor strided{data.data(), DType::kF32, {2, 3}, Device{}};
    strided.row_stride = 6;
    EXPECT_THROW(env.world.all_reduce(strided, ReduceOp::kSum, *stream), Error);
    std::vector<std::uint8_t> bytes(4);
    EXPECT_THROW(
        env.world.all_reduce({bytes.data(), DType::kU8, {4}, Device{}}, ReduceOp::kSum, *stream),
        Error);
    // None of them counted: the group still works.
    env.world.barrier();
    env.world.all_reduce(at(0, 12), ReduceOp::kSum, *stream);
  });
}

}  // namespace
}  // namespace tessera::test
