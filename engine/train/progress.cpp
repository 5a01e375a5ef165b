#include "engine/train/progress.h"

#include <cmath>
#include <cstdio>

#include <unistd.h>

#include <fmt/core.h>

#include "engine/core/log.h"

namespace tessera {
namespace {

constexpr int kBarWidth = 24;
// Without a terminal a line every step would drown a log file.
constexpr std::chrono::seconds kLineInterval{2};

}  // namespace

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  const auto total = static_cast<std::int64_t>(seconds + 0.5);
  if (total >= 3600) return fmt::format("{}h {:02}m", total / 3600, total % 3600 / 60);
  if (total >= 60) return fmt::format("{}m {:02}s", total / 60, total % 60);
  return fmt::format("{}s", total);
}

std::string format_count(double count) {
  if (count >= 1e9) return fmt::format("{:.2f}B", count / 1e9);
  if (count >= 1e6) return fmt::format("{:.2f}M", count / 1e6);
  if (count >= 1e4) return fmt::format("{:.1f}k", count / 1e3);
  return fmt::format("{:.0f}", count);
}

Progress::Progress(std::int64_t first_step, std::int64_t last_step, bool enabled)
    : first_step_(first_step),
      last_step_(last_step),
      enabled_(enabled && log::is_console_enabled()),
      is_terminal_(isatty(STDERR_FILENO) != 0),
      start_(std::chrono::steady_clock::now()),
      last_line_(start_ - kLineInterval) {}

Progress::~Progress() {
  if (drawn_) std::fputc('\n', stderr);
}

void Progress::clear() {
  if (drawn_) std::fputs("\r\033[K", stderr);
  drawn_ = false;
}

void Progress::say(const std::string& line) {
  if (!enabled_) return;
  clear();
  fmt::print(stderr, "{}\n", line);
}

void Progress::show(const TrainRow& row) {
  if (!enabled_) return;
  const auto now = std::chrono::steady_clock::now();
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const auto done = static_cast<double>(row.step - first_step_ + 1);
  const double left = elapsed / done * static_cast<double>(last_step_ - row.step);
  const std::string numbers = fmt::format(
      "step {}/{}  loss {:.4f}  grad_norm {:.3f}  lr {:.2e}  {} tok/s  {} left", row.step, last_step_,
      row.loss, row.grad_norm, row.learning_rate, format_count(row.tokens_per_second),
      format_duration(left));
  if (is_terminal_) {
    const int filled = static_cast<int>(kBarWidth * row.step / std::max<std::int64_t>(1, last_step_));
    const std::string bar = std::string(static_cast<std::size_t>(filled), '#') +
                            std::string(static_cast<std::size_t>(kBarWidth - filled), '.');
    fmt::print(stderr, "\r\033[K[{}] {}", bar, numbers);
    std::fflush(stderr);
    drawn_ = true;
  } else if (now - last_line_ >= kLineInterval || row.step == last_step_) {
    fmt::print(stderr, "{}\n", numbers);
    last_line_ = now;
  }
}

void Progress::show(const EvalRow& row) {
  say(fmt::format("step {}  validation loss {:.4f}  perplexity {:.2f}  ({} target tokens of {})", row.step,
                  row.loss, std::exp(row.loss), format_count(static_cast<double>(row.target_tokens)),
                  row.source));
}

}  // namespace tessera
