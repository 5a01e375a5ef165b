#include "engine/memory/arena.h"

#include <gtest/gtest.h>

#include <cstring>

#include "engine/memory/scratch.h"
#include "tests/support/expect_error.h"

namespace tessera::test {
namespace {

std::unique_ptr<BackendContext> context_of(DeviceKind kind) { return make_context(Device{kind, 0}); }

// A component that takes its memory in a fixed order, as models and stores do.
std::vector<Tensor> build(Arena& arena) {
  return {arena.allocate("embedding", DType::kBF16, Shape{101, 7}, MemoryClass::kWeights),
          arena.allocate("scalar", DType::kF64, Shape{1}, MemoryClass::kOptimizer),
          arena.allocate("nothing", DType::kF32, Shape{0, 5}, MemoryClass::kActivations),
          arena.allocate("saved", DType::kF32, Shape{3, 5, 11}, MemoryClass::kActivations)};
}

TEST(Arena, PlanOnMetaEqualsTheRealThing) {
  const auto meta = context_of(DeviceKind::kMeta), real = context_of(DeviceKind::kCpu);
  Arena dry(*meta, 0);
  for (const Tensor& t : build(dry)) {
    EXPECT_EQ(t.data, nullptr);
    EXPECT_EQ(t.device.kind, DeviceKind::kMeta);
  }
  Arena arena(*real, dry.used());
  const std::vector<Tensor> tensors = build(arena);
  EXPECT_EQ(arena.used(), dry.used());
  ASSERT_EQ(arena.plan().entries.size(), dry.plan().entries.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const MemoryPlan::Entry &planned = dry.plan().entries[i], &entry = arena.plan().entries[i];
    EXPECT_EQ(entry.name, planned.name);
    EXPECT_EQ(entry.bytes, planned.bytes);
    EXPECT_EQ(entry.offset, planned.offset);
    EXPECT_EQ(entry.memory_class, planned.memory_class);
    EXPECT_GE(entry.bytes, tensors[i].bytes());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensors[i].data) % 256, 0u);
    EXPECT_EQ(tensors[i].device, Device{});
    std::memset(tensors[i].data, static_cast<int>(i) + 1, tensors[i].bytes());
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {  // no two share memory
    const auto* bytes = static_cast<const unsigned char*>(tensors[i].data);
    for (std::size_t b = 0; b < tensors[i].bytes(); ++b) ASSERT_EQ(bytes[b], i + 1);
  }
}

TEST(Arena, TotalsByKindAndClass) {
  const auto meta = context_of(DeviceKind::kMeta);
  Arena dry(*meta, 0);
  build(dry);
  const MemoryPlan& plan = dry.plan();
  EXPECT_EQ(plan.total(MemoryKind::kDevice), dry.used());
  EXPECT_EQ(plan.total(MemoryKind::kPinnedHost), 0u);
  EXPECT_EQ(plan.total(MemoryClass::kWeights), 1536u);     // 101 * 7 * 2 = 1414
  EXPECT_EQ(plan.total(MemoryClass::kOptimizer), 256u);
  EXPECT_EQ(plan.total(MemoryClass::kActivations), 768u);  // 3 * 5 * 11 * 4 = 660
  EXPECT_EQ(plan.total(MemoryClass::kGradients), 0u);
}

TEST(Arena, RefusesWhatThePlanDidNotForesee) {
  const auto real = context_of(DeviceKind::kCpu);
  Arena arena(*real, 512);
  arena.allocate("first", DType::kU8, Shape{300}, MemoryClass::kInput);
  expect_error(ErrorKind::kInternal, {"[arena] second wants 256 bytes at 512 of 512"}, [&] {
    arena.allocate("second", DType::kU8, Shape{1}, MemoryClass::kInput);
  });
}

TEST(Arena, PinnedMemoryBelongsToTheHost) {
  const auto real = context_of(DeviceKind::kCpu);
  Arena arena(*real, 256, MemoryKind::kPinnedHost);
  EXPECT_EQ(arena.allocate("tokens", DType::kI32, Shape{8}, MemoryClass::kInput).device, Device{});
}

TEST(MemoryClass, EveryClassHasAName) {
  for (int i = 0; i < kMemoryClasses; ++i) {
    EXPECT_STRNE(name_of(static_cast<MemoryClass>(i)), "?");
  }
}

TEST(ScratchStack, HighWaterOfADryRunIsEnough) {
  const auto use = [](ScratchStack& scratch) {
    const auto a = scratch.take(100);
    {
      const auto b = scratch.take(1000), c = scratch.take(1);
      (void)b, (void)c;
    }
    const auto d = scratch.take(300);
    (void)a, (void)d;
  };
  const auto meta = context_of(DeviceKind::kMeta), real = context_of(DeviceKind::kCpu);
  const auto meta_stream = meta->make_stream("plan"), stream = real->make_stream("compute");
  ScratchStack dry(*meta_stream, 0);
  use(dry);
  EXPECT_EQ(dry.high_water(), 256u + 1024u + 256u);
  ScratchStack scratch(*stream, dry.high_water());
  use(scratch);
  use(scratch);  // everything was given back
  EXPECT_EQ(scratch.high_water(), dry.high_water());
  EXPECT_EQ(scratch.capacity(), dry.high_water());
}

TEST(ScratchStack, PiecesNestAndAreReused) {
  const auto real = context_of(DeviceKind::kCpu);
  const auto stream = real->make_stream("compute");
  ScratchStack scratch(*stream, 4096);
  const auto outer = scratch.take(10);
  void* first = nullptr;
  {
    const auto inner = scratch.take(10);
    first = inner.data();
    EXPECT_EQ(static_cast<char*>(first) - static_cast<char*>(outer.data()), 256);
    EXPECT_EQ(inner.bytes(), 10u);
  }
  EXPECT_EQ(scratch.take(10).data(), first);
}

TEST(ScratchStack, NamesTheStreamThatNeedsMore) {
  const auto real = context_of(DeviceKind::kCpu);
  const auto stream = real->make_stream("compute");
  ScratchStack scratch(*stream, 512);
  const auto held = scratch.take(256);
  expect_error(ErrorKind::kInternal, {"[scratch] stream compute needs 768 bytes, the plan gave 512"},
               [&] { (void)scratch.take(300); });
  EXPECT_NE(scratch.take(256).data(), nullptr);  // the failed request took nothing
}

TEST(ScratchStack, AttachesItselfToItsStream) {
  const auto real = context_of(DeviceKind::kCpu);
  const auto stream = real->make_stream("compute");
  {
    ScratchStack scratch(*stream, 4096);
    EXPECT_EQ(&stream->scratch(), &scratch);
    const ScratchTensor t(*stream, DType::kBF16, Shape{4, 8});
    EXPECT_EQ(t->shape, (Shape{4, 8}));
    EXPECT_EQ(t->device, Device{});
    EXPECT_NE((*t).data, nullptr);
  }
  EXPECT_FALSE(stream->has_scratch());
}

}  // namespace
}  // namespace tessera::test
