// Starting the ranks of a job and ending them together: as threads, as processes of our own, or
// under a launcher (mpirun, srun, torchrun-like) that has started them already.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "parallel/communicator.h"
#include "parallel/control/control_plane.h"

namespace tessera {

enum class LaunchMode {
  kThreads,    // ranks are threads of this process
  kProcesses,  // this process starts one of its kind per rank and watches over them
  kExternal,   // something else has started the ranks
};

// What makes the world's group where it is not the CPU's: `local_rank` picks the device.
struct WorldSeed {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  ControlPlane& control;
};

struct RunRanksOptions {
  int world_size = 1;
  // How to start them where no launcher has; a launcher found in the environment always counts.
  LaunchMode mode = LaunchMode::kThreads;
  double collective_timeout_seconds = 600;
  double connect_seconds = 300;  // for all ranks to appear
  // After the first error every rank ends within this time, by force if need be.
  double exit_grace_seconds = 10;
  // SIGINT, SIGTERM and SIGUSR1 ask for a stop at an agreed edge (ControlPlane::agreed_stop); a
  // second SIGINT ends at once with 130. Otherwise they do what they did before.
  bool handles_signals = true;
  // Called once per rank, in its thread. Empty: CPU groups for the mode, over MPI where a launcher
  // has it.
  std::function<std::unique_ptr<Communicator>(const WorldSeed&)> make_world;
  // Gets the first error of the job, once per job. Empty: its text goes to stderr.
  std::function<void(const FailureReport&)> on_failure;
};

struct RankContext {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  std::unique_ptr<Communicator> world;
  ControlPlane& control;
};

// Runs `body` as every rank of the job that this process is to run, and returns the exit code of
// the process: that of the job's first error if there was one (exit_code of its kind, the same on
// every rank), else the largest that a body returned; 130 after a second Ctrl-C. An exception that
// leaves `body` is an error of the job and ends all ranks. In a process that run_ranks itself
// started as a rank, it runs that rank: the program comes to this call again with the same
// arguments. kUser errors of the launch itself (contradicting environment, wrong world size) are
// thrown.
int run_ranks(const RunRanksOptions& options, const std::function<int(RankContext&)>& body);

// How many ranks a launcher has started; 0 if none is at work.
int launched_world_size();
// Whether run_ranks in this process will run rank 0, which alone prints.
bool runs_rank_zero();

}  // namespace tessera
