// Groups whose ranks are threads of one process (make_thread_communicators in
// parallel/communicator.h).
#pragma once

#include "parallel/board/board_backend.h"

namespace tessera::threads {

class ThreadBackend : public board::BoardBackend {
 public:
  using BoardBackend::BoardBackend;

  std::unique_ptr<PeerWindow> make_window(void* memory, std::size_t bytes, int num_flags,
                                          std::uint64_t sequence) override;

 protected:
  std::string offer_board(int size) override;
  std::shared_ptr<board::Board> open_board(const std::string& offer, int rank, int size) override;
  void close_offer(const std::string& offer) noexcept override;
  std::shared_ptr<HostBackend> make_child(std::shared_ptr<board::Board> board, int rank,
                                          const std::string& name) override;
};

}  // namespace tessera::threads
