// What every communicator must do, written once and run for each backend: on threads, in processes
// of our own and under mpirun. A case runs on every rank and throws when something is wrong, so it
// needs no test framework in the processes that it runs in.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parallel/communicator.h"

namespace tessera::test {

// What one rank of a case is given.
struct RankEnv {
  Communicator& world;
  BackendContext& context;
};

// Where the operands of this thread's cases live: the device of `context` (null: host memory). It
// must outlive the cases.
void set_operand_context(BackendContext* context);

// Timeout of the groups that the case "timeout" runs in, in seconds.
inline constexpr double kShortTimeout = 0.4;

struct ConformanceCase {
  const char* name;
  void (*run)(RankEnv& env);
};

// Cases after which the group is as good as new: they may share one.
const std::vector<ConformanceCase>& lasting_cases();
// Cases that end with an aborted group: each needs its own, of at least two ranks, and succeeds
// when every rank's call returns.
const std::vector<ConformanceCase>& ending_cases();
// The case of that name from either list.
const ConformanceCase& find_case(const std::string& name);

}  // namespace tessera::test

// Throws with the text unless the condition holds.
#define REQUIRE_THAT(condition, ...)                                              \
  do {                                                                            \
    if (!(condition)) TESSERA_FAIL(::tessera::ErrorKind::kInternal, __VA_ARGS__); \
  } while (false)
