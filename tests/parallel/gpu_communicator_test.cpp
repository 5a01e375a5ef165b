// Groups on GPUs against the cases that every communicator passes: thread ranks that share one GPU, and NCCL
// with a GPU for each.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>

#include "engine/device/buffer.h"
#include "parallel/nccl_communicator.h"
#include "parallel/one_gpu_communicator.h"
#include "tests/parallel/window_harness.h"
#include "tests/parallel/thread_ranks.h"

namespace tessera::test {
namespace {

using Groups = std::vector<std::unique_ptr<Communicator>>;

std::string run_case(Groups groups, const std::vector<int>& devices, const ConformanceCase& one) {
  try {
    run_group_ranks(
        std::move(groups),
        [&](int rank) {
          return make_context(Device{DeviceKind::kCuda, devices[static_cast<std::size_t>(rank)]});
        },
        one.run);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

class OneGpuCommunicator : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  }
  void run(const ConformanceCase& one, double timeout_seconds) {
    const std::vector<int> devices(static_cast<std::size_t>(GetParam()), 0);
    EXPECT_EQ(run_case(make_one_gpu_communicators(GetParam(), 0, timeout_seconds), devices, one), "") << one.name;
  }
};

TEST_P(OneGpuCommunicator, PassesLastingCases) {
  for (const ConformanceCase& one : lasting_cases()) run(one, 60);
}

TEST_P(OneGpuCommunicator, PassesEndingCases) {
  if (GetParam() == 1) return;  // one rank cannot disagree
  for (const ConformanceCase& one : ending_cases()) {
    run(one, std::string(one.name) == "timeout" ? kShortTimeout : 60);
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, OneGpuCommunicator, testing::Values(1, 2, 3, 4, 7));

TEST(OneGpuCommunicatorMake, RefusesWhatCannotBe) {
  if (cuda_device_count() == 0) {
    EXPECT_THROW(make_one_gpu_communicators(2), Error);
    return;
  }
  EXPECT_THROW(make_one_gpu_communicators(0), Error);
  EXPECT_THROW(make_one_gpu_communicators(65), Error);
  EXPECT_THROW(make_one_gpu_communicators(2, cuda_device_count()), Error);
}

// Two GPUs are the fewest that NCCL can connect; more are used where they are.
class NcclCommunicator : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_nccl()) GTEST_SKIP() << "this build has no NCCL";
    if (cuda_device_count() < 2) GTEST_SKIP() << "NCCL needs two GPUs, here are " << cuda_device_count();
    devices_.resize(static_cast<std::size_t>(std::min(cuda_device_count(), 8)));
    std::iota(devices_.begin(), devices_.end(), 0);
  }
  Groups groups(double timeout_seconds = 60) { return make_nccl_thread_communicators(devices_, timeout_seconds); }
  void run(const std::string& name) {
    EXPECT_EQ(run_case(groups(), devices_, find_case(name)), "") << name;
  }

  std::vector<int> devices_;
};

TEST_F(NcclCommunicator, MovesAndSplits) {
  for (const char* name : {"all_gather", "all_to_all", "broadcast", "send_recv", "large", "adjoints", "split",
                           "events", "issue_order", "repeat", "mesh", "overlap"}) {
    run(name);
  }
}

// NCCL's order of summation is the ranks' only for two of them.
TEST_F(NcclCommunicator, ReducesLikeTheOthersOnTwoGpus) {
  devices_.resize(2);
  for (const char* name : {"all_reduce", "reduce_scatter"}) run(name);
}

TEST_F(NcclCommunicator, EndsWithAnAbort) {
  for (const char* name : {"abort", "abort_recv", "abort_send", "failed_stream"}) run(name);
}

TEST_F(NcclCommunicator, NamesWhatItWaitedFor) {
  const ConformanceCase missing{"missing", [](RankEnv& env) {
    const auto stream = env.context.make_stream("comm");
    Buffer buffer(env.context, 4096);
    const Tensor tensor(buffer.data(), DType::kF32, Shape{1024}, env.context.device());
    env.world.barrier();
    if (env.world.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::seconds(6));
      return;
    }
    try {
      env.world.all_reduce(tensor, ReduceOp::kSum, *stream);
      stream->synchronize();
    } catch (const Error& error) {
      const std::string text = error.what();
      REQUIRE_THAT(text.find("all_reduce #2") != std::string::npos, "the error '{}' does not name the operation", text);
      REQUIRE_THAT(error.kind() == ErrorKind::kTransient, "the error '{}' has another kind", text);
      return;
    }
    TESSERA_FAIL(ErrorKind::kInternal, "no error where one was due");
  }};
  EXPECT_EQ(run_case(groups(3), devices_, missing), "");
}

void run_windows(RankEnv& env) {
  WindowEnv window{env.world.rank(), env.world.size(), env.context,
                   [&](const Tensor& memory, int num_flags) {
                     return env.world.make_window(memory, num_flags, env.context);
                   },
                   [&] { env.world.barrier(); }};
  for (const char* name : {"gathers", "poisoned"}) run_window_case(name, window);
}

TEST_F(NcclCommunicator, ReachesEachOthersMemory) {
  EXPECT_EQ(run_case(groups(), devices_, {"windows", run_windows}), "");
}

TEST_F(NcclCommunicator, RanksMeetThroughAnId) {
  const std::string id = make_nccl_id();
  std::vector<std::thread> threads;
  std::vector<double> sums(devices_.size());
  for (std::size_t rank = 0; rank < devices_.size(); ++rank) {
    threads.emplace_back([&, rank] {
      const auto context = make_context(Device{DeviceKind::kCuda, devices_[rank]});
      const auto stream = context->make_stream("comm");
      const auto world = make_nccl_communicator(id, static_cast<int>(rank), static_cast<int>(devices_.size()),
                                                devices_[rank], 60);
      Buffer buffer(*context, sizeof(double));
      const double one = 1;
      stream->copy_bytes(buffer.data(), &one, sizeof one);
      const Tensor tensor(buffer.data(), DType::kF64, Shape{1}, context->device());
      world->all_reduce(tensor, ReduceOp::kSum, *stream);
      stream->copy_bytes(&sums[rank], buffer.data(), sizeof one);
      stream->synchronize();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const double sum : sums) EXPECT_EQ(sum, static_cast<double>(devices_.size()));
}

TEST(NcclCommunicatorMake, AGroupOfOneNeedsNoId) {
  if (!has_nccl()) GTEST_SKIP() << "this build has no NCCL";
  const auto world = make_nccl_communicator("", 0, 1, 0);
  EXPECT_EQ(world->size(), 1);
  const auto part = world->split(0, 0, "tp");
  world->abort("enough");
  EXPECT_THROW(part->barrier(), AbortedError);
}

}  // namespace
}  // namespace tessera::test
