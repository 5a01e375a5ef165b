#include "parallel/mpi/mpi_backend.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <thread>

#include "engine/device/cpu/cpu_stream.h"
#include "parallel/reduction.h"

namespace tessera::mpi {
namespace {

// Operands up to this size travel with the call itself.
constexpr std::size_t kInlineBytes = 512;
// Bytes of one message: well below what MPI can count, and small enough to bound the staging
// memory.
constexpr std::size_t kChunkBytes = std::size_t{8} << 20;

const char* offset(const void* base, std::size_t bytes) {
  return static_cast<const char*>(base) + bytes;
}
char* offset(void* base, std::size_t bytes) { return static_cast<char*>(base) + bytes; }
void copy(void* out, const void* in, std::size_t bytes) {
  if (out != in && bytes != 0) std::memmove(out, in, bytes);
}

bool is_inline(const HostOp& op, int size) {
  const bool holds_all = op.kind == HostOpKind::kReduceScatter || op.kind == HostOpKind::kAllToAll;
  return op.bytes() * static_cast<std::size_t>(holds_all ? size : 1) <= kInlineBytes;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Messages come within microseconds or after a peer's computation: yield a few times, then sleep
// longer and longer, so that ranks which share cores do not steal from each other.
class Pause {
 public:
  void operator()() {
    if (++rounds_ <= 20) {
      sched_yield();
      return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(std::min(20 * (rounds_ - 20), 1000)));
  }
  void reset() { rounds_ = 0; }

 private:
  int rounds_ = 0;
};

}  // namespace

struct MpiBackend::Call {
  HostOp op;
  unsigned char payload[kInlineBytes];
};

class MpiBackend::Batch {
 public:
  explicit Batch(MpiBackend& backend) : backend_(backend) {}
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
  // Receives that will not come must not write into memory that is about to go. Sends cannot be
  // taken back; once the job is aborted no further MPI call moves them.
  ~Batch() {
    const std::lock_guard lock(backend_.state_->lock());
    for (Entry& entry : entries_) {
      if (entry.request == MPI_REQUEST_NULL) continue;
      if (entry.is_receive) {
        MPI_Cancel(&entry.request);
        MPI_Wait(&entry.request, MPI_STATUS_IGNORE);
      } else {
        MPI_Request_free(&entry.request);
      }
    }
  }

  void send(const void* data, std::size_t bytes, int peer, Tag tag) {
    const std::lock_guard lock(backend_.state_->lock());
    Entry& entry = entries_.emplace_back();
    entry.peer = peer;
    check(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, world_rank(peer), mpi_tag(tag),
                    backend_.state_->world(), &entry.request));
  }
  void receive(void* data, std::size_t bytes, int peer, Tag tag) {
    const std::lock_guard lock(backend_.state_->lock());
    Entry& entry = entries_.emplace_back();
    entry.peer = peer;
    entry.is_receive = true;
    check(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, world_rank(peer), mpi_tag(tag),
                    backend_.state_->world(), &entry.request));
  }

  // Whether everything has arrived; does not block.
  bool is_done() {
    const std::lock_guard lock(backend_.state_->lock());
    bool is_complete = true;
    for (Entry& entry : entries_) {
      if (entry.request == MPI_REQUEST_NULL) continue;
      int flag = 0;
      check(MPI_Test(&entry.request, &flag, MPI_STATUS_IGNORE));
      is_complete &= flag != 0;
    }
    backend_.state_->poll_abort();
    return is_complete;
  }
  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (const Entry& entry : entries_) {
      const bool is_known = std::find(ranks.begin(), ranks.end(), entry.peer) != ranks.end();
      if (entry.request != MPI_REQUEST_NULL && !is_known) ranks.push_back(entry.peer);
    }
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }
  void wait(const HostOp& op) {
    const double end = now() + backend_.timeout_seconds_;
    for (Pause pause; !is_done(); pause()) {
      if (backend_.state_->reason()) backend_.throw_aborted(op);
      if (now() < end) continue;
      backend_.fail(
          ErrorKind::kTransient,
          fmt::format("[{}] {}: rank {} waited {:g} s for {}", backend_.name_, to_string(op),
                      backend_.rank_, backend_.timeout_seconds_, backend_.describe(missing())));
    }
    entries_.clear();
  }

 private:
  struct Entry {
    MPI_Request request = MPI_REQUEST_NULL;
    int peer = 0;
    bool is_receive = false;
  };
  int world_rank(int peer) const { return backend_.members_[static_cast<std::size_t>(peer)]; }
  int mpi_tag(Tag tag) const { return backend_.state_->tag(backend_.group_, tag); }
  void check(int code) {
    if (code == MPI_SUCCESS) return;
    throw Error(ErrorKind::kTransient, fmt::format("[{}] MPI: {}", backend_.name_, words_of(code)));
  }

  MpiBackend& backend_;
  std::vector<Entry> entries_;
};

