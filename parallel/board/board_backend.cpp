#include "parallel/board/board_backend.h"

#include <algorithm>
#include <cstring>

#include "parallel/reduction.h"

namespace tessera::board {
namespace {

// Between such pauses a waiting rank looks whether its peers still live and whether another process
// has aborted; nothing else depends on it.
constexpr double kLookAroundSeconds = 0.25;

const char* offset(const void* base, std::size_t bytes) {
  return static_cast<const char*>(base) + bytes;
}
char* offset(void* base, std::size_t bytes) { return static_cast<char*>(base) + bytes; }

void copy(void* out, const void* in, std::size_t bytes) {
  if (out != in && bytes != 0) std::memcpy(out, in, bytes);
}

// Whether the operands fit the slots; decided alike on every rank.
bool is_inline(const HostOp& op, int size) {
  const bool holds_all = op.kind == HostOpKind::kReduceScatter || op.kind == HostOpKind::kAllToAll;
  return op.bytes() * static_cast<std::size_t>(holds_all ? size : 1) <= kInlineBytes;
}

}  // namespace

BoardBackend::BoardBackend(std::shared_ptr<Board> board, std::shared_ptr<AbortTree> tree, int rank,
                           std::string name, double timeout_seconds)
    : board_(std::move(board)),
      tree_(std::move(tree)),
      rank_(rank),
      name_(std::move(name)),
      timeout_seconds_(timeout_seconds),
      inputs_(static_cast<std::size_t>(board_->size())),
      outputs_(static_cast<std::size_t>(board_->size())) {}

void BoardBackend::post(const HostOp& op) {
  parity_ ^= 1;
  RankSlot& slot = board_->slot(rank_);
  slot.posted[parity_] = op;
  slot.latest.store(op.sequence * 16 + static_cast<std::uint64_t>(op.kind),
                    std::memory_order_relaxed);
  if (is_inline(op, size())) copy(payload_of(rank_), op.in, contributed_bytes(op, rank_, size()));
}

void BoardBackend::meet(const HostOp& op) {
  const std::uint64_t meeting = board_->arrive(rank_);
  if (meeting == 0) throw_aborted(op);
  const double end = seconds_now() + timeout_seconds_;
  const auto is_over = [&] { return board_->is_met(meeting) || board_->is_interrupted(); };
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int r = 0; r < size(); ++r) {
      if (board_->slot(r).meetings.load(std::memory_order_relaxed) < meeting) ranks.push_back(r);
    }
    return ranks;
  };
  while (!board_->wait(board_->met_word(), std::min(kLookAroundSeconds, end - seconds_now()),
                       is_over)) {
    tree_->poll();
    check_alive(op, missing());
    if (seconds_now() < end) continue;
    const std::string reason =
        fmt::format("[{}] {}: rank {} waited {:g} s for {}", name_, to_string(op), rank_,
                    timeout_seconds_, describe(missing()));
    // The meeting may be complete by now; only the word that both set decides.
    if (board_->is_met(meeting)) break;
    if (tree_->abort(reason) && !board_->is_met(meeting))
      throw Error(ErrorKind::kTransient, reason);
  }
  if (!board_->is_met(meeting)) throw_aborted(op);
}

void BoardBackend::check_posted() {
  const std::string reason =
      find_disagreement(name_, size(), [this](int r) -> const HostOp& { return posted_by(r); });
  if (reason.empty()) return;
  tree_->abort(reason);
  throw Error(ErrorKind::kInternal, reason);
}

void BoardBackend::run(const HostOp& op) {
  // Without a meeting to hold it back, a post could overwrite what a slower peer still reads.
  if (board_->is_interrupted()) throw_aborted(op);
  post(op);
  if (board_->is_shared_address_space() || is_inline(op, size())) {
    meet(op);
    check_posted();
    if (is_inline(op, size())) {
      run_inline(op);
    } else {
      run_shared(op);
    }
  } else {
    run_staged(op);
  }
}

