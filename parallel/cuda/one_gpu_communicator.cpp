#include "parallel/one_gpu_communicator.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

#include "engine/device/cuda/cuda_check.h"
#include "engine/device/cuda/cuda_context.h"
#include "parallel/collective_checks.h"
#include "parallel/cuda/reduce_parts.h"
#include "parallel/reduction.h"
#include "parallel/threads/thread_communicator.h"

namespace tessera::cuda {
namespace {

// How often a wait for another thread looks at the abort.
constexpr std::chrono::milliseconds kLookAround(20);

class NativeEvent {
 public:
  explicit NativeEvent(int device) : device_(device) {
    CUDA_CHECK(cudaSetDevice(device));
    CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  }
  ~NativeEvent() {
    cudaSetDevice(device_);
    cudaEventDestroy(event_);
  }
  NativeEvent(const NativeEvent&) = delete;
  NativeEvent& operator=(const NativeEvent&) = delete;

  void record(Stream& stream) const { CUDA_CHECK(cudaEventRecord(event_, native(stream))); }
  // Later work of `stream` runs after the recorded point.
  void hold(Stream& stream) const { CUDA_CHECK(cudaStreamWaitEvent(native(stream), event_, 0)); }

 private:
  int device_;
  cudaEvent_t event_ = nullptr;
};

// The sender's half of a message; the receiver reads the tensor behind it.
struct Message {
  explicit Message(int device) : ready(device), copied(device) {}
  const void* data = nullptr;
  DType dtype = DType::kU8;
  std::size_t bytes = 0;
  NativeEvent ready;
  NativeEvent copied;  // recorded by the receiver

  std::mutex mutex;
  std::condition_variable changed;
  bool is_taken = false;  // `copied` has been recorded
};

using Messages = std::vector<std::shared_ptr<Message>>;

// What one rank shows its peers of every collective. Shared by all ranks: a peer may still enqueue a wait
// for an event of a rank that has left.
struct RankEvents {
  explicit RankEvents(int device) : ready(device), done(device) {}
  NativeEvent ready;  // operands may be read and written by the peers
  NativeEvent done;   // this rank has read and written what it had to
  // Messages whose sender left through an exception: a receiver may be about to look at them.
  std::vector<Messages> abandoned;
};
using GroupEvents = std::vector<std::shared_ptr<RankEvents>>;

class OneGpuBackend final : public threads::ThreadBackend {
 public:
  using ThreadBackend::ThreadBackend;
  using ThreadBackend::exchange;
  using ThreadBackend::name;
  using ThreadBackend::rank;
  using ThreadBackend::size;
  using ThreadBackend::timeout_seconds;

  // Ends every group of the world and throws the reason as this rank's error.
  [[noreturn]] void fail(ErrorKind kind, const std::string& reason) {
    tree()->abort(reason);
    throw Error(kind, reason);
  }
  std::optional<std::string> abort_reason() const { return tree()->reason(); }
  void check_not_aborted(const HostOp& op) const {
    if (const auto reason = tree()->reason()) {
      throw AbortedError(
          fmt::format("[{}] {} on rank {} was ended: {}", name(), to_string(op), rank(), *reason));
    }
  }

 protected:
  std::shared_ptr<HostBackend> make_child(std::shared_ptr<board::Board> board, int rank,
                                          const std::string& name) override {
    return std::make_shared<OneGpuBackend>(std::move(board), tree(), rank, name, timeout_seconds());
  }
};

class OneGpuCommunicator final : public Communicator {
 public:
  OneGpuCommunicator(std::shared_ptr<OneGpuBackend> backend, int device, GroupEvents events)
      : Communicator(backend->rank(), backend->size(), backend->name()),
        backend_(std::move(backend)),
        device_(device),
        events_(std::move(events)),
        last_(std::make_unique<NativeEvent>(device)) {}

  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    int new_rank = 0;
    int new_size = 0;
    const auto group = std::static_pointer_cast<OneGpuBackend>(
        backend_->split(color, key, name, ++sequence_, &new_rank, &new_size));
    if (group == nullptr) return nullptr;
    const auto own = std::make_shared<RankEvents>(device_);
    const std::shared_ptr<RankEvents>* offer = &own;
    std::vector<const std::shared_ptr<RankEvents>*> offers(static_cast<std::size_t>(new_size));
    group->exchange(HostOpKind::kSplit, sequence_, &offer, offers.data(), sizeof offer);
    GroupEvents events;
    for (const auto* one : offers) events.push_back(*one);
    // Until everybody has its copy, the offers must stay.
    group->exchange(HostOpKind::kSplit, sequence_, nullptr, nullptr, 0);
    return std::make_unique<OneGpuCommunicator>(group, device_, std::move(events));
  }

