#include "parallel/stop_signals.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <map>
#include <thread>
#include <utility>

#include "engine/core/error.h"

namespace tessera {
namespace {

constexpr std::array kSignals = {SIGINT, SIGTERM, SIGUSR1};

// A signal handler has no argument of ours, so its pipe must be reachable without one. Blocking the
// signals and waiting for them in a thread would not do: libraries start threads before main.
std::atomic<int> pipe_end = -1;

void note_signal(int signal) {
  const int saved = errno;
  const auto byte = static_cast<unsigned char>(signal);
  [[maybe_unused]] const ssize_t put = write(pipe_end.load(), &byte, 1);
  errno = saved;
}

}  // namespace

struct StopSignals::State {
  std::function<void(int, int)> on_signal;
  int ends[2] = {-1, -1};
  std::array<struct sigaction, kSignals.size()> before{};
  std::thread thread;

  void run() {
    std::map<int, int> counts;
    unsigned char byte = 0;
    for (;;) {
      const ssize_t got = read(ends[0], &byte, 1);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0 || byte == 0) return;
      on_signal(byte, ++counts[byte]);
    }
  }
};

StopSignals::StopSignals(std::function<void(int, int)> on_signal)
    : state_(std::make_unique<State>()) {
  state_->on_signal = std::move(on_signal);
  CHECK(pipe2(state_->ends, O_CLOEXEC) == 0, "[signals] no pipe: {}", strerror(errno));
  int none = -1;
  CHECK(pipe_end.compare_exchange_strong(none, state_->ends[1]),
        "[signals] the signals already have a handler");
  state_->thread = std::thread([state = state_.get()] { state->run(); });
  struct sigaction action {};
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &action, &state_->before[i]);
  }
}

StopSignals::~StopSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &state_->before[i], nullptr);
  }
  const unsigned char end = 0;
  [[maybe_unused]] const ssize_t put = write(state_->ends[1], &end, 1);
  state_->thread.join();
  pipe_end = -1;
  close(state_->ends[0]);
  close(state_->ends[1]);
}

const char* signal_name(int signal) {
  switch (signal) {
    case SIGINT:
      return "SIGINT";
    case SIGTERM:
      return "SIGTERM";
    case SIGUSR1:
      return "SIGUSR1";
    case SIGKILL:
      return "SIGKILL";
    case SIGSEGV:
      return "SIGSEGV";
    case SIGABRT:
      return "SIGABRT";
    case SIGBUS:
      return "SIGBUS";
    case SIGFPE:
      return "SIGFPE";
    case SIGILL:
      return "SIGILL";
    default:
      return strsignal(signal);
  }
}

}  // namespace tessera
