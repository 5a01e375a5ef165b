#include "engine/core/log.h"

#include <cstdio>
#include <ctime>
#include <mutex>

#include "engine/core/error.h"

namespace tessera::log {
namespace {

struct Sink {
  std::mutex mutex;
  bool console = true;
  Level level = Level::kInfo;
  std::FILE* file = nullptr;
};

Sink& sink() {
  static Sink instance;
  return instance;
}

thread_local int thread_rank = -1;

const char* label(Level level) {
  switch (level) {
    case Level::kDebug:
      return "debug";
    case Level::kInfo:
      return "info";
    case Level::kWarning:
      return "warning";
    case Level::kError:
      return "error";
  }
  return "";
}

}  // namespace

void set_console(bool enabled) {
  const std::lock_guard lock(sink().mutex);
  sink().console = enabled;
}

bool is_console_enabled() {
  const std::lock_guard lock(sink().mutex);
  return sink().console;
}

void set_level(Level level) {
  const std::lock_guard lock(sink().mutex);
  sink().level = level;
}

void set_file(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "a");
  if (file == nullptr) TESSERA_FAIL(ErrorKind::kTransient, "[log] cannot open {} for appending", path);
  const std::lock_guard lock(sink().mutex);
  if (sink().file != nullptr) std::fclose(sink().file);
  sink().file = file;
}

void close_file() {
  const std::lock_guard lock(sink().mutex);
  if (sink().file != nullptr) std::fclose(sink().file);
  sink().file = nullptr;
}

void set_thread_rank(int rank) { thread_rank = rank; }

void write(Level level, std::string_view message) {
  const std::lock_guard lock(sink().mutex);
  if (level < sink().level) return;
  if (sink().console && thread_rank <= 0) {
    if (level == Level::kInfo) {
      fmt::print(stderr, "{}\n", message);
    } else {
      fmt::print(stderr, "{}: {}\n", label(level), message);
    }
  }
  if (sink().file != nullptr) {
    char when[32];
    const std::time_t now = std::time(nullptr);
    std::tm parts{};
    localtime_r(&now, &parts);
    std::strftime(when, sizeof when, "%F %T", &parts);
    if (thread_rank >= 0) {
      fmt::print(sink().file, "{} {} rank {}: {}\n", when, label(level), thread_rank, message);
    } else {
      fmt::print(sink().file, "{} {}: {}\n", when, label(level), message);
    }
    std::fflush(sink().file);
  }
}

}  // namespace tessera::log