MpiBackend::MpiBackend(std::shared_ptr<MpiState> state, int group, std::vector<int> members,
                       int rank, std::string name, double timeout_seconds)
    : state_(std::move(state)),
      group_(group),
      members_(std::move(members)),
      rank_(rank),
      name_(std::move(name)),
      timeout_seconds_(timeout_seconds),
      call_bytes_(sizeof(Call) * members_.size()),
      own_call_bytes_(sizeof(Call)),
      inputs_(members_.size()) {
  calls_ = reinterpret_cast<Call*>(call_bytes_.data());
}

void MpiBackend::fail(ErrorKind kind, const std::string& reason) {
  if (!state_->abort(reason)) {
    throw AbortedError(fmt::format("[{}] ended: {}", name_, state_->reason().value_or("")));
  }
  throw Error(kind, reason);
}

void MpiBackend::throw_aborted(const HostOp& op) {
  // A peer may tell of a disagreement before this rank has heard all calls and found it by itself;
  // it is the same error on every rank of the group.
  const std::string reason = state_->reason().value_or("");
  if (reason.starts_with(fmt::format("[{}] the ranks disagree", name_))) {
    throw Error(ErrorKind::kInternal, reason);
  }
  throw_ended(op);
}

void MpiBackend::throw_ended(const HostOp& op) {
  throw AbortedError(fmt::format("[{}] {} on rank {} was ended: {}", name_, to_string(op), rank_,
                                 state_->reason().value_or("the group was aborted")));
}

std::string MpiBackend::describe(const std::vector<int>& ranks) const {
  std::string text;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += fmt::format("{}rank {}",
                        i == 0                  ? ""
                        : i + 1 == ranks.size() ? " and "
                                                : ", ",
                        ranks[i]);
  }
  return text;
}

void MpiBackend::meet(const HostOp& op) {
  auto* own = reinterpret_cast<Call*>(own_call_bytes_.data());
  own->op = op;
  if (is_inline(op, size())) copy(own->payload, op.in, contributed_bytes(op, rank_, size()));
  std::memcpy(&calls_[rank_], own, sizeof(Call));
  Batch batch(*this);
  for (int i = 1; i < size(); ++i) {
    batch.receive(&calls_[(rank_ + i) % size()], sizeof(Call), (rank_ + i) % size(), Tag::kCall);
  }
  for (int i = 1; i < size(); ++i) {
    batch.send(own, sizeof(Call), (rank_ + i) % size(), Tag::kCall);
  }
  batch.wait(op);
  const std::string reason =
      find_disagreement(name_, size(), [this](int r) -> const HostOp& { return calls_[r].op; });
  if (reason.empty()) return;
  state_->abort(reason);
  throw Error(ErrorKind::kInternal, reason);
}

void MpiBackend::run(const HostOp& op) {
  if (state_->reason()) throw_ended(op);
  // MPI is not instrumented: this is where ThreadSanitizer sees what it touches.
  if (op.in != nullptr) cpu::announce_read(op.in, contributed_bytes(op, rank_, size()));
  if (op.out != nullptr) {
    const bool is_whole = op.kind == HostOpKind::kAllGather || op.kind == HostOpKind::kAllToAll;
    cpu::announce_write(op.out, op.bytes() * static_cast<std::size_t>(is_whole ? size() : 1));
  }
  meet(op);
  if (is_inline(op, size())) return run_inline(op);
  switch (op.kind) {
    case HostOpKind::kAllReduce:
      return all_reduce(op);
    case HostOpKind::kReduceScatter:
      return reduce_scatter(op);
    case HostOpKind::kAllToAll:
      return all_to_all(op);
    case HostOpKind::kBroadcast:
      return broadcast(op);
    default:
      return all_gather(op);
  }
}