// All operands are in the slots: every rank takes what it wants, and no second meeting is needed
// because a half of the slots is reused only two collectives later.
void BoardBackend::run_inline(const HostOp& op) {
  const std::size_t bytes = op.bytes();
  const auto shown = [&](int r) { return payload_of(r); };
  switch (op.kind) {
    case HostOpKind::kAllReduce:
    case HostOpKind::kReduceScatter: {
      const std::size_t skip =
          op.kind == HostOpKind::kReduceScatter ? bytes * static_cast<std::size_t>(rank_) : 0;
      for (int r = 0; r < size(); ++r) inputs_[static_cast<std::size_t>(r)] = shown(r) + skip;
      reduce_in_rank_order(op.dtype, op.reduce, inputs_, {&op.out, 1}, op.count);
      break;
    }
    case HostOpKind::kBroadcast:
      if (rank_ != op.peer) copy(op.out, shown(op.peer), bytes);
      break;
    case HostOpKind::kAllToAll:
      for (int r = 0; r < size(); ++r) {
        copy(offset(op.out, bytes * static_cast<std::size_t>(r)),
             shown(r) + bytes * static_cast<std::size_t>(rank_), bytes);
      }
      break;
    case HostOpKind::kBarrier:
      break;
    default:  // all_gather and the exchanges
      for (int r = 0; r < size(); ++r) {
        copy(offset(op.out, bytes * static_cast<std::size_t>(r)), shown(r), bytes);
      }
  }
}

// Threads: the operands themselves are read and written. Every rank stays until all are done,
// whatever happens meanwhile, since its tensors are in use by the others.
void BoardBackend::run_shared(const HostOp& op) {
  const std::size_t bytes = op.bytes();
  const std::size_t own = bytes * static_cast<std::size_t>(rank_);
  switch (op.kind) {
    case HostOpKind::kAllReduce: {
      const ElementRange slice = slice_of(op.count, size_of(op.dtype), rank_, size());
      const std::size_t skip = static_cast<std::size_t>(slice.begin) * size_of(op.dtype);
      for (int r = 0; r < size(); ++r) {
        inputs_[static_cast<std::size_t>(r)] = offset(posted_by(r).in, skip);
        outputs_[static_cast<std::size_t>(r)] = offset(posted_by(r).out, skip);
      }
      reduce_in_rank_order(op.dtype, op.reduce, inputs_, outputs_, slice.count());
      break;
    }
    case HostOpKind::kReduceScatter:
      for (int r = 0; r < size(); ++r) {
        inputs_[static_cast<std::size_t>(r)] = offset(posted_by(r).in, own);
      }
      reduce_in_rank_order(op.dtype, op.reduce, inputs_, {&op.out, 1}, op.count);
      break;
    case HostOpKind::kBroadcast:
      if (rank_ != op.peer) copy(op.out, posted_by(op.peer).in, bytes);
      break;
    case HostOpKind::kAllToAll:
      for (int i = 0; i < size(); ++i) {
        // Starting at the own rank spreads the readers over the sources.
        const int r = (rank_ + i) % size();
        copy(offset(op.out, bytes * static_cast<std::size_t>(r)), offset(posted_by(r).in, own),
             bytes);
      }
      break;
    default:
      for (int i = 0; i < size(); ++i) {
        const int r = (rank_ + i) % size();
        copy(offset(op.out, bytes * static_cast<std::size_t>(r)), posted_by(r).in, bytes);
      }
  }
  board_->leave_together();
}

