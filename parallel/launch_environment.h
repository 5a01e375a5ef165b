// Who started this process as which rank: what launchers leave in the environment.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace tessera {

struct LaunchEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  // among the ranks of this machine
  std::string source;  // "TESSERA_RANK", "Open MPI", "Slurm", ...: for messages
  // Where the control server listens or is to listen: "host:port" or "unix:@name". Empty: unknown,
  // to be learned through MPI.
  std::string rendezvous;
  // Tells jobs apart that meet at one address by accident; may be empty.
  std::string token;
  bool is_own_child = false;  // run_ranks of a parent process started this one and holds the server
  bool has_mpi = false;       // the launcher can start MPI programs
};

using EnvironmentReader = std::function<const char*(const char* name)>;

// Reads, in this order: TESSERA_RANK, TESSERA_WORLD_SIZE, TESSERA_LOCAL_RANK, TESSERA_RENDEZVOUS;
// RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; MPI's (OMPI_COMM_WORLD_*, PMI_*);
// SLURM_*. The first that is there decides. Nothing if no launcher is at work, or it started a
// single task. kUser in words if the variables contradict each other, lack one, or promise several
// tasks while this process is the only one. TESSERA_RENDEZVOUS overrides the address of every
// launcher.
std::optional<LaunchEnvironment> detect_launch(const EnvironmentReader& read);
std::optional<LaunchEnvironment> detect_launch();  // of this process

// The first name of a Slurm host list: "gpu007" of "gpu[007-012,020],login1".
std::string first_host(const std::string& host_list);

}  // namespace tessera
