// That exchanges and products of tensor parallelism do run at the same time, and what they need.
// What they compute is a case of every communicator (overlap_harness.cpp).
#include "parallel/overlap.h"

#include <gtest/gtest.h>

#include <future>
#include <vector>

#include "engine/device/cpu/cpu_stream.h"
#include "engine/memory/scratch.h"
#include "tests/parallel/thread_ranks.h"

namespace tessera::test {
namespace {

constexpr std::int64_t kCount = 8;

// Two ranks with an overlap each, on worker threads, whose messages are sent, and then put.
template <typename Body>
void run_two_ranks(bool puts, Body&& body) {
  run_thread_ranks(2, {.inline_streams = false, .timeout_seconds = 20}, [&](RankEnv& env) {
    const auto compute = env.context.make_stream("compute");
    const auto exchange = env.context.make_stream("exchange");
    const ScratchStack scratch(*compute, 1 << 16);
    Overlap overlap(env.world, *compute, *exchange, puts);
    EXPECT_EQ(overlap.has_window(), puts);
    body(env.world.rank(), overlap, cpu::as_cpu(*compute));
    compute->synchronize();
    exchange->synchronize();
  });
}

class Overlaps : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Messages, Overlaps, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Put" : "Sent"; });

Tensor matrix(std::vector<float>& values) {
  return Tensor(values.data(), DType::kF32, Shape{static_cast<std::int64_t>(values.size()), 1},
                Device{});
}

// Rank 1 sends nothing before rank 0's product of its own piece is done.
TEST_P(Overlaps, TheOwnProductWaitsForNobody) {
  std::promise<void> is_multiplied;
  run_two_ranks(GetParam(), [&](int rank, Overlap& overlap, cpu::CpuStream& compute) {
    std::vector<float> own(kCount, static_cast<float>(rank));
    const ScratchTensor whole(compute, DType::kF32, Shape{2 * kCount, 1});
    if (rank == 1) is_multiplied.get_future().wait();
    overlap.gather_gemm(matrix(own), *whole, [&](int piece_of, const Tensor&) {
      if (rank == 0 && piece_of == 0) compute.enqueue([&] { is_multiplied.set_value(); });
    });
    compute.synchronize();
    EXPECT_EQ(whole->as<float>()[0], 0);
    EXPECT_EQ(whole->as<float>()[2 * kCount - 1], 1);
  });
}

// Rank 0's last product ends only when rank 1 has what rank 0 computed for it.
TEST_P(Overlaps, WhatIsComputedLeavesBehindTheNextProduct) {
  std::promise<void> has_arrived;
  run_two_ranks(GetParam(), [&](int rank, Overlap& overlap, cpu::CpuStream& compute) {
    std::vector<float> own(kCount, -1);
    overlap.gemm_scatter(matrix(own), [&](int piece_of, const Tensor& out) {
      compute.enqueue([&, piece_of, out] {
        if (rank == 0 && piece_of == 0) has_arrived.get_future().wait();
        std::fill_n(out.as<float>(), kCount, static_cast<float>(1 + rank));
      });
    });
    if (rank == 1) {
      compute.synchronize();
      has_arrived.set_value();
    }
    compute.synchronize();
    for (const float value : own) EXPECT_EQ(value, 3);
  });
}

// Both halves of a column layer's backward: x arrives while the product for dx is under way.
TEST_P(Overlaps, StartedGathersRunBehindWhatFollows) {
  std::promise<void> is_computed;
  run_two_ranks(GetParam(), [&](int rank, Overlap& overlap, cpu::CpuStream& compute) {
    std::vector<float> own(kCount, static_cast<float>(rank));
    const ScratchTensor whole(compute, DType::kF32, Shape{2 * kCount, 1});
    if (rank == 1) is_computed.get_future().wait();
    overlap.start_gather(matrix(own), *whole);
    if (rank == 0) compute.enqueue([&] { is_computed.set_value(); });
    overlap.finish_gather();
    compute.synchronize();
    EXPECT_EQ(whole->as<float>()[0], 0);
    EXPECT_EQ(whole->as<float>()[2 * kCount - 1], 1);
  });
}

TEST(Overlap, ScratchIsWhatThePlanCounts) {
  const auto context = make_context(Device{DeviceKind::kMeta, 0});
  for (const int ranks : {1, 2, 8}) {
    const auto group = make_meta_communicator(0, ranks, "tp");
    const auto stream = context->make_stream("compute");
    const ScratchStack scratch(*stream, 0);
    Overlap overlap(*group, *stream, *stream);
    const Tensor own(nullptr, DType::kF32, Shape{64, 1}, context->device());
    overlap.gemm_scatter(own, [](int, const Tensor&) {});
    const int pieces = ranks + std::min(2, ranks - 1);
    EXPECT_EQ(scratch.high_water(), static_cast<std::size_t>(pieces) * 256) << ranks;
  }
}

}  // namespace
}  // namespace tessera::test
