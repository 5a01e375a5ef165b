// Runs the `tessera` program as a user does: as threads, as processes, or under mpirun.
#pragma once

#include <sys/wait.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include <fmt/core.h>

namespace tessera::test {

struct Ended {
  int code = -1;
  std::string output;  // what was asked for: stdout and stderr together, or stdout alone
};

enum class Launcher { kThreads, kProcesses, kMpirun };

inline bool has_mpirun() { return std::system("mpirun --version > /dev/null 2>&1") == 0; }

// `tessera arguments`, at most 120 seconds, under the shell; `before` stands in front of it and
// `errors` says where stderr goes.
inline Ended run_tessera(const std::string& arguments, const std::string& before = "",
                         const std::string& errors = "2>&1") {
  // Variables that a launcher around the tests may have set.
  std::string clean = "env";
  for (const char* name :
       {"TESSERA_RANK", "TESSERA_WORLD_SIZE", "TESSERA_RENDEZVOUS", "RANK", "WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_JOB_ID",
        "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"}) {
    clean += std::string(" -u ") + name;
  }
  const std::string command = fmt::format("( {} timeout -k 1 120 {} '{}' {} ) {} < /dev/null",
                                          clean, before, TESSERA_PROGRAM, arguments, errors);
  Ended ended;
  std::FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return ended;
  char part[4096];
  while (std::fgets(part, sizeof part, pipe) != nullptr) ended.output += part;
  const int status = pclose(pipe);
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return ended;
}

// The same with stdout alone.
inline Ended stdout_of_tessera(const std::string& arguments) {
  return run_tessera(arguments, "", "2> /dev/null");
}

// `tessera train arguments` on that many ranks.
inline Ended run_train(Launcher launcher, int ranks, const std::string& arguments) {
  const std::string train = fmt::format("train {} --set run.device=cpu", arguments);
  if (launcher == Launcher::kMpirun) {
    return run_tessera(train,
                       fmt::format("mpirun --allow-run-as-root --oversubscribe -n {}", ranks));
  }
  return run_tessera(fmt::format("{} --set run.ranks={} --launch {}", train, ranks,
                                 launcher == Launcher::kThreads ? "threads" : "processes"));
}

}  // namespace tessera::test
