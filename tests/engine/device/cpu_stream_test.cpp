#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "engine/core/error.h"
#include "engine/device/buffer.h"
#include "engine/device/cpu/cpu_stream.h"
#include "tests/support/expect_error.h"

namespace tessera::test {
namespace {

using cpu::as_cpu;

std::unique_ptr<BackendContext> cpu_context(bool inline_streams, int threads = 1) {
  ContextOptions options;
  options.inline_streams = inline_streams;
  options.cpu_threads = threads;
  return make_context(Device{}, options);
}

// A closure can be held back until the test opens the gate, so that order is forced, not timed.
class Gate {
 public:
  void open() {
    {
      const std::lock_guard lock(mutex_);
      is_open_ = true;
    }
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
};

class CpuStreamModes : public ::testing::TestWithParam<bool> {};  // true: inline

TEST_P(CpuStreamModes, RunsInOrder) {
  const auto context = cpu_context(GetParam());
  const auto stream = context->make_stream("a");
  std::vector<int> order;
  for (int i = 0; i < 200; ++i) as_cpu(*stream).enqueue([&order, i] { order.push_back(i); });
  stream->synchronize();
  std::vector<int> expected(200);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
}

TEST_P(CpuStreamModes, CopiesAndClears) {
  const auto context = cpu_context(GetParam());
  const auto stream = context->make_stream("a");
  Buffer buffer(*context, 1000);
  std::vector<char> in(1000), out(1000, 'x');
  std::iota(in.begin(), in.end(), 0);
  stream->copy_bytes(buffer.data(), in.data(), in.size());
  stream->set_zero(static_cast<char*>(buffer.data()) + 10, 5);
  stream->copy_bytes(out.data(), buffer.data(), out.size());
  stream->synchronize();
  std::fill(in.begin() + 10, in.begin() + 15, 0);
  EXPECT_EQ(in, out);
  stream->copy_bytes(nullptr, nullptr, 0);
  stream->set_zero(nullptr, 0);
  stream->synchronize();
}

TEST_P(CpuStreamModes, EventsReachTheirPoint) {
  const auto context = cpu_context(GetParam());
  const auto stream = context->make_stream("a");
  const auto start = context->make_event(), end = context->make_event();
  end->synchronize();  // never recorded: a no-op
  EXPECT_TRUE(end->is_done());
  stream->record(*start);
  int value = 0;
  as_cpu(*stream).enqueue([&value] { value = 7; });
  stream->record(*end);
  end->synchronize();
  EXPECT_EQ(value, 7);
  EXPECT_TRUE(end->is_done());
  EXPECT_GE(end->milliseconds_since(*start), 0.0);
  stream->synchronize();
}

INSTANTIATE_TEST_SUITE_P(Modes, CpuStreamModes, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Inline" : "Worker"; });

TEST(CpuStream, WorkerIsAsynchronousToTheCaller) {
  const auto context = cpu_context(false);
  const auto stream = context->make_stream("a");
  Gate gate;
  std::atomic<bool> ran{false};
  as_cpu(*stream).enqueue([&] {
    gate.pass();
    ran = true;
  });
  const auto event = context->make_event();
  stream->record(*event);
  EXPECT_FALSE(ran);  // the caller got here while the closure waits for it
  EXPECT_FALSE(event->is_done());
  gate.open();
  stream->synchronize();
  EXPECT_TRUE(ran);
  EXPECT_TRUE(event->is_done());
}

TEST(CpuStream, EventsOrderTwoStreams) {
  const auto context = cpu_context(false);
  const auto producer = context->make_stream("producer"), consumer = context->make_stream("consumer");
  const auto event = context->make_event();
  Gate gate;
  int value = 0, seen = -1;  // plain ints: ThreadSanitizer sees whether the event orders them
  as_cpu(*producer).enqueue([&] {
    gate.pass();
    value = 42;
  });
  producer->record(*event);
  consumer->wait(*event);
  as_cpu(*consumer).enqueue([&] { seen = value; });
  gate.open();
  consumer->synchronize();
  EXPECT_EQ(seen, 42);
  producer->synchronize();
}

TEST(CpuStream, WaitTakesThePointRecordedBeforeIt) {
  const auto context = cpu_context(false);
  const auto a = context->make_stream("a"), b = context->make_stream("b");
  const auto event = context->make_event();
  a->record(*event);
  b->wait(*event);
  Gate gate;
  as_cpu(*a).enqueue([&] { gate.pass(); });
  a->record(*event);   // a later point, which b does not wait for
  b->synchronize();
  EXPECT_FALSE(event->is_done());
  gate.open();
  a->synchronize();
  EXPECT_TRUE(event->is_done());
}

TEST(CpuStream, FailedClosurePoisonsUntilSynchronise) {
  const auto context = cpu_context(false);
  const auto stream = context->make_stream("a"), other = context->make_stream("b");
  const auto event = context->make_event();
  std::atomic<int> ran{0};
  as_cpu(*stream).enqueue([] { TESSERA_FAIL(ErrorKind::kTransient, "[test] first"); });
  as_cpu(*stream).enqueue([&] { ++ran; });
  as_cpu(*stream).enqueue([] { TESSERA_FAIL(ErrorKind::kUser, "[test] second"); });
  stream->record(*event);
  other->wait(*event);  // must not hang behind a failed stream
  other->synchronize();
  expect_error(ErrorKind::kTransient, {"[test] first"}, [&] { stream->synchronize(); });
  EXPECT_EQ(ran, 0);
  as_cpu(*stream).enqueue([&] { ++ran; });
  stream->synchronize();
  EXPECT_EQ(ran, 1);
}

TEST(CpuStream, InlineThrowsAtTheCall) {
  const auto context = cpu_context(true);
  const auto stream = context->make_stream("a");
  expect_error(ErrorKind::kUser, {"[test] now"}, [&] {
    as_cpu(*stream).enqueue([] { TESSERA_FAIL(ErrorKind::kUser, "[test] now"); });
  });
  stream->synchronize();
}

TEST(CpuStream, DestructionRunsWhatWasEnqueued) {
  const auto context = cpu_context(false);
  std::atomic<int> ran{0};
  {
    const auto stream = context->make_stream("a");
    for (int i = 0; i < 50; ++i) as_cpu(*stream).enqueue([&] { ++ran; });
  }
  EXPECT_EQ(ran, 50);
}

TEST(CpuStream, HasNoScratchUntilAttached) {
  const auto context = cpu_context(true);
  const auto stream = context->make_stream("compute");
  EXPECT_FALSE(stream->has_scratch());
  expect_error(ErrorKind::kInternal, {"[stream] compute has no scratch memory attached"},
               [&] { stream->scratch(); });
}

TEST(ThreadTeam, CoversEveryIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    cpu::ThreadTeam team(threads);
    EXPECT_EQ(team.threads(), threads);
    for (const std::int64_t count : {0, 1, 3, 5, 1000}) {
      for (const std::int64_t grain : {1, 7, 2000}) {
        std::vector<std::atomic<int>> hits(static_cast<std::size_t>(count));
        std::atomic<int> calls{0};
        team.parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end) {
          ++calls;
          for (std::int64_t i = begin; i < end; ++i) ++hits[static_cast<std::size_t>(i)];
        });
        for (const auto& hit : hits) EXPECT_EQ(hit, 1);
        EXPECT_LE(calls, std::max<std::int64_t>(1, count / grain));
        EXPECT_LE(calls, threads);
      }
    }
  }
}

TEST(ThreadTeam, UsesSeveralThreads) {
  cpu::ThreadTeam team(3);
  std::mutex mutex;
  std::condition_variable all_here;
  int here = 0;
  // Each range waits for the others: this returns only if all three run at the same time.
  team.parallel_for(3, 1, [&](std::int64_t, std::int64_t) {
    std::unique_lock lock(mutex);
    if (++here == 3) all_here.notify_all();
    all_here.wait(lock, [&] { return here == 3; });
  });
  EXPECT_EQ(here, 3);
}

TEST(ThreadTeam, RethrowsAndStaysUsable) {
  cpu::ThreadTeam team(4);
  for (const std::int64_t failing : {0, 3}) {
    EXPECT_THROW(team.parallel_for(4, 1,
                                   [&](std::int64_t begin, std::int64_t end) {
                                     if (begin <= failing && failing < end) throw std::runtime_error("x");
                                   }),
                 std::runtime_error);
  }
  std::atomic<std::int64_t> sum{0};
  team.parallel_for(100, 1, [&](std::int64_t begin, std::int64_t end) { sum += end - begin; });
  EXPECT_EQ(sum, 100);
}

// Two streams of one context share the team: the second caller runs its loop alone.
TEST(ThreadTeam, TwoCallersDoNotMix) {
  const auto context = cpu_context(false, 3);
  const auto a = context->make_stream("a"), b = context->make_stream("b");
  std::vector<std::int64_t> sums(2, 0);
  for (int which = 0; which < 2; ++which) {
    cpu::CpuStream& stream = as_cpu(which == 0 ? *a : *b);
    for (int repeat = 0; repeat < 200; ++repeat) {
      stream.enqueue([&stream, &sums, which] {
        std::atomic<std::int64_t> sum{0};
        stream.team().parallel_for(64, 1, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i) sum += i;
        });
        sums[static_cast<std::size_t>(which)] += sum;
      });
    }
  }
  a->synchronize();
  b->synchronize();
  EXPECT_EQ(sums, std::vector<std::int64_t>(2, 200 * 64 * 63 / 2));
}