  void all_reduce(const Tensor& tensor, ReduceOp op, Stream& stream) override {
    check_all_reduce(*this, tensor, stream);
    const HostOp call = describe(HostOpKind::kAllReduce, tensor, op, -1, tensor.numel());
    collective(call, tensor.data, tensor.data, stream, [&](const std::vector<Shown>& all) {
      // Every rank reduces its slice and writes it to all.
      const std::size_t element = size_of(tensor.dtype);
      const ElementRange part = slice_of(tensor.numel(), element, rank(), size());
      const std::size_t skip = static_cast<std::size_t>(part.begin) * element;
      std::vector<const void*> inputs;
      std::vector<void*> outputs;
      for (const Shown& one : all) {
        inputs.push_back(static_cast<const char*>(one.in) + skip);
        outputs.push_back(static_cast<char*>(one.out) + skip);
      }
      reduce_parts(tensor.dtype, op, inputs, outputs, part.count(), stream);
    });
  }
  void all_gather(const Tensor& in, const Tensor& out, Stream& stream) override {
    check_all_gather(*this, in, out, stream);
    const HostOp call = describe(HostOpKind::kAllGather, in, ReduceOp::kSum, -1, in.numel());
    collective(call, in.data, out.data, stream, [&](const std::vector<Shown>& all) {
      for (std::size_t r = 0; r < all.size(); ++r) {
        copy(static_cast<char*>(out.data) + r * in.bytes(), all[r].in, in.bytes(), stream);
      }
    });
  }
  void reduce_scatter(const Tensor& in, const Tensor& out, ReduceOp op, Stream& stream) override {
    check_reduce_scatter(*this, in, out, stream);
    const HostOp call = describe(HostOpKind::kReduceScatter, in, op, -1, out.numel());
    collective(call, in.data, out.data, stream, [&](const std::vector<Shown>& all) {
      std::vector<const void*> inputs;
      for (const Shown& one : all) inputs.push_back(piece(one.in, out.bytes(), rank()));
      reduce_parts(out.dtype, op, inputs, std::vector<void*>{out.data}, out.numel(), stream);
    });
  }
  void all_to_all(const Tensor& in, const Tensor& out, Stream& stream) override {
    check_all_to_all(*this, in, out, stream);
    const std::int64_t count = in.numel() / size();
    const HostOp call = describe(HostOpKind::kAllToAll, in, ReduceOp::kSum, -1, count);
    const std::size_t bytes = call.bytes();
    collective(call, in.data, out.data, stream, [&](const std::vector<Shown>& all) {
      for (std::size_t r = 0; r < all.size(); ++r) {
        copy(static_cast<char*>(out.data) + r * bytes, piece(all[r].in, bytes, rank()), bytes, stream);
      }
    });
  }
  void broadcast(const Tensor& tensor, int root, Stream& stream) override {
    check_broadcast(*this, tensor, root, stream);
    const HostOp call = describe(HostOpKind::kBroadcast, tensor, ReduceOp::kSum, root, tensor.numel());
    collective(call, tensor.data, tensor.data, stream, [&](const std::vector<Shown>& all) {
      if (rank() != root) copy(tensor.data, all[static_cast<std::size_t>(root)].in, tensor.bytes(), stream);
    });
  }
  void send(const Tensor& tensor, int peer, Stream& stream) override {
    check_peer(*this, "send", tensor, peer, stream);
    add_message(HostOpKind::kSend, tensor, peer, stream);
  }
  void recv(const Tensor& tensor, int peer, Stream& stream) override {
    check_peer(*this, "recv", tensor, peer, stream);
    add_message(HostOpKind::kRecv, tensor, peer, stream);
  }
  void barrier() override { backend_->exchange(HostOpKind::kBarrier, ++sequence_, nullptr, nullptr, 0); }

