#include "parallel/communicator.h"

#include <gtest/gtest.h>

#include "engine/device/cpu/cpu_stream.h"
#include "parallel/peer_window.h"
#include "tests/parallel/communicator_conformance.h"

namespace tessera::test {
namespace {

TEST(SelfCommunicator, PassesLastingCases) {
  for (const bool inline_streams : {true, false}) {
    const auto world = make_self_communicator("world");
    ContextOptions options;
    options.inline_streams = inline_streams;
    const auto context = make_context(Device{}, options);
    RankEnv env{*world, *context};
    for (const ConformanceCase& one : lasting_cases()) {
      EXPECT_NO_THROW(one.run(env)) << one.name;
    }
  }
}

TEST(SelfCommunicator, AbortEndsLaterCallsOfTheWholeFamily) {
  const auto world = make_self_communicator();
  const auto child = world->split(0, 0, "child");
  const auto handle = world->abort_handle();
  child->barrier();
  handle("the sky fell");
  handle("a later reason");
  try {
    child->barrier();
    FAIL() << "not ended";
  } catch (const AbortedError& error) {
    EXPECT_NE(std::string(error.what()).find("the sky fell"), std::string::npos) << error.what();
  }
  EXPECT_THROW(world->barrier(), AbortedError);
}

TEST(SelfCommunicator, MessagesToItselfNeedAPartner) {
  const auto world = make_self_communicator();
  const auto context = make_context(Device{});
  const auto stream = context->make_stream("comm");
  float value = 1;
  const Tensor tensor{&value, DType::kF32, {1}, Device{}};
  EXPECT_THROW(world->send(tensor, 0, *stream), Error);
  const auto unmatched = [&] {
    GroupScope group(*world);
    world->send(tensor, 0, *stream);
  };
  EXPECT_THROW(unmatched(), Error);
  // An exception on its way out of a group drops it and passes.
  EXPECT_THROW(
      {
        GroupScope group(*world);
        world->send(tensor, 0, *stream);
        throw std::out_of_range("other trouble");
      },
      std::out_of_range);
  world->barrier();
}

TEST(SelfCommunicator, WindowIsItsOwn) {
  const auto world = make_self_communicator();
  const auto context = make_context(Device{});
  const auto stream = context->make_stream("comm");
  float memory[4] = {};
  const float source[2] = {5, 6};
  const auto window = world->make_window({memory, DType::kF32, {4}, Device{}}, 1, *context);
  window->put(source, sizeof source, 0, 2 * sizeof(float), *stream);
  window->signal(0, 0, 1, *stream);
  window->wait(0, 1, *stream);
  EXPECT_EQ(memory[2], 5);
  EXPECT_EQ(memory[3], 6);
  EXPECT_THROW(window->wait(0, 2, *stream), Error);
}

TEST(MetaCommunicator, ChecksAndMovesNothing) {
  const auto world = make_meta_communicator(300, 512);
  EXPECT_EQ(world->rank(), 300);
  EXPECT_EQ(world->size(), 512);
  const auto context = make_context(Device{DeviceKind::kMeta, 0});
  const auto stream = context->make_stream("comm");
  const Device meta{DeviceKind::kMeta, 0};
  const Tensor piece{nullptr, DType::kBF16, {8, 128}, meta};
  const Tensor whole{nullptr, DType::kBF16, {512 * 8, 128}, meta};
  world->all_gather(piece, whole, *stream);
  world->reduce_scatter(whole, piece, ReduceOp::kSum, *stream);
  world->all_reduce(piece, ReduceOp::kMax, *stream);
  world->barrier();
  EXPECT_THROW(world->all_gather(piece, piece, *stream), Error);
  EXPECT_THROW(world->broadcast(piece, 512, *stream), Error);
  // Operands of another device are a mistake here as anywhere.
  EXPECT_THROW(world->all_reduce({nullptr, DType::kF32, {1}, Device{}}, ReduceOp::kSum, *stream),
               Error);

  const auto group = world->subgroup({44, 300, 299}, "three");
  EXPECT_EQ(group->rank(), 1);
  EXPECT_EQ(group->size(), 3);
  EXPECT_THROW(world->subgroup({1, 2}, "without me"), Error);
  EXPECT_THROW(world->subgroup({300, 300}, "twice"), Error);
  EXPECT_THROW(world->split(0, 0, "unknown colors"), Error);
}

TEST(CopyTensor, CopiesDenseTensorsOfOneKind) {
  const auto context = make_context(Device{});
  const auto stream = context->make_stream("comm");
  float in[6] = {1, 2, 3, 4, 5, 6};
  float out[6] = {};
  copy_tensor({in, DType::kF32, {2, 3}, Device{}}, {out, DType::kF32, {6}, Device{}}, *stream);
  EXPECT_EQ(out[5], 6);
  copy_tensor({in, DType::kF32, {6}, Device{}}, {in, DType::kF32, {6}, Device{}}, *stream);
  EXPECT_THROW(
      copy_tensor({in, DType::kF32, {6}, Device{}}, {out, DType::kI32, {6}, Device{}}, *stream),
      Error);
  EXPECT_THROW(
      copy_tensor({in, DType::kF32, {6}, Device{}}, {out, DType::kF32, {5}, Device{}}, *stream),
      Error);
}

}  // namespace
}  // namespace tessera::test