void MpiBackend::run_inline(const HostOp& op) {
  const std::size_t bytes = op.bytes();
  const std::size_t own = bytes * static_cast<std::size_t>(rank_);
  switch (op.kind) {
    case HostOpKind::kAllReduce:
    case HostOpKind::kReduceScatter: {
      const std::size_t skip = op.kind == HostOpKind::kReduceScatter ? own : 0;
      for (int r = 0; r < size(); ++r)
        inputs_[static_cast<std::size_t>(r)] = calls_[r].payload + skip;
      reduce_in_rank_order(op.dtype, op.reduce, inputs_, {&op.out, 1}, op.count);
      break;
    }
    case HostOpKind::kBroadcast:
      if (rank_ != op.peer) copy(op.out, calls_[op.peer].payload, bytes);
      break;
    case HostOpKind::kAllToAll:
      for (int r = 0; r < size(); ++r) {
        copy(offset(op.out, bytes * static_cast<std::size_t>(r)), calls_[r].payload + own, bytes);
      }
      break;
    case HostOpKind::kBarrier:
      break;
    default:
      for (int r = 0; r < size(); ++r) {
        copy(offset(op.out, bytes * static_cast<std::size_t>(r)), calls_[r].payload, bytes);
      }
  }
}

void MpiBackend::all_reduce(const HostOp& op) {
  const std::size_t element = size_of(op.dtype);
  const auto chunk = static_cast<std::int64_t>(kChunkBytes / element);
  for (std::int64_t begin = 0; begin < op.count; begin += chunk) {
    const std::int64_t count = std::min(chunk, op.count - begin);
    char* base = offset(op.out, static_cast<std::size_t>(begin) * element);
    const auto start_of = [&](int r) {
      return static_cast<std::size_t>(slice_of(count, element, r, size()).begin) * element;
    };
    const auto bytes_of = [&](int r) {
      return static_cast<std::size_t>(slice_of(count, element, r, size()).count()) * element;
    };
    const std::size_t own = bytes_of(rank_);
    staging_.resize(std::max(staging_.size(), own * static_cast<std::size_t>(size())));
    Batch batch(*this);
    for (int r = 0; r < size(); ++r) {
      unsigned char* there = staging_.data() + own * static_cast<std::size_t>(r);
      inputs_[static_cast<std::size_t>(r)] =
          r == rank_ ? base + start_of(rank_) : static_cast<void*>(there);
      if (r != rank_) batch.receive(there, own, r, Tag::kData);
    }
    for (int i = 1; i < size(); ++i) {
      const int r = (rank_ + i) % size();
      batch.send(base + start_of(r), bytes_of(r), r, Tag::kData);
    }
    batch.wait(op);
    void* result = base + start_of(rank_);
    reduce_in_rank_order(op.dtype, op.reduce, inputs_, {&result, 1},
                         slice_of(count, element, rank_, size()).count());
    for (int i = 1; i < size(); ++i) {
      const int r = (rank_ + i) % size();
      batch.receive(base + start_of(r), bytes_of(r), r, Tag::kData);
      batch.send(result, own, r, Tag::kData);
    }
    batch.wait(op);
  }
}

void MpiBackend::all_gather(const HostOp& op) {
  const std::size_t piece = op.bytes();
  copy(offset(op.out, piece * static_cast<std::size_t>(rank_)), op.in, piece);
  for (std::size_t begin = 0; begin < piece; begin += kChunkBytes) {
    const std::size_t bytes = std::min(kChunkBytes, piece - begin);
    Batch batch(*this);
    for (int i = 1; i < size(); ++i) {
      const int r = (rank_ + i) % size();
      batch.receive(offset(op.out, piece * static_cast<std::size_t>(r) + begin), bytes, r,
                    Tag::kData);
      batch.send(offset(op.in, begin), bytes, r, Tag::kData);
    }
    batch.wait(op);
  }
}

