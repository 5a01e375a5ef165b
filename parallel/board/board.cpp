#include "parallel/board/board.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

#include "parallel/board/futex.h"

namespace tessera::board {
namespace {

// The state of a meeting in one word, so that "the last rank arrived" and "interrupted" exclude
// each other: [63] interrupted, [48..62] ranks that have arrived, [0..47] meetings held.
constexpr std::uint64_t kInterrupted = std::uint64_t{1} << 63;
constexpr int kArrivedShift = 48;
constexpr std::uint64_t kHeldMask = (std::uint64_t{1} << kArrivedShift) - 1;
constexpr std::uint64_t kOneArrived = std::uint64_t{1} << kArrivedShift;

constexpr std::size_t kReasonBytes = 2048;
constexpr std::size_t kPage = 4096;

int arrived_of(std::uint64_t state) {
  return static_cast<int>((state & ~kInterrupted) >> kArrivedShift);
}

std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Small groups get large chunks; the whole board of a large group stays within some tens of MiB.
std::size_t stage_bytes_for(int size) {
  const std::size_t share = (std::size_t{32} << 20) / (2 * static_cast<std::size_t>(size));
  return std::clamp<std::size_t>(share / kPage * kPage, 64 << 10, 1 << 20);
}
std::size_t mailbox_bytes_for(int size) {
  const std::size_t pairs = static_cast<std::size_t>(size) * static_cast<std::size_t>(size);
  return std::clamp<std::size_t>((std::size_t{16} << 20) / pairs / kPage * kPage, kPage, 256 << 10);
}

}  // namespace

struct alignas(64) Board::Header {
  std::atomic<std::uint64_t> meeting;
  alignas(64) std::atomic<std::uint32_t> met_word;
  alignas(64) std::atomic<std::uint64_t> leaving;
  std::atomic<std::uint32_t> left_word;
  alignas(64) std::atomic<std::uint32_t> reason_state;  // 0 none, 1 being written, 2 readable
  char reason[kReasonBytes];
};

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t seen, double seconds,
              bool is_private) {
  futex_wait(word, seen, std::min(seconds, 3600.0), is_private);
}

Board::Board(void* memory, int size, bool is_private, std::function<void()> release)
    : size_(size), is_private_(is_private), release_(std::move(release)) {
  auto* at = static_cast<unsigned char*>(memory);
  const auto ranks = static_cast<std::size_t>(size);
  header_ = reinterpret_cast<Header*>(at);
  at += round_up(sizeof(Header), kPage);
  slots_ = reinterpret_cast<RankSlot*>(at);
  at += round_up(ranks * sizeof(RankSlot), kPage);
  mailboxes_ = reinterpret_cast<Mailbox*>(at);
  at += round_up(ranks * ranks * sizeof(Mailbox), kPage);
  if (is_private_) return;
  stage_bytes_ = stage_bytes_for(size);
  stages_ = at;
  at += ranks * 2 * stage_bytes_;
  mailbox_capacity_ = mailbox_bytes_for(size);
  mailbox_bytes_ = at;
}

Board::~Board() {
  if (release_) release_();
}