  std::function<void(const std::string&)> abort_handle() override {
    return [backend = backend_](const std::string& reason) { backend->abort(reason); };
  }

 protected:
  void group_start() override {
    CHECK(!in_group_, "[{}] a group scope is already open", name());
    in_group_ = true;
  }
  void group_end(bool is_launched) override {
    in_group_ = false;
    const auto messages = std::exchange(messages_, {});
    if (is_launched && !messages.empty()) run_messages(messages, *stream_);
  }

 private:
  // What the ranks of a collective learn of each other.
  struct Shown {
    const void* in = nullptr;
    void* out = nullptr;
  };
  static_assert(sizeof(Shown) <= board::kInlineBytes);

  struct OwnMessage {
    HostOp call;
    void* data;
  };

  static HostOp describe(HostOpKind kind, const Tensor& tensor, ReduceOp reduce, int peer, std::int64_t count) {
    HostOp op;
    op.kind = kind;
    op.reduce = reduce;
    op.dtype = tensor.dtype;
    op.peer = peer;
    op.count = count;
    return op;
  }
  static const void* piece(const void* all, std::size_t bytes, int index) {
    return static_cast<const char*>(all) + bytes * static_cast<std::size_t>(index);
  }
  static void copy(void* out, const void* in, std::size_t bytes, Stream& stream) {
    if (out != in) stream.copy_bytes(out, in, bytes);
  }