TEST(Context, AllocatesAligned) {
  const auto context = cpu_context(true);
  for (const std::size_t bytes : {1, 255, 4096, 1 << 20}) {
    for (const MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kRegistered, MemoryKind::kPinnedHost}) {
      const Buffer buffer(*context, bytes, kind);
      ASSERT_NE(buffer.data(), nullptr);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 256, 0u);
      std::memset(buffer.data(), 1, bytes);
      EXPECT_EQ(buffer.device(), Device{});
    }
  }
  EXPECT_EQ(Buffer(*context, 0).data(), nullptr);
}

TEST(Context, RefusesMoreMemoryThanThereIs) {
  const auto context = cpu_context(true);
  expect_error(ErrorKind::kAnswerNo, {"[memory]", "bytes of host memory"},
               [&] { Buffer(*context, std::size_t{1} << 60); });
}

TEST(Buffer, MovesItsMemory) {
  const auto context = cpu_context(true);
  Buffer a(*context, 100);
  void* data = a.data();
  Buffer b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(a.data(), nullptr);  // NOLINT(bugprone-use-after-move): empty by contract
  a = std::move(b);
  EXPECT_EQ(a.data(), data);
  EXPECT_EQ(a.bytes(), 100u);
}

TEST(Meta, RunsNothingAndHasNoAddresses) {
  ContextOptions options;
  options.planned.target = DeviceKind::kCuda;
  options.planned.sm_arch = 90;
  const auto context = make_context(Device{DeviceKind::kMeta, 0}, options);
  EXPECT_EQ(context->capabilities().sm_arch, 90);
  const Buffer buffer(*context, std::size_t{1} << 50);
  EXPECT_EQ(buffer.data(), nullptr);
  const auto stream = context->make_stream("plan");
  char here = 'x';
  stream->set_zero(&here, 1);
  stream->copy_bytes(&here, nullptr, 1);
  stream->synchronize();
  EXPECT_EQ(here, 'x');
  const auto event = context->make_event();
  stream->record(*event);
  stream->wait(*event);
  EXPECT_TRUE(event->is_done());
}

}  // namespace
}  // namespace tessera::test
