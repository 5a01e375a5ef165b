// What every rank does around its body, whichever way it was started. Internal to run_ranks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "parallel/launch.h"

namespace tessera::launch {

// Runs `body` as one rank: makes its group, turns an error into the job's failure and a failure of
// another rank into an abort here, and holds the rank until all have finished. Returns the exit
// code.
int run_rank(const RunRanksOptions& options, const WorldSeed& seed,
             const std::function<std::unique_ptr<Communicator>(const WorldSeed&)>& make_world,
             const std::function<int(RankContext&)>& body);

// Ends the process by force when it is still there some time after arm(): a rank may be stuck where
// no abort reaches it.
class ExitDeadline {
 public:
  // `on_expiry` runs first, in the deadline's thread; it may print.
  ExitDeadline(double seconds, std::function<void()> on_expiry);
  ~ExitDeadline();
  // The first call starts the clock and sets the exit code.
  void arm(int exit_code);

 private:
  void run();

  const double seconds_;
  const std::function<void()> on_expiry_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<int> exit_code_;
  bool is_over_ = false;
  std::thread thread_;
};

// Prints or hands on the job's failure as the options say.
void tell_failure(const RunRanksOptions& options, const FailureReport& failure);

// Starts options.world_size processes of this program and waits for them. Never returns to the
// body.
int run_processes(const RunRanksOptions& options);

}  // namespace tessera::launch