  // Meets the peers, enqueues `work` behind everything that any rank did to its operands before, and holds
  // the stream until every rank is through, so that the operands may be changed again.
  template <typename Work>
  void collective(HostOp call, const void* in, void* out, Stream& stream, Work&& work) {
    CHECK(!in_group_, "[{} {}] a collective inside a group scope; only sends and receives belong there", name(),
          name_of(call.kind));
    call.sequence = ++sequence_;
    backend_->check_not_aborted(call);
    const RankEvents& own = *events_[static_cast<std::size_t>(rank())];
    last_->hold(stream);
    own.ready.record(stream);
    const Shown shown{in, out};
    std::vector<Shown> all(static_cast<std::size_t>(size()));
    backend_->exchange(call, &shown, all.data(), sizeof shown);
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) events_[static_cast<std::size_t>(r)]->ready.hold(stream);
    }
    if (call.count > 0) work(all);
    own.done.record(stream);
    backend_->exchange(call, nullptr, nullptr, 0);
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) events_[static_cast<std::size_t>(r)]->done.hold(stream);
    }
    last_->record(stream);
  }

  void add_message(HostOpKind kind, const Tensor& tensor, int peer, Stream& stream) {
    const OwnMessage message{describe(kind, tensor, ReduceOp::kSum, peer, tensor.numel()), tensor.data};
    if (!in_group_) {
      CHECK(peer != rank(), "[{} {}] a rank can send to itself only inside a group scope", name(), name_of(kind));
      run_messages({message}, stream);
      return;
    }
    CHECK(messages_.empty() || stream_ == &stream,
          "[{} {}] the operations of one group scope must share a stream", name(), name_of(kind));
    stream_ = &stream;
    messages_.push_back(message);
  }

  // The senders' descriptions travel through the host's mailboxes; the receivers copy and answer through
  // the description.
  void run_messages(const std::vector<OwnMessage>& messages, Stream& stream) {
    backend_->check_not_aborted(messages.front().call);
    last_->hold(stream);
    Messages sent;
    sent.reserve(messages.size());  // pointers to its elements travel
    try {
      exchange_messages(messages, sent, stream);
    } catch (...) {
      events_[static_cast<std::size_t>(rank())]->abandoned.push_back(std::move(sent));
      throw;
    }
    last_->record(stream);
  }

  void exchange_messages(const std::vector<OwnMessage>& messages, Messages& sent, Stream& stream) {
    std::vector<std::shared_ptr<Message>*> addresses(messages.size(), nullptr);
    std::vector<HostOp> calls;
    for (std::size_t i = 0; i < messages.size(); ++i) {
      const HostOp& own = messages[i].call;
      HostOp call;
      call.kind = own.kind;
      call.peer = own.peer;
      call.count = sizeof(void*);
      call.in = &addresses[i];
      call.out = &addresses[i];
      if (own.kind == HostOpKind::kSend) {
        auto message = std::make_shared<Message>(device_);
        message->data = messages[i].data;
        message->dtype = own.dtype;
        message->bytes = own.bytes();
        message->ready.record(stream);
        sent.push_back(std::move(message));
        addresses[i] = &sent.back();
      }
      calls.push_back(call);
    }
    backend_->run_group(calls);
    for (std::size_t i = 0; i < messages.size(); ++i) {
      if (messages[i].call.kind == HostOpKind::kRecv) take(messages[i], *addresses[i], stream);
    }
    for (std::size_t i = 0; i < messages.size(); ++i) {
      if (messages[i].call.kind != HostOpKind::kSend) continue;
      Message& message = **addresses[i];
      wait_taken(message, messages[i].call);
      message.copied.hold(stream);
    }
  }

  // Enqueues the copy and lets the sender go on.
  void take(const OwnMessage& own, std::shared_ptr<Message> message, Stream& stream) {
    if (message->dtype != own.call.dtype || message->bytes != own.call.bytes()) {
      backend_->fail(ErrorKind::kInternal,
                     fmt::format("[{}] the ranks disagree: rank {} sends {}, {} bytes to rank {}, which calls {}",
                                 name(), own.call.peer, tessera::name_of(message->dtype), message->bytes, rank(),
                                 to_string(own.call)));
    }
    message->ready.hold(stream);
    stream.copy_bytes(own.data, message->data, message->bytes);
    message->copied.record(stream);
    {
      const std::lock_guard lock(message->mutex);
      message->is_taken = true;
    }
    message->changed.notify_all();
  }

  void wait_taken(Message& message, const HostOp& call) {
    std::unique_lock lock(message.mutex);
    while (!message.changed.wait_for(lock, kLookAround, [&] { return message.is_taken; })) {
      backend_->check_not_aborted(call);
    }
  }

  std::shared_ptr<OneGpuBackend> backend_;
  int device_;
  GroupEvents events_;
  std::unique_ptr<NativeEvent> last_;  // end of the last operation: the next may be on another stream
  std::uint64_t sequence_ = 0;
  bool in_group_ = false;
  Stream* stream_ = nullptr;  // of the open group
  std::vector<OwnMessage> messages_;
};

}  // namespace
}  // namespace tessera::cuda

namespace tessera {

std::vector<std::unique_ptr<Communicator>> make_one_gpu_communicators(int size, int device,
                                                                      double timeout_seconds) {
  CHECK_USER(size >= 1 && size <= cuda::kMaxReducedParts, "[one-gpu] a group of {} ranks, expected 1 to {}", size,
             cuda::kMaxReducedParts);
  const int count = cuda_device_count();
  CHECK_USER(device >= 0 && device < count, "[one-gpu] GPU {} was asked for but {} can be used here", device, count);
  const auto board = board::Board::make_for_threads(size);
  const auto tree = std::make_shared<board::AbortTree>();
  tree->add(board);
  cuda::GroupEvents events;
  for (int rank = 0; rank < size; ++rank) events.push_back(std::make_shared<cuda::RankEvents>(device));
  std::vector<std::unique_ptr<Communicator>> result;
  for (int rank = 0; rank < size; ++rank) {
    result.push_back(std::make_unique<cuda::OneGpuCommunicator>(
        std::make_shared<cuda::OneGpuBackend>(board, tree, rank, "world", timeout_seconds), device, events));
  }
  return result;
}

}  // namespace tessera
