// The entry of libtessera_mpi.so (see parallel/mpi_loader.h).
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>

#include "parallel/mpi/mpi_backend.h"
#include "parallel/mpi_loader.h"

namespace tessera::mpi {
namespace {

// MPI itself is one per process; so is what hangs on it.
std::shared_ptr<MpiState>& state() {
  static std::shared_ptr<MpiState> instance;
  return instance;
}

int report(char* problem, const std::string& words) {
  std::snprintf(problem, MpiModuleTable::kProblemBytes, "%s", words.c_str());
  return 1;
}

int start(int* rank, int* size, int* local_rank, char* problem) {
  int is_started = 0;
  MPI_Initialized(&is_started);
  int level = MPI_THREAD_SINGLE;
  if (is_started == 0) {
    const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
    if (code != MPI_SUCCESS) return report(problem, "[mpi] MPI_Init_thread: " + words_of(code));
  } else {
    MPI_Query_thread(&level);
  }
  if (level < MPI_THREAD_SERIALIZED) {
    return report(problem,
                  "[mpi] this MPI library allows calls from one thread only; a build with thread "
                  "support is needed");
  }
  if (state() == nullptr) {
    MPI_Comm world = MPI_COMM_NULL;
    const int code = MPI_Comm_dup(MPI_COMM_WORLD, &world);
    if (code != MPI_SUCCESS) return report(problem, "[mpi] MPI_Comm_dup: " + words_of(code));
    state() = std::make_shared<MpiState>(world);
  }
  *rank = state()->rank();
  *size = state()->size();
  MPI_Comm machine = MPI_COMM_NULL;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, *rank, MPI_INFO_NULL, &machine);
  MPI_Comm_rank(machine, local_rank);
  MPI_Comm_free(&machine);
  return 0;
}

int broadcast(void* data, std::size_t bytes, char* problem) {
  const std::lock_guard lock(state()->lock());
  const int code = MPI_Bcast(data, static_cast<int>(bytes), MPI_BYTE, 0, MPI_COMM_WORLD);
  return code == MPI_SUCCESS ? 0 : report(problem, "[mpi] MPI_Bcast: " + words_of(code));
}

Communicator* make_world(double timeout_seconds, char* problem) {
  try {
    std::vector<int> members(static_cast<std::size_t>(state()->size()));
    std::iota(members.begin(), members.end(), 0);
    const int rank = state()->rank();
    const int group = state()->next_group();
    state()->use_group(group);
    auto backend = std::make_shared<MpiBackend>(state(), group, std::move(members), rank, "world",
                                                timeout_seconds);
    return make_host_communicator(rank, state()->size(), "world", std::move(backend)).release();
  } catch (const std::exception& error) {
    report(problem, error.what());
    return nullptr;
  }
}

void finish() {
  if (state() == nullptr || !state()->can_finish()) return;
  int is_finished = 0;
  MPI_Finalized(&is_finished);
  if (is_finished != 0) return;
  state()->finish();
  MPI_Finalize();
}

void abort(int exit_code) { MPI_Abort(MPI_COMM_WORLD, exit_code); }

constexpr MpiModuleTable kTable = {
    MpiModuleTable::kVersion, start, broadcast, make_world, finish, abort};

}  // namespace
}  // namespace tessera::mpi

extern "C" __attribute__((visibility("default"))) const tessera::MpiModuleTable*
tessera_mpi_module() {
  return &tessera::mpi::kTable;
}