std::shared_ptr<Board> Board::make_for_threads(int size) {
  const auto ranks = static_cast<std::size_t>(size);
  const std::size_t bytes = round_up(sizeof(Header), kPage) +
                            round_up(ranks * sizeof(RankSlot), kPage) +
                            round_up(ranks * ranks * sizeof(Mailbox), kPage);
  void* memory = std::aligned_alloc(kPage, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  // All states of a new board are zero.
  std::memset(memory, 0, bytes);
  return std::shared_ptr<Board>(new Board(memory, size, true, [memory] { std::free(memory); }));
}

std::size_t Board::bytes_for_processes(int size) {
  const auto ranks = static_cast<std::size_t>(size);
  return round_up(sizeof(Header), kPage) + round_up(ranks * sizeof(RankSlot), kPage) +
         round_up(ranks * ranks * sizeof(Mailbox), kPage) + ranks * 2 * stage_bytes_for(size) +
         ranks * ranks * mailbox_bytes_for(size);
}

std::shared_ptr<Board> Board::map_for_processes(void* memory, int size,
                                                std::function<void()> release) {
  return std::shared_ptr<Board>(new Board(memory, size, false, std::move(release)));
}

unsigned char* Board::stage(int rank, int half) const {
  return stages_ +
         (static_cast<std::size_t>(rank) * 2 + static_cast<std::size_t>(half)) * stage_bytes_;
}

unsigned char* Board::mailbox_bytes(int from, int to) const {
  return mailbox_bytes_ + (static_cast<std::size_t>(from) * static_cast<std::size_t>(size_) +
                           static_cast<std::size_t>(to)) *
                              mailbox_capacity_;
}

std::uint64_t Board::arrive(int rank) {
  std::uint64_t state = header_->meeting.load(std::memory_order_acquire);
  std::uint64_t next = 0;
  bool is_last = false;
  do {
    if (state & kInterrupted) return 0;
    is_last = arrived_of(state) + 1 == size_;
    next = is_last ? (state & kHeldMask) + 1 : state + kOneArrived;
  } while (!header_->meeting.compare_exchange_weak(state, next, std::memory_order_acq_rel,
                                                   std::memory_order_acquire));
  const std::uint64_t number = (state & kHeldMask) + 1;
  slots_[rank].meetings.store(number, std::memory_order_relaxed);
  if (is_last) {
    header_->met_word.fetch_add(1, std::memory_order_release);
    if (size_ > 1) futex_wake_all(header_->met_word, is_private_);
  }
  return number;
}

bool Board::is_met(std::uint64_t meeting) const {
  return (header_->meeting.load(std::memory_order_acquire) & kHeldMask) >= meeting;
}

bool Board::is_interrupted() const {
  return (header_->meeting.load(std::memory_order_acquire) & kInterrupted) != 0;
}

void Board::leave_together() {
  std::uint64_t state = header_->leaving.load(std::memory_order_acquire);
  std::uint64_t next = 0;
  bool is_last = false;
  do {
    is_last = arrived_of(state) + 1 == size_;
    next = is_last ? (state & kHeldMask) + 1 : state + kOneArrived;
  } while (!header_->leaving.compare_exchange_weak(state, next, std::memory_order_acq_rel,
                                                   std::memory_order_acquire));
  const std::uint64_t number = (state & kHeldMask) + 1;
  if (is_last) {
    header_->left_word.fetch_add(1, std::memory_order_release);
    if (size_ > 1) futex_wake_all(header_->left_word, is_private_);
    return;
  }
  const auto have_all_left = [&] {
    return (header_->leaving.load(std::memory_order_acquire) & kHeldMask) >= number;
  };
  while (!wait(header_->left_word, 3600, have_all_left)) {
  }
}

std::atomic<std::uint32_t>& Board::met_word() const { return header_->met_word; }

void Board::ring(int rank) {
  slots_[rank].doorbell.fetch_add(1, std::memory_order_release);
  futex_wake_all(slots_[rank].doorbell, is_private_);
}

void Board::interrupt(const std::string&) noexcept {
  header_->meeting.fetch_or(kInterrupted, std::memory_order_acq_rel);
  header_->met_word.fetch_add(1, std::memory_order_release);
  futex_wake_all(header_->met_word, is_private_);
  for (int rank = 0; rank < size_; ++rank) ring(rank);
}

void Board::publish_reason(const std::string& reason) noexcept {
  std::uint32_t none = 0;
  if (!header_->reason_state.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) return;
  const std::size_t bytes = std::min(reason.size(), kReasonBytes - 1);
  std::memcpy(header_->reason, reason.data(), bytes);
  header_->reason[bytes] = '\0';
  header_->reason_state.store(2, std::memory_order_release);
}

std::optional<std::string> Board::read_reason() const {
  if (header_->reason_state.load(std::memory_order_acquire) != 2) return std::nullopt;
  return std::string(header_->reason);
}

}  // namespace tessera::board
