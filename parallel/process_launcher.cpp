// The parent of ranks that are processes of this machine: starts this program once per rank, holds
// the control server, explains how a rank ended, and leaves nobody behind.
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/core/log.h"
#include "parallel/control/server.h"
#include "parallel/control/wire.h"
#include "parallel/rank_runner.h"
#include "parallel/stop_signals.h"

extern char** environ;

namespace tessera::launch {
namespace {

// The children end themselves within exit_grace_seconds; this is for those that cannot.
constexpr double kExtraGraceSeconds = 2;

struct Child {
  pid_t process = -1;
  bool is_running = false;
};

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<std::string> arguments;
  for (std::size_t begin = 0; begin < bytes.size();) {
    const std::size_t end = std::min(bytes.find('\0', begin), bytes.size());
    arguments.push_back(bytes.substr(begin, end - begin));
    begin = end + 1;
  }
  CHECK(!arguments.empty(), "[launch] /proc/self/cmdline could not be read");
  return arguments;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& text : strings) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

// The environment without what a launcher above us may have left, plus ours.
std::vector<std::string> child_environment(const std::vector<std::string>& ours) {
  std::vector<std::string> result = ours;
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string_view entry = *at;
    if (!entry.starts_with("TESSERA_RANK=") && !entry.starts_with("TESSERA_WORLD_SIZE=") &&
        !entry.starts_with("TESSERA_LOCAL_RANK=") && !entry.starts_with("TESSERA_RENDEZVOUS=") &&
        !entry.starts_with("TESSERA_JOB_TOKEN=") && !entry.starts_with("TESSERA_IS_CHILD=")) {
      result.emplace_back(entry);
    }
  }
  return result;
}

std::string random_token() {
  std::random_device device;
  std::string token;
  for (int i = 0; i < 4; ++i) token += fmt::format("{:08x}", device());
  return token;
}

pid_t start_child(int rank, char* const* arguments, char* const* environment) {
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child != 0) return child;
  // From here to execve only async-signal-safe calls: other threads may have held any lock.
  // A group of its own, so that Ctrl-C reaches the parent alone, which asks all ranks to stop.
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(4);
  if (rank > 0) {
    const int null = open("/dev/null", O_RDONLY);
    if (null >= 0) dup2(null, STDIN_FILENO);
  }
  execve("/proc/self/exe", arguments, environment);
  _exit(127);
}

// What the end of a child means for the job, if it told nothing itself.
void explain_end(ControlServer& server, int rank, pid_t process, int status) {
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    const bool is_crash = signal == SIGSEGV || signal == SIGABRT || signal == SIGBUS ||
                          signal == SIGFPE || signal == SIGILL;
    server.report_error(
        rank, is_crash ? ErrorKind::kInternal : ErrorKind::kTransient,
        fmt::format("[launch] rank {} (process {}) was ended by {}{}", rank, process,
                    signal_name(signal),
                    signal == SIGKILL ? "; if nobody killed it, the kernel may have run out "
                                        "of memory (see dmesg)"
                                      : ""));
    return;
  }
  const int code = WEXITSTATUS(status);
  if (code == 0) return;  // if it left without a goodbye, the server says so
  const ErrorKind kind = code == 1   ? ErrorKind::kAnswerNo
                         : code == 2 ? ErrorKind::kUser
                         : code == 3 ? ErrorKind::kInternal
                                     : ErrorKind::kTransient;
  server.report_error(
      rank, kind,
      fmt::format("[launch] rank {} (process {}) ended with exit code {} and gave no reason", rank,
                  process, code));
}

}  // namespace

int run_processes(const RunRanksOptions& options) {
  ControlOptions control_options;
  control_options.token = random_token();
  control_options.connect_seconds = options.connect_seconds;
  ControlServer server(
      fmt::format("unix:@tessera-{}-{}", getpid(), control_options.token.substr(0, 8)),
      options.world_size, control_options);

  std::atomic<int> interrupts = 0;
  std::unique_ptr<StopSignals> signals;
  if (options.handles_signals) {
    signals = std::make_unique<StopSignals>([&](int signal, int count) {
      if (signal == SIGINT) interrupts = count;
      if (count == 1) {
        log::info("{} received: the ranks stop at the next step edge{}", signal_name(signal),
                  signal == SIGINT ? "; press Ctrl-C again to end at once" : "");
      }
      server.request_stop(fmt::format("{} to the launcher", signal_name(signal)));
    });
  }

  std::vector<std::string> argument_strings = own_arguments();
  const std::vector<char*> arguments = pointers(argument_strings);
  std::vector<Child> children(static_cast<std::size_t>(options.world_size));
  const auto kill_all = [&] {
    for (Child& child : children) {
      if (!child.is_running) continue;
      kill(child.process, SIGKILL);
      waitpid(child.process, nullptr, 0);
      child.is_running = false;
    }
  };
  for (int rank = 0; rank < options.world_size; ++rank) {
    std::vector<std::string> environment_strings = child_environment({
        fmt::format("TESSERA_RANK={}", rank),
        fmt::format("TESSERA_WORLD_SIZE={}", options.world_size),
        fmt::format("TESSERA_LOCAL_RANK={}", rank),
        fmt::format("TESSERA_RENDEZVOUS={}", server.address()),
        fmt::format("TESSERA_JOB_TOKEN={}", control_options.token),
        "TESSERA_IS_CHILD=1",
    });
    const std::vector<char*> environment = pointers(environment_strings);
    Child& child = children[static_cast<std::size_t>(rank)];
    child.process = start_child(rank, arguments.data(), environment.data());
    if (child.process < 0) {
      const int problem = errno;
      kill_all();
      TESSERA_FAIL(ErrorKind::kTransient, "[launch] rank {} could not be started: {}", rank,
                   std::strerror(problem));
    }
    child.is_running = true;
  }

  int largest_code = 0;
  double kill_at = 0;  // once the job has failed
  const auto is_any_running = [&] {
    return std::any_of(children.begin(), children.end(),
                       [](const Child& child) { return child.is_running; });
  };
  while (is_any_running()) {
    for (std::size_t rank = 0; rank < children.size(); ++rank) {
      Child& child = children[rank];
      int status = 0;
      if (!child.is_running || waitpid(child.process, &status, WNOHANG) != child.process) continue;
      child.is_running = false;
      // Codes that bodies returned come with a goodbye; without one the end needs an explanation.
      if (!server.has_left(static_cast<int>(rank))) {
        explain_end(server, static_cast<int>(rank), child.process, status);
      }
      if (WIFEXITED(status)) largest_code = std::max(largest_code, WEXITSTATUS(status));
    }
    if (interrupts.load() > 1) {
      kill_all();
      return 130;
    }
    const double now = control::monotonic_seconds();
    if (kill_at == 0 && server.first_failure()) {
      kill_at = now + options.exit_grace_seconds + kExtraGraceSeconds;
    }
    if (kill_at != 0 && now > kill_at) kill_all();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  // A child that ended with 0 and without a goodbye is judged by the server a moment later.
  server.wait_all_left(control_options.loss_grace_seconds + 1);
  const auto failure = server.first_failure();
  if (!failure) return largest_code;
  tell_failure(options, *failure);
  return exit_code(failure->kind);
}

}  // namespace tessera::launch
