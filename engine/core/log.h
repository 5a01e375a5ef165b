// Log sink: the one global of the program. Lines go to stderr (rank 0) and to a file when set.
#pragma once

#include <fmt/core.h>

#include <string>
#include <string_view>

namespace tessera::log {

enum class Level { kDebug, kInfo, kWarning, kError };

// Only rank 0 prints to stderr; every rank writes to its file when one is set. Thread ranks of one
// process call set_thread_rank so that each line carries its rank.
void set_console(bool enabled);
bool is_console_enabled();
void set_level(Level level);
void set_file(const std::string& path);  // appends; throws kTransient if it cannot be opened
void close_file();
void set_thread_rank(int rank);  // -1: not a rank (default); ranks > 0 are silent on the console

void write(Level level, std::string_view message);

template <typename... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void warning(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kWarning, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void error(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kError, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kDebug, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace tessera::log
