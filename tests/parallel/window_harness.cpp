#include "tests/parallel/window_harness.h"

#include <chrono>
#include <thread>
#include <vector>

#include "engine/device/buffer.h"
#include "kernels/ops.h"
#include "tests/parallel/communicator_conformance.h"

namespace tessera::test {
namespace {

class Values {
 public:
  Values(BackendContext& context, std::int64_t count)
      : memory_(context, static_cast<std::size_t>(count) * sizeof(float)),
        tensor_(memory_.data(), DType::kF32, Shape{count}, memory_.device()) {}
  const Tensor& operator*() const { return tensor_; }
  void* data() const { return tensor_.data; }

 private:
  Buffer memory_;
  Tensor tensor_;
};

// Flag r: the piece of rank r is here. Flag size + r: rank r has read everything.
void gathers(WindowEnv& env) {
  constexpr std::int64_t kPiece = 300'001;
  constexpr int kRounds = 6;
  const int size = env.size;
  const std::size_t bytes = kPiece * sizeof(float);
  const Values memory(env.context, kPiece * size);
  const Values piece(env.context, kPiece);
  const Values sum(env.context, kPiece * size);
  const auto window = env.make(*memory, 2 * size);
  REQUIRE_THAT(window != nullptr, "there is no window");
  REQUIRE_THAT(window->bytes_of(size - 1) == bytes * static_cast<std::size_t>(size),
               "the last rank's window has {} bytes", window->bytes_of(size - 1));
  const auto copies = env.context.make_stream("copies");
  const auto compute = env.context.make_stream("compute");
  const auto read = env.context.make_event();
  compute->set_zero(sum.data(), (*sum).bytes());
  std::vector<std::vector<float>> sent;
  for (int round = 1; round <= kRounds; ++round) {
    sent.emplace_back(static_cast<std::size_t>(kPiece), static_cast<float>(1000 * env.rank + round));
  }
  for (int round = 1; round <= kRounds; ++round) {
    const auto value = static_cast<std::uint64_t>(round);
    for (int r = 0; r < size && round > 1; ++r) window->wait(size + r, value - 1, *copies);
    copies->copy_bytes(piece.data(), sent[static_cast<std::size_t>(round - 1)].data(), bytes);
    for (int r = 0; r < size; ++r) {
      window->put(piece.data(), bytes, r, bytes * static_cast<std::size_t>(env.rank), *copies);
      window->signal(r, env.rank, value, *copies);
    }
    for (int r = 0; r < size; ++r) window->wait(r, value, *compute);
    add(Add{*sum, *memory, *sum}, *compute);
    for (int r = 0; r < size; ++r) window->signal(r, size + env.rank, value, *compute);
  }
  std::vector<float> result(static_cast<std::size_t>(kPiece * size));
  compute->copy_bytes(result.data(), sum.data(), (*sum).bytes());
  compute->synchronize();
  copies->synchronize();
  for (std::size_t i = 0; i < result.size(); ++i) {
    const auto owner = static_cast<float>(i / static_cast<std::size_t>(kPiece));
    REQUIRE_THAT(result[i] == kRounds * 1000 * owner + 21, "element {} is {}", i, result[i]);
  }
  env.barrier();
}

void expect_error(const std::string& part, const std::function<void()>& body) {
  std::string text;
  try {
    body();
  } catch (const Error& error) {
    text = error.what();
  }
  REQUIRE_THAT(text.find(part) != std::string::npos, "wanted an error with \"{}\", got \"{}\"", part,
               text);
}

void poisoned(WindowEnv& env) {
  const Values memory(env.context, 4);
  const auto window = env.make(*memory, 1);
  REQUIRE_THAT(window != nullptr, "there is no window");
  const auto stream = env.context.make_stream("copies");
  if (env.rank == 0) {
    // The others wait on their GPUs by then, or do not: both must end.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    window->poison("bad step");
  } else {
    expect_error("bad step", [&] {
      window->wait(0, 1, *stream);
      stream->synchronize();
    });
  }
  expect_error("bad step", [&] {
    window->put(memory.data(), 4, 0, 0, *stream);
    stream->synchronize();
  });
  env.barrier();
}

void late(WindowEnv& env) {
  const Values memory(env.context, 4);
  const auto window = env.make(*memory, 3);
  REQUIRE_THAT(window != nullptr, "there is no window");
  const auto stream = env.context.make_stream("copies");
  if (env.rank == 0) {
    expect_error("flag 2 to reach 7; it is 0", [&] {
      window->wait(2, 7, *stream);
      stream->synchronize();
    });
  }
  env.barrier();
}

}  // namespace

bool run_window_case(const std::string& name, WindowEnv& env) {
  if (name == "gathers") {
    gathers(env);
  } else if (name == "poisoned") {
    poisoned(env);
  } else if (name == "late") {
    late(env);
  } else {
    return false;
  }
  return true;
}

}  // namespace tessera::test
