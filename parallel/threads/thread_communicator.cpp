#include "parallel/threads/thread_communicator.h"

#include <cstring>

#include "parallel/threads/thread_window.h"

namespace tessera::threads {

std::string ThreadBackend::offer_board(int size) {
  // The pointer itself travels: all ranks live in this address space.
  auto* holder = new std::shared_ptr<board::Board>(board::Board::make_for_threads(size));
  return std::to_string(reinterpret_cast<std::uintptr_t>(holder));
}

std::shared_ptr<board::Board> ThreadBackend::open_board(const std::string& offer, int, int) {
  return *reinterpret_cast<const std::shared_ptr<board::Board>*>(
      static_cast<std::uintptr_t>(std::stoull(offer)));
}

void ThreadBackend::close_offer(const std::string& offer) noexcept {
  delete reinterpret_cast<std::shared_ptr<board::Board>*>(
      static_cast<std::uintptr_t>(std::strtoull(offer.c_str(), nullptr, 10)));
}

std::shared_ptr<HostBackend> ThreadBackend::make_child(std::shared_ptr<board::Board> board,
                                                       int rank, const std::string& name) {
  return std::make_shared<ThreadBackend>(std::move(board), tree(), rank, name, timeout_seconds());
}

std::unique_ptr<PeerWindow> ThreadBackend::make_window(void* memory, std::size_t bytes,
                                                       int num_flags, std::uint64_t sequence) {
  struct Entry {
    void* memory;
    std::size_t bytes;
    int num_flags;
    std::shared_ptr<WindowState>* state;  // rank 0's: the others copy it
  };
  std::shared_ptr<WindowState> state;
  if (rank() == 0) state = std::make_shared<WindowState>(size(), name(), timeout_seconds());
  const Entry own{memory, bytes, num_flags, &state};
  std::vector<Entry> all(static_cast<std::size_t>(size()));
  exchange(HostOpKind::kWindow, sequence, &own, all.data(), sizeof own);
  for (const Entry& entry : all) {
    if (entry.num_flags == num_flags) continue;
    const std::string reason =
        fmt::format("[{} make_window] rank {} wants {} flags, another rank {}", name(), rank(),
                    num_flags, entry.num_flags);
    tree()->abort(reason);
    throw Error(ErrorKind::kInternal, reason);
  }
  if (rank() == 0) {
    for (int r = 0; r < size(); ++r) {
      const Entry& entry = all[static_cast<std::size_t>(r)];
      state->open(r, entry.memory, entry.bytes, num_flags);
    }
    tree()->add(state);
  }
  // Rank 0 has filled the state when this meeting is over, the others have copied it after the
  // next.
  exchange(HostOpKind::kWindow, sequence, nullptr, nullptr, 0);
  std::shared_ptr<WindowState> shared = *all.front().state;
  exchange(HostOpKind::kWindow, sequence, nullptr, nullptr, 0);
  return make_thread_window(std::move(shared), rank(), size());
}

}  // namespace tessera::threads

namespace tessera {

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size,
                                                                     double timeout_seconds) {
  CHECK(size >= 1, "[threads] a group of {} ranks", size);
  const auto board = board::Board::make_for_threads(size);
  const auto tree = std::make_shared<board::AbortTree>();
  tree->add(board);
  std::vector<std::unique_ptr<Communicator>> result;
  for (int rank = 0; rank < size; ++rank) {
    result.push_back(make_host_communicator(
        rank, size, "world",
        std::make_shared<threads::ThreadBackend>(board, tree, rank, "world", timeout_seconds)));
  }
  return result;
}

}  // namespace tessera