// Processes: chunk by chunk through the staging areas. A half is written again only after the
// meeting of the next chunk, when every rank is done reading it.
void BoardBackend::run_staged(const HostOp& op) {
  const std::size_t element = size_of(op.dtype);
  const bool holds_all = op.kind == HostOpKind::kReduceScatter || op.kind == HostOpKind::kAllToAll;
  const auto pieces = static_cast<std::size_t>(holds_all ? size() : 1);
  const auto chunk_count =
      static_cast<std::int64_t>(board_->stage_bytes() / pieces / 64 * 64 / element);
  bool is_checked = false;
  for (std::int64_t begin = 0; begin < op.count; begin += chunk_count) {
    const std::int64_t count = std::min(chunk_count, op.count - begin);
    const std::size_t skip = static_cast<std::size_t>(begin) * element;
    const std::size_t bytes = static_cast<std::size_t>(count) * element;
    const int half = half_;
    half_ ^= 1;
    const auto stage = [&](int r) { return board_->stage(r, half); };
    if (op.kind != HostOpKind::kBroadcast || rank_ == op.peer) {
      for (std::size_t p = 0; p < pieces; ++p) {
        copy(stage(rank_) + p * bytes, offset(op.in, p * op.bytes() + skip), bytes);
      }
    }
    meet(op);
    if (!is_checked) check_posted();
    is_checked = true;
    const std::size_t own = bytes * static_cast<std::size_t>(rank_);
    switch (op.kind) {
      case HostOpKind::kAllReduce: {
        const ElementRange slice = slice_of(count, element, rank_, size());
        const std::size_t at = static_cast<std::size_t>(slice.begin) * element;
        for (int r = 0; r < size(); ++r) inputs_[static_cast<std::size_t>(r)] = stage(r) + at;
        void* result = stage(rank_) + at;
        reduce_in_rank_order(op.dtype, op.reduce, inputs_, {&result, 1}, slice.count());
        meet(op);
        for (int r = 0; r < size(); ++r) {
          const ElementRange part = slice_of(count, element, r, size());
          const std::size_t from = static_cast<std::size_t>(part.begin) * element;
          copy(offset(op.out, skip + from), stage(r) + from,
               static_cast<std::size_t>(part.count()) * element);
        }
        break;
      }
      case HostOpKind::kReduceScatter: {
        for (int r = 0; r < size(); ++r) inputs_[static_cast<std::size_t>(r)] = stage(r) + own;
        void* result = offset(op.out, skip);
        reduce_in_rank_order(op.dtype, op.reduce, inputs_, {&result, 1}, count);
        break;
      }
      case HostOpKind::kBroadcast:
        if (rank_ != op.peer) copy(offset(op.out, skip), stage(op.peer), bytes);
        break;
      case HostOpKind::kAllToAll:
        for (int r = 0; r < size(); ++r) {
          copy(offset(op.out, op.bytes() * static_cast<std::size_t>(r) + skip), stage(r) + own,
               bytes);
        }
        break;
      default:
        for (int r = 0; r < size(); ++r) {
          copy(offset(op.out, op.bytes() * static_cast<std::size_t>(r) + skip), stage(r), bytes);
        }
    }
  }
}

struct BoardBackend::Transfer {
  HostOp op;
  std::size_t done = 0;
  bool is_in_box = false;
  bool is_complete = false;
  bool is_send() const { return op.kind == HostOpKind::kSend; }
};

void BoardBackend::run_group(std::span<const HostOp> ops) {
  std::vector<Transfer> transfers;
  transfers.reserve(ops.size());
  for (const HostOp& op : ops) transfers.push_back({op});
  RankSlot& slot = board_->slot(rank_);
  slot.latest.store(static_cast<std::uint64_t>(ops.front().peer) * 16 +
                        static_cast<std::uint64_t>(ops.front().kind),
                    std::memory_order_relaxed);

  const auto is_complete = [&] {
    return std::all_of(transfers.begin(), transfers.end(),
                       [](const Transfer& transfer) { return transfer.is_complete; });
  };
  const auto is_over = [&] {
    if (board_->is_interrupted()) return true;
    while (progress(transfers)) {
    }
    return is_complete();
  };
  const auto first_open = [&]() -> const HostOp& {
    for (const Transfer& transfer : transfers) {
      if (!transfer.is_complete) return transfer.op;
    }
    return ops.front();
  };
  // Whatever ends this call early, no peer may find a message of ours in its mailbox afterwards.
  struct Withdraw {
    BoardBackend* backend;
    std::span<Transfer> transfers;
    ~Withdraw() { backend->withdraw(transfers); }
  } at_exit{this, transfers};
  const double end = seconds_now() + timeout_seconds_;
  while (!board_->wait(slot.doorbell, std::min(kLookAroundSeconds, end - seconds_now()), is_over)) {
    tree_->poll();
    std::vector<int> awaited;
    for (const Transfer& transfer : transfers) {
      const int peer = transfer.op.peer;
      const bool is_known = std::find(awaited.begin(), awaited.end(), peer) != awaited.end();
      if (!transfer.is_complete && peer != rank_ && !is_known) awaited.push_back(peer);
    }
    check_alive(first_open(), awaited);
    if (seconds_now() < end) continue;
    const std::string reason =
        fmt::format("[{}] {}: rank {} waited {:g} s for {}", name_, to_string(first_open()), rank_,
                    timeout_seconds_, describe(awaited));
    if (!tree_->abort(reason)) break;
    withdraw(transfers);
    if (!is_complete()) throw Error(ErrorKind::kTransient, reason);
  }
  if (is_complete()) return;
  withdraw(transfers);
  if (!is_complete()) throw_aborted(first_open());
}

