// Shows how far preparation is: one line that is written over on a terminal, a log line now and
// then elsewhere.
#pragma once

#include <chrono>
#include <string>

#include "data/prepare.h"

namespace tessera {

class ProgressDisplay {
 public:
  // Does nothing unless `enabled` (rank 0).
  explicit ProgressDisplay(bool enabled = true);
  ~ProgressDisplay();  // clears the line
  ProgressDisplay(const ProgressDisplay&) = delete;
  ProgressDisplay& operator=(const ProgressDisplay&) = delete;

  void operator()(const PrepareProgress& progress);

 private:
  using Clock = std::chrono::steady_clock;

  bool enabled_;
  bool on_terminal_;
  bool drawn_ = false;
  Clock::time_point start_;
  Clock::time_point last_;
  std::int64_t first_done_ = -1;
};

}  // namespace tessera
