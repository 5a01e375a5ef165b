// Progress on the console of rank 0: one line that is drawn over on a terminal, plain lines elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "engine/train/run_folder.h"

namespace tessera {

class Progress {
 public:
  // `enabled` false: silent (ranks above 0). Silent as well where the log has no console.
  Progress(std::int64_t first_step, std::int64_t last_step, bool enabled);
  ~Progress();

  void show(const TrainRow& row);
  void show(const EvalRow& row);
  // A line of its own above the bar.
  void say(const std::string& line);

 private:
  void clear();

  std::int64_t first_step_;
  std::int64_t last_step_;
  bool enabled_;
  bool is_terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_line_;
};

// "2h 05m", "3m 20s", "12s".
std::string format_duration(double seconds);
// "12.3k", "1.25M".
std::string format_count(double count);

}  // namespace tessera