bool BoardBackend::progress(std::span<Transfer> transfers) {
  bool has_moved = false;
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    Transfer& transfer = transfers[i];
    if (transfer.is_complete) continue;
    // Messages of one pair keep their order.
    const bool is_behind = std::any_of(
        transfers.begin(), transfers.begin() + static_cast<long>(i), [&](const Transfer& other) {
          return !other.is_complete && other.op.kind == transfer.op.kind &&
                 other.op.peer == transfer.op.peer;
        });
    if (is_behind) continue;
    has_moved |= transfer.is_send() ? progress_send(transfer) : progress_recv(transfer);
  }
  return has_moved;
}

bool BoardBackend::progress_send(Transfer& transfer) {
  Mailbox& box = board_->mailbox(rank_, transfer.op.peer);
  const std::size_t bytes = transfer.op.bytes();
  if (box.state.load(std::memory_order_acquire) != Mailbox::kEmpty) return false;
  if (transfer.is_in_box) {
    transfer.is_in_box = false;
    transfer.done += box.chunk_bytes;
    transfer.is_complete = transfer.done == bytes;
    return true;
  }
  const bool is_direct = board_->is_shared_address_space();
  const std::size_t left = bytes - transfer.done;
  box.dtype = transfer.op.dtype;
  box.message_bytes = bytes;
  box.chunk_bytes = is_direct ? left : std::min(left, board_->mailbox_capacity());
  box.address = transfer.op.in;
  if (!is_direct) {
    copy(board_->mailbox_bytes(rank_, transfer.op.peer), offset(transfer.op.in, transfer.done),
         box.chunk_bytes);
  }
  transfer.is_in_box = true;
  box.state.store(Mailbox::kFull, std::memory_order_release);
  board_->ring(transfer.op.peer);
  return true;
}

bool BoardBackend::progress_recv(Transfer& transfer) {
  const int peer = transfer.op.peer;
  Mailbox& box = board_->mailbox(peer, rank_);
  // Taking the message first keeps an interrupted sender from freeing it while it is read.
  std::uint32_t full = Mailbox::kFull;
  if (!box.state.compare_exchange_strong(full, Mailbox::kTaken, std::memory_order_acq_rel)) {
    return false;
  }
  if (box.dtype != transfer.op.dtype || box.message_bytes != transfer.op.bytes()) {
    const std::string reason = fmt::format(
        "[{}] the ranks disagree: rank {} sends {}, {} bytes to rank {}, which calls {}", name_,
        peer, tessera::name_of(box.dtype), box.message_bytes, rank_, to_string(transfer.op));
    tree_->abort(reason);
    box.state.store(Mailbox::kFull, std::memory_order_release);
    board_->ring(peer);
    throw Error(ErrorKind::kInternal, reason);
  }
  const bool is_direct = board_->is_shared_address_space();
  const std::size_t bytes = box.chunk_bytes;
  copy(offset(transfer.op.out, transfer.done),
       is_direct ? box.address : board_->mailbox_bytes(peer, rank_), bytes);
  box.state.store(Mailbox::kEmpty, std::memory_order_release);
  board_->ring(peer);
  transfer.done += bytes;
  transfer.is_complete = transfer.done == transfer.op.bytes();
  return true;
}

void BoardBackend::withdraw(std::span<Transfer> transfers) {
  for (Transfer& transfer : transfers) {
    if (!transfer.is_in_box) continue;
    Mailbox& box = board_->mailbox(rank_, transfer.op.peer);
    std::uint32_t full = Mailbox::kFull;
    if (box.state.compare_exchange_strong(full, Mailbox::kEmpty, std::memory_order_acq_rel)) {
      transfer.is_in_box = false;
      continue;
    }
    // Among processes the receiver reads the mailbox and may have died meanwhile: do not wait.
    if (!board_->is_shared_address_space()) continue;
    const auto is_released = [&] {
      return box.state.load(std::memory_order_acquire) != Mailbox::kTaken;
    };
    while (!board_->wait(board_->slot(rank_).doorbell, 3600, is_released)) {
    }
    if (box.state.load(std::memory_order_acquire) == Mailbox::kEmpty) {
      progress_send(transfer);
    } else {
      box.state.store(Mailbox::kEmpty, std::memory_order_release);
      transfer.is_in_box = false;
    }
  }
}

void BoardBackend::throw_aborted(const HostOp& op) {
  tree_->poll();  // the reason may be another process's
  throw AbortedError(fmt::format("[{}] {} on rank {} was ended: {}", name_, to_string(op), rank_,
                                 tree_->reason().value_or("the group was aborted")));
}

