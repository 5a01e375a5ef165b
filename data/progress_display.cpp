#include "data/progress_display.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "engine/core/log.h"

namespace tessera {
namespace {

// Short work needs no lines in a log file.
constexpr std::chrono::seconds kLogEvery{15};
constexpr std::chrono::milliseconds kDrawEvery{100};

std::string describe(const PrepareProgress& progress, double seconds_left) {
  std::string line = progress.phase;
  if (progress.total <= 0) return line;
  line +=
      fmt::format(" {:.1f}% of {:.1f} MB",
                  100.0 * static_cast<double>(progress.done) / static_cast<double>(progress.total),
                  static_cast<double>(progress.total) / 1e6);
  if (seconds_left >= 0) line += fmt::format(", {:.0f} s left", seconds_left);
  return line;
}

}  // namespace

ProgressDisplay::ProgressDisplay(bool enabled)
    : enabled_(enabled),
      on_terminal_(::isatty(STDERR_FILENO) != 0),
      start_(Clock::now()),
      last_(start_) {}

ProgressDisplay::~ProgressDisplay() {
  if (drawn_) std::fprintf(stderr, "\r\033[K");
}

void ProgressDisplay::operator()(const PrepareProgress& progress) {
  if (!enabled_) return;
  const auto now = Clock::now();
  if (now - last_ < (on_terminal_ ? Clock::duration(kDrawEvery) : Clock::duration(kLogEvery)))
    return;
  last_ = now;
  if (first_done_ < 0 && progress.total > 0) {
    first_done_ = progress.done;  // what the cache had already says nothing about the speed
    start_ = now;
  }
  double seconds_left = -1;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  if (progress.total > 0 && progress.done > first_done_ && seconds > 1) {
    seconds_left = seconds * static_cast<double>(progress.total - progress.done) /
                   static_cast<double>(progress.done - first_done_);
  }
  const std::string line = describe(progress, seconds_left);
  if (on_terminal_) {
    std::fprintf(stderr, "\r\033[K%s", line.c_str());
    std::fflush(stderr);
    drawn_ = true;
  } else {
    log::info("data      {}", line);
  }
}

}  // namespace tessera
