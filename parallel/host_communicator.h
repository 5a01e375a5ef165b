// HostCommunicator: a Communicator for CPU streams over any way of moving bytes between ranks. It
// checks arguments, keeps the order of issue across streams, and hands one operation at a time to
// its HostBackend, in the thread of the operation's stream.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "parallel/communicator.h"

namespace tessera {

enum class HostOpKind : unsigned char {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kBarrier,
  kSplit,
  kWindow,
  kSend,
  kRecv,
};

const char* name_of(HostOpKind kind);

// One operation of one rank. `piece_bytes` and `count` describe what every rank passes alike:
//   all_reduce, broadcast, send, recv   in == out, the whole tensor
//   all_gather                          in; out holds size of them
//   reduce_scatter, all_to_all          one piece; in (and out) hold size of them
struct HostOp {
  HostOpKind kind = HostOpKind::kBarrier;
  ReduceOp reduce = ReduceOp::kSum;
  DType dtype = DType::kU8;
  int peer = -1;  // root of a broadcast, other side of a send or receive
  const void* in = nullptr;
  void* out = nullptr;
  std::int64_t count = 0;      // elements of one piece
  std::uint64_t sequence = 0;  // number of the collective in its group, from 1; 0 for send and recv

  std::size_t bytes() const { return static_cast<std::size_t>(count) * size_of(dtype); }
};

// "all_reduce #7 (sum, bf16, 4096 bytes)".
std::string to_string(const HostOp& op);

// Bytes of the operand that `rank` brings to a collective of `size` ranks.
std::size_t contributed_bytes(const HostOp& op, int rank, int size);

// The message about the first rank whose call does not match rank 0's; empty if all match.
std::string find_disagreement(const std::string& group, int size,
                              const std::function<const HostOp&(int rank)>& call_of);

// Moves bytes among the ranks of one group. Calls come one at a time, in the order of issue, except
// abort, which comes from any thread. A failure throws on this rank and ends the peers' operations.
class HostBackend {
 public:
  virtual ~HostBackend();
  // Any kind but kSend, kRecv.
  virtual void run(const HostOp& op) = 0;
  // Sends and receives without order among them, except that those of one pair match in order.
  virtual void run_group(std::span<const HostOp> ops) = 0;
  // `sequence` numbers the split like a collective. Sets `rank` and `size` of this rank in the new
  // group; null for a negative color.
  virtual std::shared_ptr<HostBackend> split(int color, int key, const std::string& name,
                                             std::uint64_t sequence, int* rank, int* size) = 0;
  // Null where the backend has no windows.
  virtual std::unique_ptr<PeerWindow> make_window(void* memory, std::size_t bytes, int num_flags,
                                                  std::uint64_t sequence);
  virtual void abort(const std::string& reason) noexcept = 0;
};

// The backend is shared by the communicator and by the operations still enqueued on streams, so
// that the communicator may be destroyed first.
std::unique_ptr<Communicator> make_host_communicator(int rank, int size, const std::string& name,
                                                     std::shared_ptr<HostBackend> backend);

}  // namespace tessera