void BoardBackend::check_alive(const HostOp& op, const std::vector<int>& awaited) {
  if (!board_->is_alive) return;
  for (const int r : awaited) {
    const std::uint32_t attached = board_->slot(r).attached.load(std::memory_order_acquire);
    if (attached == 0 || (attached == 1 && board_->is_alive(r))) continue;
    // Whoever started the lost process knows the cause better: this is only a consequence.
    tree_->abort(fmt::format("[{}] rank {} {} while rank {} waited for it in {}", name_, r,
                             attached == 1 ? "was lost" : "left the group", rank_, to_string(op)));
    if (board_->is_interrupted()) return;
  }
}

std::string BoardBackend::describe(const std::vector<int>& ranks) const {
  std::string text;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    const std::uint64_t latest = board_->slot(ranks[i]).latest.load(std::memory_order_relaxed);
    const auto kind = static_cast<HostOpKind>(latest % 16);
    if (latest == 0) {
      text += fmt::format("rank {} (which has called nothing yet)", ranks[i]);
    } else if (kind == HostOpKind::kSend || kind == HostOpKind::kRecv) {
      text += fmt::format("rank {} (last seen in {} with rank {})", ranks[i],
                          tessera::name_of(kind), latest / 16);
    } else {
      text += fmt::format("rank {} (last seen in {} #{})", ranks[i], tessera::name_of(kind),
                          latest / 16);
    }
  }
  return text;
}

void BoardBackend::exchange(HostOpKind kind, std::uint64_t sequence, const void* in, void* out,
                            std::size_t bytes) {
  HostOp op;
  op.kind = kind;
  op.in = in;
  op.out = out;
  op.count = static_cast<std::int64_t>(bytes);
  op.sequence = sequence;
  run(op);
}

void BoardBackend::exchange(const HostOp& op, const void* in, void* out, std::size_t bytes) {
  CHECK(bytes <= kInlineBytes, "[{}] {} bytes to exchange, at most {} fit", name_, bytes,
        kInlineBytes);
  if (board_->is_interrupted()) throw_aborted(op);
  parity_ ^= 1;
  RankSlot& slot = board_->slot(rank_);
  slot.posted[parity_] = op;
  slot.latest.store(op.sequence * 16 + static_cast<std::uint64_t>(op.kind),
                    std::memory_order_relaxed);
  copy(payload_of(rank_), in, bytes);
  meet(op);
  check_posted();
  for (int r = 0; r < size(); ++r) {
    copy(offset(out, bytes * static_cast<std::size_t>(r)), payload_of(r), bytes);
  }
}

std::shared_ptr<HostBackend> BoardBackend::split(int color, int key, const std::string& name,
                                                 std::uint64_t sequence, int* rank, int* size) {
  struct Choice {
    int color;
    int key;
  };
  const Choice own{color, key};
  std::vector<Choice> all(static_cast<std::size_t>(this->size()));
  exchange(HostOpKind::kSplit, sequence, &own, all.data(), sizeof own);

  std::vector<int> members;
  for (int r = 0; r < this->size(); ++r) {
    if (color >= 0 && all[static_cast<std::size_t>(r)].color == color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return all[static_cast<std::size_t>(a)].key < all[static_cast<std::size_t>(b)].key;
  });
  const bool is_first = !members.empty() && members.front() == rank_;
  constexpr std::size_t kOfferBytes = 256;
  char offer[kOfferBytes] = {};
  std::shared_ptr<HostBackend> child;
  std::string made;
  try {
    if (is_first) {
      made = offer_board(static_cast<int>(members.size()));
      CHECK(made.size() < kOfferBytes, "[{} split] the name {} is too long", name_, made);
      std::memcpy(offer, made.data(), made.size());
    }
    std::vector<char> offers(kOfferBytes * static_cast<std::size_t>(this->size()));
    exchange(HostOpKind::kSplit, sequence, offer, offers.data(), kOfferBytes);
    if (!members.empty()) {
      *size = static_cast<int>(members.size());
      *rank = static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
      auto opened = open_board(&offers[kOfferBytes * static_cast<std::size_t>(members.front())],
                               *rank, *size);
      tree_->add(opened);
      child = make_child(std::move(opened), *rank, name);
    }
    exchange(HostOpKind::kSplit, sequence, nullptr, nullptr, 0);
  } catch (const std::exception& error) {
    tree_->abort(error.what());
    if (!made.empty()) close_offer(made);
    throw;
  }
  if (!made.empty()) close_offer(made);
  return child;
}

}  // namespace tessera::board
