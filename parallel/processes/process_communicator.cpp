#include "parallel/processes/process_communicator.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>
#include <vector>

#include "parallel/board/board_backend.h"
#include "parallel/control/wire.h"

namespace tessera {
namespace {

using board::AbortTree;
using board::Board;

std::vector<std::string> folders() {
  std::vector<std::string> result = {"/dev/shm"};
  if (const char* folder = std::getenv("TMPDIR"); folder != nullptr && *folder != '\0') {
    result.push_back(folder);
  }
  result.push_back("/tmp");
  return result;
}

struct File {
  int fd = -1;
  File() = default;
  explicit File(int fd) : fd(fd) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd >= 0) ::close(fd);
  }
};

// Each rank holds a lock on its own byte of the file for as long as it has it open. The kernel
// drops the lock when the process ends, however it ends, and before anyone has reaped it.
struct flock lock_of(int rank) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}
void hold_rank(int fd, int rank, const std::string& path) {
  struct flock lock = lock_of(rank);
  if (fcntl(fd, F_OFD_SETLK, &lock) != 0) {
    TESSERA_FAIL(ErrorKind::kInternal, "[processes] rank {} of {} is taken by another process: {}",
                 rank, path, std::strerror(errno));
  }
}
bool is_held(int fd, int rank) {
  struct flock lock = lock_of(rank);
  return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

std::shared_ptr<Board> open_board_file(const std::string& path, int rank, int size) {
  // Its own open file: locks of one open file do not exclude each other.
  auto file = std::make_shared<File>(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (file->fd < 0) {
    TESSERA_FAIL(ErrorKind::kTransient,
                 "[processes] cannot open {}: {}. Are all ranks on one machine, in "
                 "one container and of one user?",
                 path, std::strerror(errno));
  }
  hold_rank(file->fd, rank, path);
  const std::size_t bytes = Board::bytes_for_processes(size);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file->fd, 0);
  if (memory == MAP_FAILED) {
    TESSERA_FAIL(ErrorKind::kTransient, "[processes] cannot map {} bytes of {}: {}", bytes, path,
                 std::strerror(errno));
  }
  auto* slots = new std::atomic<Board*>(nullptr);
  auto opened = Board::map_for_processes(memory, size, [memory, bytes, file, slots, rank] {
    // Said before the lock goes, so that an orderly end is not taken for a death.
    slots->load()->slot(rank).attached.store(2, std::memory_order_release);
    delete slots;
    munmap(memory, bytes);
  });
  slots->store(opened.get());
  opened->is_alive = [fd = file->fd](int other) { return is_held(fd, other); };
  opened->slot(rank).attached.store(1, std::memory_order_release);
  return opened;
}

// An abort travels between processes in the board of their world.
class WorldReason final : public board::SharedReason {
 public:
  explicit WorldReason(std::shared_ptr<Board> world) : world_(std::move(world)) {}
  void publish(const std::string& reason) noexcept override { world_->publish_reason(reason); }
  std::optional<std::string> read() const override { return world_->read_reason(); }

 private:
  std::shared_ptr<Board> world_;
};

class ProcessBackend final : public board::BoardBackend {
 public:
  using BoardBackend::BoardBackend;

 protected:
  std::string offer_board(int size) override { return make_process_board(size); }
  std::shared_ptr<Board> open_board(const std::string& offer, int rank, int size) override {
    return open_board_file(offer, rank, size);
  }
  void close_offer(const std::string& offer) noexcept override { remove_process_board(offer); }
  std::shared_ptr<HostBackend> make_child(std::shared_ptr<Board> board, int rank,
                                          const std::string& name) override {
    return std::make_shared<ProcessBackend>(std::move(board), tree(), rank, name,
                                            timeout_seconds());
  }
};

// Two processes share memory when they run on one kernel that was started once.
std::string machine() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return control::host_name() + " " + boot;
}

}  // namespace

std::string make_process_board(int size) {
  const std::size_t bytes = Board::bytes_for_processes(size);
  std::string problems;
  for (const std::string& folder : folders()) {
    std::string path = folder + "/tessera-board-XXXXXX";
    const File file(mkostemp(path.data(), O_CLOEXEC));
    int problem = file.fd < 0 ? errno : 0;
    // The blocks are taken now: a full memory file system would kill the ranks with SIGBUS later.
    if (problem == 0) problem = posix_fallocate(file.fd, 0, static_cast<off_t>(bytes));
    if (problem == 0) return path;
    if (file.fd >= 0) ::unlink(path.c_str());
    problems +=
        fmt::format("{}{}: {}", problems.empty() ? "" : "; ", folder, std::strerror(problem));
  }
  TESSERA_FAIL(
      ErrorKind::kTransient,
      "[processes] no room for {} bytes of shared memory between {} ranks ({}). Enlarge /dev/shm "
      "(docker run --shm-size) or set TMPDIR to a folder with room",
      bytes, size, problems);
}

void remove_process_board(const std::string& path) noexcept { ::unlink(path.c_str()); }

std::unique_ptr<Communicator> join_process_board(const std::string& path, int rank, int size,
                                                 double timeout_seconds) {
  CHECK(size >= 1 && rank >= 0 && rank < size, "[processes] rank {} of {} ranks", rank, size);
  auto opened = open_board_file(path, rank, size);
  auto tree = std::make_shared<AbortTree>(std::make_shared<WorldReason>(opened));
  tree->add(opened);
  return make_host_communicator(rank, size, "world",
                                std::make_shared<ProcessBackend>(std::move(opened), std::move(tree),
                                                                 rank, "world", timeout_seconds));
}

std::unique_ptr<Communicator> make_process_communicator(ControlPlane& control,
                                                        double timeout_seconds) {
  const std::string own = machine();
  std::string path;
  const auto remove = [&] {
    if (!path.empty()) remove_process_board(path);
  };
  try {
    if (control.rank() == 0) path = make_process_board(control.world_size());
    const std::string offer =
        control.broadcast("process-board", own + "\n" + path, 0, timeout_seconds);
    const std::size_t line = offer.find('\n');
    CHECK_USER(
        offer.substr(0, line) == own,
        "[processes] rank 0 runs on {}, rank {} on {}: CPU ranks on several machines need the MPI "
        "module; start them with mpirun or srun --mpi=pmix",
        offer.substr(0, offer.find(' ')), control.rank(), own.substr(0, own.find(' ')));
    auto world = join_process_board(offer.substr(line + 1), control.rank(), control.world_size(),
                                    timeout_seconds);
    control.barrier("process-board", timeout_seconds);
    remove();
    return world;
  } catch (...) {
    remove();
    throw;
  }
}

}  // namespace tessera
