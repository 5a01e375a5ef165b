#include "parallel/rank_runner.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <new>
#include <utility>

#include "engine/core/log.h"

namespace tessera::launch {
namespace {

// For ever, in a unit that condition variables can count.
constexpr double kNoLimitSeconds = 1e8;

// How long a rank that was ended by another's failure waits for the cause to be told.
constexpr double kCauseSeconds = 5;

struct Caught {
  ErrorKind kind = ErrorKind::kInternal;
  std::string text;
  bool is_consequence = false;
};

Caught describe_current_exception() {
  try {
    throw;
  } catch (const AbortedError& error) {
    return {error.kind(), error.what(), true};
  } catch (const Error& error) {
    return {error.kind(), error.what(), false};
  } catch (const std::bad_alloc&) {
    return {ErrorKind::kTransient, "[memory] the host has no memory left", false};
  } catch (const std::exception& error) {
    return {ErrorKind::kInternal, error.what(), false};
  } catch (...) {
    return {ErrorKind::kInternal, "[launch] an exception of an unknown type", false};
  }
}

// The job's failure once the control plane has settled which it is; ours if it cannot say.
FailureReport settle(ControlPlane& control, const Caught& caught) {
  if (caught.is_consequence) {
    if (const auto cause = control.wait_failure(kCauseSeconds)) return *cause;
  }
  control.report_error(caught.kind, caught.text);
  if (const auto cause = control.wait_failure(kCauseSeconds)) return *cause;
  return {control.rank(), caught.kind, caught.text};
}

}  // namespace

int run_rank(const RunRanksOptions&, const WorldSeed& seed,
             const std::function<std::unique_ptr<Communicator>(const WorldSeed&)>& make_world,
             const std::function<int(RankContext&)>& body) {
  ControlPlane& control = seed.control;
  RankContext context{seed.rank, seed.world_size, seed.local_rank, nullptr, control};
  std::optional<Caught> caught;
  int code = 0;
  try {
    context.world = make_world(seed);
    // A handle, because the body may hand its group on (to a ProcessMesh) and lose it on the way
    // out.
    control.on_abort([abort = context.world->abort_handle()](const FailureReport& failure) {
      abort(failure.rank >= 0 && !failure.is_loss
                ? fmt::format("rank {}: {}", failure.rank, failure.text)
                : failure.text);
    });
    code = body(context);
  } catch (...) {
    caught = describe_current_exception();
  }
  if (!caught) {
    // A rank that ended early must not be missed by the others, and hears of their failures.
    try {
      control.barrier("end of the job", kNoLimitSeconds);
    } catch (...) {
      caught = describe_current_exception();
    }
  }
  if (caught) code = exit_code(settle(control, *caught).kind);
  context.world.reset();
  return code;
}

ExitDeadline::ExitDeadline(double seconds, std::function<void()> on_expiry)
    : seconds_(seconds), on_expiry_(std::move(on_expiry)), thread_([this] { run(); }) {}

ExitDeadline::~ExitDeadline() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ExitDeadline::arm(int exit_code) {
  {
    const std::lock_guard lock(mutex_);
    if (!exit_code_) exit_code_ = exit_code;
  }
  changed_.notify_all();
}

void ExitDeadline::run() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_over_ || exit_code_.has_value(); });
  if (changed_.wait_for(lock, std::chrono::duration<double>(seconds_), [&] { return is_over_; }))
    return;
  const int code = *exit_code_;
  lock.unlock();
  on_expiry_();
  std::fflush(nullptr);
  // Not exit: its handlers could wait for the very threads that are stuck.
  ::_exit(code);
}

void tell_failure(const RunRanksOptions& options, const FailureReport& failure) {
  if (options.on_failure) {
    options.on_failure(failure);
    return;
  }
  // What others say about a lost rank names it already.
  if (failure.rank >= 0 && !failure.is_loss && options.world_size > 1) {
    fmt::print(stderr, "error: rank {}: {}\n", failure.rank, failure.text);
  } else {
    fmt::print(stderr, "error: {}\n", failure.text);
  }
  std::fflush(stderr);
}

}  // namespace tessera::launch
