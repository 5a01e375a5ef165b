// Overlap: what tensor parallelism exchanges under sequence parallelism, behind the products that
// need it or make it. Every rank holds the rows of its own tokens, piece `rank` of a whole
// [T, n] of as many pieces as there are ranks. A product is taken piece by piece:
//
//   gather_gemm    this rank's own piece at once, those of the others as they arrive
//   gemm_scatter   those of the others first, each sent off as soon as it is done; its own last
//
// so that of n ranks' exchange at most what exceeds n - 1 of the n products is waited for. Messages
// run on a stream of their own, ordered by events. Where that is the compute stream itself the same
// calls follow one another: rows of a product do not depend on each other and sums are in rank
// order, so every bit is the same.
//
// Messages are sent and received through the group, or, with a window on the ranks' scratch, put
// there by the copy engines: ranks of a group make the same calls, so that what one has taken of its
// scratch has the same place in the others'.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/peer_window.h"

namespace tessera {

class Overlap {
 public:
  // `exchange` may be `compute` itself. Collective over `group`: messages have a group of their
  // own, so that they do not queue behind what others enqueue on `group`. `puts`: by windows on the
  // scratch of the compute stream, where the group has any; `whole` of a gather then lies in it.
  Overlap(Communicator& group, Stream& compute, Stream& exchange, bool puts = false);

  int size() const { return group_->size(); }
  bool has_window() const { return window_ != nullptr; }

  // Rows of rank `rank`: what a product reads, or where it writes its result. Enqueues on the
  // compute stream.
  using Product = std::function<void(int rank, const Tensor& piece)>;

  // whole [n t, cols] = own [t, cols] of all ranks; product(rank, piece) once for each. Later work
  // of the compute stream finds `whole` complete.
  void gather_gemm(const Tensor& own, const Tensor& whole, const Product& product);
  // own [t, cols] = the sum over ranks of what their products wrote for this rank. Takes scratch of
  // the compute stream: n + 2 pieces (3 of 2 ranks).
  void gemm_scatter(const Tensor& own, const Product& product);

  // The same exchanges without chunks, behind whatever the compute stream is given between start
  // and finish; one of each at a time. What they read and write stays untouched meanwhile.
  void start_gather(const Tensor& own, const Tensor& whole);
  void finish_gather() { join(*gathered_); }
  void start_scatter(const Tensor& whole, const Tensor& own);
  void finish_scatter() { join(*scattered_); }

 private:
  bool has_two_streams() const { return exchange_ != compute_; }
  // Later work of the exchange stream runs after that of the compute stream so far.
  void fork();
  // Marks the exchange stream; later work of the compute stream runs after a mark.
  void mark(Event& event);
  void join(Event& event);
  // whole = own of all ranks, with a mark behind each step's.
  void exchange_pieces(const Tensor& own, const Tensor& whole);
  // Sends `own` to rank `to` and receives from rank `from`, on the exchange stream. What a rank
  // sends arrives at landing(that rank) of the receiver.
  template <typename Landing>
  void pass(const Tensor& own, int to, int from, Landing&& landing);
  // Tells every rank that what has been taken of this rank's scratch may be written.
  void open_landings();
  int neighbour(int steps) const { return (group_->rank() + steps + size()) % size(); }

  std::unique_ptr<Communicator> group_;
  std::unique_ptr<PeerWindow> window_;  // null: messages are sent
  Tensor scratch_;                      // behind the window
  std::uint64_t round_ = 0;             // of the window
  Stream* compute_;
  Stream* exchange_;
  std::unique_ptr<Event> forked_;
  std::unique_ptr<Event> gathered_;
  std::unique_ptr<Event> scattered_;
  std::vector<std::unique_ptr<Event>> exchanged_;  // [size], by step; 0 is unused
};

}  // namespace tessera