void MpiBackend::reduce_scatter(const HostOp& op) {
  const std::size_t element = size_of(op.dtype);
  const std::size_t piece = op.bytes();
  const auto chunk = static_cast<std::int64_t>(
      std::max<std::size_t>(1, kChunkBytes / element / static_cast<std::size_t>(size())));
  for (std::int64_t begin = 0; begin < op.count; begin += chunk) {
    const std::int64_t count = std::min(chunk, op.count - begin);
    const std::size_t skip = static_cast<std::size_t>(begin) * element;
    const std::size_t bytes = static_cast<std::size_t>(count) * element;
    staging_.resize(std::max(staging_.size(), bytes * static_cast<std::size_t>(size())));
    Batch batch(*this);
    for (int r = 0; r < size(); ++r) {
      unsigned char* there = staging_.data() + bytes * static_cast<std::size_t>(r);
      const char* own = offset(op.in, piece * static_cast<std::size_t>(rank_) + skip);
      inputs_[static_cast<std::size_t>(r)] = r == rank_ ? own : static_cast<const void*>(there);
      if (r != rank_) batch.receive(there, bytes, r, Tag::kData);
    }
    for (int i = 1; i < size(); ++i) {
      const int r = (rank_ + i) % size();
      batch.send(offset(op.in, piece * static_cast<std::size_t>(r) + skip), bytes, r, Tag::kData);
    }
    batch.wait(op);
    void* result = offset(op.out, skip);
    reduce_in_rank_order(op.dtype, op.reduce, inputs_, {&result, 1}, count);
  }
}

void MpiBackend::all_to_all(const HostOp& op) {
  const std::size_t piece = op.bytes();
  const auto at = [&](int r) { return piece * static_cast<std::size_t>(r); };
  copy(offset(op.out, at(rank_)), offset(op.in, at(rank_)), piece);
  for (std::size_t begin = 0; begin < piece; begin += kChunkBytes) {
    const std::size_t bytes = std::min(kChunkBytes, piece - begin);
    Batch batch(*this);
    for (int i = 1; i < size(); ++i) {
      const int r = (rank_ + i) % size();
      batch.receive(offset(op.out, at(r) + begin), bytes, r, Tag::kData);
      batch.send(offset(op.in, at(r) + begin), bytes, r, Tag::kData);
    }
    batch.wait(op);
  }
}

void MpiBackend::broadcast(const HostOp& op) {
  for (std::size_t begin = 0; begin < op.bytes(); begin += kChunkBytes) {
    const std::size_t bytes = std::min(kChunkBytes, op.bytes() - begin);
    Batch batch(*this);
    if (rank_ != op.peer) {
      batch.receive(offset(op.out, begin), bytes, op.peer, Tag::kData);
    } else {
      for (int i = 1; i < size(); ++i) {
        batch.send(offset(op.in, begin), bytes, (rank_ + i) % size(), Tag::kData);
      }
    }
    batch.wait(op);
  }
}

// A message: both sides tell each other what they are about to do (so the sender knows that the
// receive is there), then the data follows.
struct MpiBackend::Transfer {
  Transfer(MpiBackend& backend, const HostOp& op) : op(op), batch(backend) {}
  HostOp op;
  HostOp peer_op;
  Batch batch;
  bool has_started = false;
  bool has_headers = false;
  bool is_complete = false;
  bool is_send() const { return op.kind == HostOpKind::kSend; }
};

