// Errors: one exception type with a category that decides the exit code, and the CHECK macros.
// Message form: "[who] what was got, what was wanted, what to change".
#pragma once

#include <fmt/core.h>

#include <source_location>
#include <stdexcept>
#include <string>

namespace tessera {

enum class ErrorKind {
  kAnswerNo,   // exit 1: the question was answered with no (does not fit, damage found)
  kUser,       // exit 2: a mistake in the configuration or the input
  kInternal,   // exit 3: failed and would fail again
  kTransient,  // exit 4: hardware, network, lost rank or disk; a retry may help
};

// The process exit code of a kind of error (docs/configuration.md, "Exit codes").
int exit_code(ErrorKind kind);

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, std::string message,
        std::source_location where = std::source_location::current())
      : std::runtime_error(std::move(message)), kind_(kind), where_(where) {}

  ErrorKind kind() const { return kind_; }
  const std::source_location& where() const { return where_; }

 private:
  ErrorKind kind_;
  std::source_location where_;
};

}  // namespace tessera

// Throws an Error of `kind` with a formatted message.
#define TESSERA_FAIL(kind, ...) throw ::tessera::Error((kind), ::fmt::format(__VA_ARGS__))

// An invariant of the program: a failure is our bug (exit 3).
#define CHECK(condition, ...)                                             \
  do {                                                                    \
    if (!(condition)) [[unlikely]] {                                      \
      TESSERA_FAIL(::tessera::ErrorKind::kInternal, __VA_ARGS__);         \
    }                                                                     \
  } while (false)

// A requirement on what the user gave (exit 2).
#define CHECK_USER(condition, ...)                                        \
  do {                                                                    \
    if (!(condition)) [[unlikely]] {                                      \
      TESSERA_FAIL(::tessera::ErrorKind::kUser, __VA_ARGS__);             \
    }                                                                     \
  } while (false)
