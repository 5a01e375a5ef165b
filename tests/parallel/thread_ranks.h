// Runs a body on threads as the ranks of one group; the first error of any rank ends the others.
#pragma once

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/parallel/communicator_conformance.h"

namespace tessera::test {

struct ThreadRankOptions {
  bool inline_streams = true;
  double timeout_seconds = 60;
};

// Runs body(RankEnv&) as every rank of `groups`, with a context from make_rank_context(rank).
// Rethrows the first error that is a cause; an AbortedError only if there is none.
template <typename MakeContext, typename Body>
void run_group_ranks(std::vector<std::unique_ptr<Communicator>> groups,
                     MakeContext&& make_rank_context, Body&& body) {
  const int size = static_cast<int>(groups.size());
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Communicator& world = *groups[static_cast<std::size_t>(rank)];
      try {
        const std::unique_ptr<BackendContext> context = make_rank_context(rank);
        set_operand_context(context.get());
        RankEnv env{world, *context};
        body(env);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
        world.abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::exception_ptr consequence;
  for (const std::exception_ptr& error : errors) {
    if (error == nullptr) continue;
    try {
      std::rethrow_exception(error);
    } catch (const AbortedError&) {
      consequence = error;
    }
  }
  if (consequence != nullptr) std::rethrow_exception(consequence);
}

template <typename Body>
void run_thread_ranks(int size, const ThreadRankOptions& options, Body&& body) {
  run_group_ranks(
      make_thread_communicators(size, options.timeout_seconds),
      [&](int) {
        ContextOptions context_options;
        context_options.inline_streams = options.inline_streams;
        return make_context(Device{}, context_options);
      },
      body);
}

}  // namespace tessera::test