bool MpiBackend::progress(std::deque<Transfer>& transfers, std::size_t index) {
  Transfer& transfer = transfers[index];
  if (transfer.is_complete) return false;
  const HostOp& op = transfer.op;
  if (!transfer.has_started) {
    // Messages of one pair keep their order.
    for (std::size_t i = 0; i < index; ++i) {
      const Transfer& other = transfers[i];
      if (!other.is_complete && other.op.kind == op.kind && other.op.peer == op.peer) return false;
    }
    transfer.has_started = true;
    const Tag own = transfer.is_send() ? Tag::kSendHeader : Tag::kRecvHeader;
    const Tag other = transfer.is_send() ? Tag::kRecvHeader : Tag::kSendHeader;
    transfer.batch.receive(&transfer.peer_op, sizeof(HostOp), op.peer, other);
    transfer.batch.send(&transfer.op, sizeof(HostOp), op.peer, own);
    return true;
  }
  if (!transfer.batch.is_done()) return false;
  if (transfer.has_headers) {
    transfer.is_complete = true;
    return true;
  }
  transfer.has_headers = true;
  if (transfer.peer_op.dtype != op.dtype || transfer.peer_op.count != op.count) {
    const std::string reason =
        fmt::format("[{}] the ranks disagree: rank {} calls {}, rank {} calls {}", name_, rank_,
                    to_string(op), op.peer, to_string(transfer.peer_op));
    state_->abort(reason);
    throw Error(ErrorKind::kInternal, reason);
  }
  for (std::size_t begin = 0; begin < op.bytes(); begin += kChunkBytes) {
    const std::size_t bytes = std::min(kChunkBytes, op.bytes() - begin);
    if (transfer.is_send()) {
      transfer.batch.send(offset(op.in, begin), bytes, op.peer, Tag::kData);
    } else {
      transfer.batch.receive(offset(op.out, begin), bytes, op.peer, Tag::kData);
    }
  }
  return true;
}

void MpiBackend::run_group(std::span<const HostOp> ops) {
  if (state_->reason()) throw_ended(ops.front());
  std::deque<Transfer> transfers;
  for (const HostOp& op : ops) {
    if (op.kind == HostOpKind::kSend) cpu::announce_read(op.in, op.bytes());
    if (op.kind == HostOpKind::kRecv) cpu::announce_write(op.out, op.bytes());
    transfers.emplace_back(*this, op);
  }
  const double end = now() + timeout_seconds_;
  Pause pause;
  for (;;) {
    bool has_moved = false;
    bool is_complete = true;
    for (std::size_t i = 0; i < transfers.size(); ++i) {
      has_moved |= progress(transfers, i);
      is_complete &= transfers[i].is_complete;
    }
    if (is_complete) return;
    if (has_moved) {
      pause.reset();
      continue;
    }
    const auto open = std::find_if(transfers.begin(), transfers.end(),
                                   [](const Transfer& transfer) { return !transfer.is_complete; });
    if (state_->reason()) throw_aborted(open->op);
    if (now() > end) {
      fail(ErrorKind::kTransient,
           fmt::format("[{}] {}: rank {} waited {:g} s for rank {}", name_, to_string(open->op),
                       rank_, timeout_seconds_, open->op.peer));
    }
    pause();
  }
}

std::shared_ptr<HostBackend> MpiBackend::split(int color, int key, const std::string& name,
                                               std::uint64_t sequence, int* rank, int* size) {
  struct Choice {
    int color;
    int key;
    int next_group;
  };
  const Choice own{color, key, state_->next_group()};
  std::vector<Choice> all(members_.size());
  HostOp op;
  op.kind = HostOpKind::kSplit;
  op.in = &own;
  op.out = all.data();
  op.count = sizeof(Choice);
  op.sequence = sequence;
  run(op);

  // A number that no two of these ranks have used with each other before.
  int group = 0;
  for (const Choice& choice : all) group = std::max(group, choice.next_group);
  state_->use_group(group);
  if (color < 0) return nullptr;
  std::vector<int> positions;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].color == color) positions.push_back(static_cast<int>(r));
  }
  std::stable_sort(positions.begin(), positions.end(), [&](int a, int b) {
    return all[static_cast<std::size_t>(a)].key < all[static_cast<std::size_t>(b)].key;
  });
  std::vector<int> members;
  for (const int position : positions)
    members.push_back(members_[static_cast<std::size_t>(position)]);
  *size = static_cast<int>(members.size());
  *rank =
      static_cast<int>(std::find(positions.begin(), positions.end(), rank_) - positions.begin());
  return std::make_shared<MpiBackend>(state_, group, std::move(members), *rank, name,
                                      timeout_seconds_);
}

}  // namespace tessera::mpi
