#include "parallel/launch_environment.h"

#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#include "engine/core/error.h"
#include "engine/core/text.h"

namespace tessera {
namespace {

class Reader {
 public:
  explicit Reader(const EnvironmentReader& read) : read_(read) {}

  std::string text(const char* name) const {
    const char* value = read_(name);
    return value != nullptr ? value : "";
  }
  bool has(const char* name) const { return !text(name).empty(); }
  int number(const char* name) const {
    const auto value = parse_integer(text(name));
    CHECK_USER(value && *value >= 0 && *value <= 1 << 24,
               "[launch] {} is '{}', expected a number from 0", name, text(name));
    return static_cast<int>(*value);
  }
  int number_or(const char* name, int otherwise) const {
    return has(name) ? number(name) : otherwise;
  }

 private:
  const EnvironmentReader& read_;
};

LaunchEnvironment read_pair(const Reader& env, const std::string& source, const char* rank,
                            const char* world_size) {
  LaunchEnvironment result;
  result.source = source;
  CHECK_USER(env.has(rank) && env.has(world_size),
             "[launch] {} is set but {} is not; set both or neither",
             env.has(rank) ? rank : world_size, env.has(rank) ? world_size : rank);
  result.rank = env.number(rank);
  result.world_size = env.number(world_size);
  CHECK_USER(result.world_size >= 1 && result.rank < result.world_size,
             "[launch] {} is {} and {} is {}: the rank must be below the world size", rank,
             result.rank, world_size, result.world_size);
  return result;
}

std::string slurm_step(const Reader& env) {
  return fmt::format("{}.{}", env.text("SLURM_JOB_ID"), env.text("SLURM_STEP_ID"));
}

// All tasks of a Slurm step find the same address without talking to each other.
std::string slurm_rendezvous(const Reader& env) {
  if (env.number_or("SLURM_STEP_NUM_NODES", env.number_or("SLURM_NNODES", 1)) == 1) {
    return "unix:@tessera-slurm-" + slurm_step(env);
  }
  const std::string hosts = env.has("SLURM_STEP_NODELIST") ? env.text("SLURM_STEP_NODELIST")
                                                           : env.text("SLURM_JOB_NODELIST");
  const auto job = parse_integer(env.text("SLURM_JOB_ID")).value_or(0);
  const auto step = parse_integer(env.text("SLURM_STEP_ID")).value_or(0);
  // Below the ports that Linux hands out by itself.
  return fmt::format("{}:{}", first_host(hosts), 20000 + (job * 31 + step) % 10000);
}

bool is_slurm_task(const Reader& env) {
  return env.has("SLURM_PROCID") && env.has("SLURM_STEP_ID") && env.has("SLURM_STEP_NUM_TASKS");
}

std::optional<LaunchEnvironment> read_tessera(const Reader& env) {
  if (!env.has("TESSERA_RANK") && !env.has("TESSERA_WORLD_SIZE")) return std::nullopt;
  LaunchEnvironment result = read_pair(env, "TESSERA_RANK", "TESSERA_RANK", "TESSERA_WORLD_SIZE");
  result.local_rank = env.number_or("TESSERA_LOCAL_RANK", result.rank);
  result.token = env.text("TESSERA_JOB_TOKEN");
  result.is_own_child = env.text("TESSERA_IS_CHILD") == "1";
  CHECK_USER(
      result.world_size == 1 || env.has("TESSERA_RENDEZVOUS"),
      "[launch] TESSERA_RENDEZVOUS is not set: give every rank the same host:port, on the machine "
      "of rank 0");
  return result;
}

std::optional<LaunchEnvironment> read_torch_style(const Reader& env) {
  if (!env.has("RANK") && !env.has("WORLD_SIZE")) return std::nullopt;
  // Some clusters export WORLD_SIZE=1 everywhere.
  if (!env.has("RANK") && env.text("WORLD_SIZE") == "1") return std::nullopt;
  LaunchEnvironment result = read_pair(env, "RANK and WORLD_SIZE", "RANK", "WORLD_SIZE");
  result.local_rank = env.number_or("LOCAL_RANK", result.rank);
  if (result.world_size > 1 && !env.has("TESSERA_RENDEZVOUS")) {
    CHECK_USER(
        env.has("MASTER_ADDR") && env.has("MASTER_PORT"),
        "[launch] RANK and WORLD_SIZE are set but {} is not: the ranks need the address of rank 0",
        env.has("MASTER_ADDR") ? "MASTER_PORT" : "MASTER_ADDR");
    // torchrun's agent keeps a server of its own on MASTER_PORT.
    const bool is_taken = env.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
    result.rendezvous = fmt::format("{}:{}", env.text("MASTER_ADDR"),
                                    env.number("MASTER_PORT") + (is_taken ? 1 : 0));
  }
  result.token = env.text("TORCHELASTIC_RUN_ID");
  return result;
}

std::optional<LaunchEnvironment> read_mpi(const Reader& env) {
  std::optional<LaunchEnvironment> result;
  if (env.has("OMPI_COMM_WORLD_RANK") || env.has("OMPI_COMM_WORLD_SIZE")) {
    result = read_pair(env, "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
    result->local_rank = env.number_or("OMPI_COMM_WORLD_LOCAL_RANK", result->rank);
    result->token = env.has("PMIX_NAMESPACE") ? env.text("PMIX_NAMESPACE")
                                              : env.text("OMPI_MCA_ess_base_jobid");
    // On one machine the ranks can meet without MPI, should its module be missing.
    const bool is_one_machine =
        env.number_or("OMPI_COMM_WORLD_LOCAL_SIZE", 0) == result->world_size &&
        !result->token.empty();
    if (is_one_machine) {
      result->rendezvous = fmt::format("unix:@tessera-mpi-{}-{}", ::getuid(), result->token);
    }
  } else if (env.has("PMI_RANK") && env.has("PMI_SIZE")) {
    result = read_pair(env, "PMI", "PMI_RANK", "PMI_SIZE");
    result->local_rank =
        env.number_or("MPI_LOCALRANKID", env.number_or("SLURM_LOCALID", result->rank));
  }
  if (!result) return std::nullopt;
  result->has_mpi = true;
  // Under srun both speak of the same tasks; under mpirun inside a Slurm job they do not.
  if (is_slurm_task(env) && env.number("SLURM_PROCID") == result->rank &&
      env.number("SLURM_STEP_NUM_TASKS") == result->world_size) {
    result->rendezvous = slurm_rendezvous(env);
    result->token = slurm_step(env);
    // srun sets PMI_* for its older protocols too, under which Open MPI ends the process in
    // MPI_Init.
    result->has_mpi = env.has("PMIX_RANK");
  }
  return result;
}

std::optional<LaunchEnvironment> read_slurm(const Reader& env) {
  if (!env.has("SLURM_JOB_ID")) return std::nullopt;
  const bool is_task = is_slurm_task(env);
  const int promised = env.number_or("SLURM_NTASKS", 1);
  const int started = is_task ? env.number("SLURM_STEP_NUM_TASKS") : 1;
  CHECK_USER(
      started > 1 || promised <= 1,
      "[launch] Slurm promises {} tasks (SLURM_NTASKS) but this process is the only one: start it "
      "with srun inside the job, or ask Slurm for one task per job (--ntasks=1); to run alone on "
      "purpose, set TESSERA_RANK=0 TESSERA_WORLD_SIZE=1",
      promised);
  if (!is_task) return std::nullopt;
  LaunchEnvironment result = read_pair(env, "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS");
  result.local_rank = env.number_or("SLURM_LOCALID", result.rank);
  result.rendezvous = slurm_rendezvous(env);
  result.token = slurm_step(env);
  result.has_mpi = env.has("PMIX_RANK");
  return result;
}

}  // namespace

std::optional<LaunchEnvironment> detect_launch(const EnvironmentReader& read) {
  const Reader env(read);
  auto result = read_tessera(env);
  if (!result) result = read_torch_style(env);
  if (!result) result = read_mpi(env);
  if (!result) result = read_slurm(env);
  if (!result || (result->world_size == 1 && !result->is_own_child)) return std::nullopt;
  if (env.has("TESSERA_RENDEZVOUS")) result->rendezvous = env.text("TESSERA_RENDEZVOUS");
  return result;
}

std::optional<LaunchEnvironment> detect_launch() {
  return detect_launch([](const char* name) -> const char* { return std::getenv(name); });
}

std::string first_host(const std::string& host_list) {
  std::string host;
  bool is_in_brackets = false;
  bool is_skipping = false;
  for (const char c : host_list) {
    if (c == '[') {
      is_in_brackets = true;
    } else if (c == ']') {
      is_in_brackets = false;
      is_skipping = false;
    } else if (is_in_brackets) {
      // Of "[007-012,020]" the first number counts.
      is_skipping = is_skipping || c == '-' || c == ',';
      if (!is_skipping) host += c;
    } else if (c == ',') {
      break;
    } else {
      host += c;
    }
  }
  return host;
}

}  // namespace tessera
