// Faults on request, to see how a run, a cluster and its scripts take them: the environment variable
// TESSERA_FAULT (docs/clusters.md, "Rehearsing a failure").
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>
#include <vector>

namespace tessera {

enum class FaultKind { kThrow, kKill, kSleep, kSlow };

struct RehearsedFault {
  FaultKind kind = FaultKind::kThrow;
  int rank = 0;
  std::int64_t step = 1;  // slow: the steps behind it
  double factor = 1;      // slow: what a step takes, as a multiple of what it took
};

// "throw@rank=1,step=3;slow@rank=0,step=1,factor=1.3"; an Error of kind kUser for any other form.
std::vector<RehearsedFault> parse_faults(std::string_view text);

class Rehearsal {
 public:
  // The faults of TESSERA_FAULT that are for this rank of `ranks`.
  Rehearsal(int rank, int ranks);

  // Called where a step's forward begins: throws, kills the process, sleeps or slows as was asked.
  void at_forward(std::int64_t step);

 private:
  using Clock = std::chrono::steady_clock;

  int rank_;
  std::vector<RehearsedFault> faults_;
  Clock::time_point last_ = Clock::now();  // when the step before began its own work
};

}  // namespace tessera
