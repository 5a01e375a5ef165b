// PeerWindow: one-sided access to memory that every rank of a group has registered. A rank writes
// into a peer's window, then raises one of the peer's flags; the peer waits for the flag on a
// stream and reads. There is no matching call on the other side and no reduction, so copies run
// beside compute: what copy-engine gathers and overlapped tensor parallelism are built on.
//
// Protocol: flags start at 0 and only grow; use a fresh value (a step counter, say) for every
// round. A window has no flow control: before it overwrites what a peer may still be reading, the
// writer must have waited for a flag by which that peer said it was done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "engine/device/stream.h"

namespace tessera {

class PeerWindow {
 public:
  virtual ~PeerWindow();
  PeerWindow(const PeerWindow&) = delete;
  PeerWindow& operator=(const PeerWindow&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Bytes of this rank's registered memory; peers may have registered other sizes.
  virtual std::size_t bytes_of(int peer) const = 0;

  // Writes `bytes` from `src` to `offset` in the window of `peer` (this rank included). `src` must
  // stay valid until the stream has run the copy.
  virtual void put(const void* src, std::size_t bytes, int peer, std::size_t offset,
                   Stream& stream) = 0;
  // Raises flag `flag` of `peer` to at least `value`, after every earlier put of this stream is
  // visible there.
  virtual void signal(int peer, int flag, std::uint64_t value, Stream& stream) = 0;
  // Later work of the stream runs once this rank's flag has reached `value`. A poisoned window ends
  // the wait with an AbortedError; a wait longer than the group's timeout poisons it.
  virtual void wait(int flag, std::uint64_t value, Stream& stream) = 0;

  // Ends the pending and later waits of every rank with `reason`. Aborting the communicator that
  // made the window does the same. The first reason wins.
  virtual void poison(const std::string& reason) noexcept = 0;

 protected:
  PeerWindow(int rank, int size) : rank_(rank), size_(size) {}

 private:
  int rank_;
  int size_;
};

}  // namespace tessera
