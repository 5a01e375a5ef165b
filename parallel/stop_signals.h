// Signals that ask a run to stop, taken out of signal context: a handler only notes them, a thread
// acts.
#pragma once

#include <functional>
#include <memory>

namespace tessera {

// While it lives, SIGINT, SIGTERM and SIGUSR1 (what Slurm sends before the time limit) do not end
// the process but call `on_signal(signal, count)` in a thread of its own; `count` is how often that
// signal has come, from 1. One object at a time; the destructor restores what was there before.
class StopSignals {
 public:
  explicit StopSignals(std::function<void(int signal, int count)> on_signal);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

const char* signal_name(int signal);  // "SIGTERM"

}  // namespace tessera
