#include "parallel/host_communicator.h"

#include <condition_variable>
#include <mutex>
#include <set>
#include <utility>

#include "engine/device/cpu/cpu_stream.h"
#include "parallel/collective_checks.h"
#include "parallel/peer_window.h"

namespace tessera {
namespace {

// Runs the operations of one communicator in the order of issue, though streams may reach them in
// any.
class IssueOrder {
 public:
  std::uint64_t take_ticket() {
    const std::lock_guard lock(mutex_);
    return issued_++;
  }
  void wait_turn(std::uint64_t ticket) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return next_ == ticket; });
  }
  // Tickets finish out of order only when a poisoned stream drops its operations.
  void finish(std::uint64_t ticket) {
    {
      const std::lock_guard lock(mutex_);
      finished_.insert(ticket);
      while (!finished_.empty() && *finished_.begin() == next_) {
        finished_.erase(finished_.begin());
        ++next_;
      }
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t issued_ = 0;
  std::uint64_t next_ = 0;
  std::set<std::uint64_t> finished_;
};

// One enqueued operation or group. If its stream drops it (an earlier closure threw), the peers
// would wait for it in vain, so the destructor ends them.
class Pending {
 public:
  // `label` is the group and rank, shared with the communicator.
  Pending(std::shared_ptr<IssueOrder> order, std::shared_ptr<HostBackend> backend,
          std::shared_ptr<const std::string> label, const HostOp& op, std::vector<HostOp> group)
      : order_(std::move(order)),
        backend_(std::move(backend)),
        label_(std::move(label)),
        op_(op),
        group_(std::move(group)),
        ticket_(order_->take_ticket()) {}
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;
  ~Pending() {
    if (is_done_) return;
    backend_->abort(
        fmt::format("[{}] {} never ran: its stream had failed before", *label_, to_string(op_)));
    order_->finish(ticket_);
  }

  void run() {
    order_->wait_turn(ticket_);
    struct Finish {
      Pending* pending;
      ~Finish() {
        pending->is_done_ = true;
        pending->order_->finish(pending->ticket_);
      }
    } finish{this};
    if (!group_.empty()) {
      backend_->run_group(group_);
    } else if (op_.kind == HostOpKind::kSend || op_.kind == HostOpKind::kRecv) {
      backend_->run_group({&op_, 1});
    } else {
      backend_->run(op_);
    }
  }

 private:
  std::shared_ptr<IssueOrder> order_;
  std::shared_ptr<HostBackend> backend_;
  std::shared_ptr<const std::string> label_;
  HostOp op_;  // the first of a group
  std::vector<HostOp> group_;
  std::uint64_t ticket_;
  bool is_done_ = false;
};

class HostCommunicator final : public Communicator {
 public:
  HostCommunicator(int rank, int size, const std::string& name,
                   std::shared_ptr<HostBackend> backend)
      : Communicator(rank, size, name),
        backend_(std::move(backend)),
        order_(std::make_shared<IssueOrder>()),
        label_(std::make_shared<const std::string>(fmt::format("{}, rank {}", name, rank))) {}

  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    int new_rank = 0;
    int new_size = 0;
    std::shared_ptr<HostBackend> group;
    in_turn([&] { group = backend_->split(color, key, name, ++sequence_, &new_rank, &new_size); });
    if (group == nullptr) return nullptr;
    return make_host_communicator(new_rank, new_size, name, std::move(group));
  }

  void all_reduce(const Tensor& tensor, ReduceOp op, Stream& stream) override {
    check_all_reduce(*this, tensor, stream);
    collective(
        {HostOpKind::kAllReduce, op, tensor.dtype, -1, tensor.data, tensor.data, tensor.numel()},
        stream);
  }
  void all_gather(const Tensor& in, const Tensor& out, Stream& stream) override {
    check_all_gather(*this, in, out, stream);
    collective(
        {HostOpKind::kAllGather, ReduceOp::kSum, in.dtype, -1, in.data, out.data, in.numel()},
        stream);
  }
  void reduce_scatter(const Tensor& in, const Tensor& out, ReduceOp op, Stream& stream) override {
    check_reduce_scatter(*this, in, out, stream);
    collective({HostOpKind::kReduceScatter, op, in.dtype, -1, in.data, out.data, out.numel()},
               stream);
  }
  void all_to_all(const Tensor& in, const Tensor& out, Stream& stream) override {
    check_all_to_all(*this, in, out, stream);
    collective({HostOpKind::kAllToAll, ReduceOp::kSum, in.dtype, -1, in.data, out.data,
                in.numel() / size()},
               stream);
  }
  void broadcast(const Tensor& tensor, int root, Stream& stream) override {
    check_broadcast(*this, tensor, root, stream);
    collective({HostOpKind::kBroadcast, ReduceOp::kSum, tensor.dtype, root, tensor.data,
                tensor.data, tensor.numel()},
               stream);
  }
  void send(const Tensor& tensor, int peer, Stream& stream) override {
    check_peer(*this, "send", tensor, peer, stream);
    point_to_point({HostOpKind::kSend, ReduceOp::kSum, tensor.dtype, peer, tensor.data, nullptr,
                    tensor.numel()},
                   stream);
  }
  void recv(const Tensor& tensor, int peer, Stream& stream) override {
    check_peer(*this, "recv", tensor, peer, stream);
    point_to_point({HostOpKind::kRecv, ReduceOp::kSum, tensor.dtype, peer, nullptr, tensor.data,
                    tensor.numel()},
                   stream);
  }
  void barrier() override {
    in_turn([&] {
      HostOp op;
      op.sequence = ++sequence_;
      backend_->run(op);
    });
  }
  std::unique_ptr<PeerWindow> make_window(const Tensor& memory, int num_flags,
                                          BackendContext&) override {
    CHECK(memory.is_dense() && num_flags >= 0, "[{} make_window] memory {} with {} flags", name(),
          to_string(memory), num_flags);
    std::unique_ptr<PeerWindow> window;
    in_turn([&] {
      window = backend_->make_window(memory.data, memory.bytes(), num_flags, ++sequence_);
    });
    return window;
  }
  std::function<void(const std::string&)> abort_handle() override {
    return [backend = backend_](const std::string& reason) { backend->abort(reason); };
  }

 protected:
  void group_start() override {
    CHECK(!in_group_, "[{}] a group scope is already open", name());
    in_group_ = true;
    group_.clear();
  }
  void group_end(bool is_launched) override {
    in_group_ = false;
    std::vector<HostOp> ops = std::exchange(group_, {});
    if (!is_launched || ops.empty()) return;
    const HostOp first = ops.front();
    enqueue(first, std::move(ops), *group_stream_);
  }

 private:
  void collective(HostOp op, Stream& stream) {
    CHECK(!in_group_, "[{} {}] a group scope holds only sends and receives", name(),
          name_of(op.kind));
    op.sequence = ++sequence_;
    enqueue(op, {}, stream);
  }
  void point_to_point(const HostOp& op, Stream& stream) {
    if (!in_group_) {
      CHECK(op.peer != rank(), "[{} {}] a rank can reach itself only inside a group scope", name(),
            name_of(op.kind));
      enqueue(op, {}, stream);
      return;
    }
    CHECK(group_.empty() || group_stream_ == &stream,
          "[{} {}] the operations of one group scope must share a stream", name(),
          name_of(op.kind));
    group_stream_ = &stream;
    group_.push_back(op);
  }
  void enqueue(const HostOp& first, std::vector<HostOp> group, Stream& stream) {
    CHECK(stream.device().kind == DeviceKind::kCpu, "[{}] a host group cannot run on {}", name(),
          to_string(stream.device()));
    auto pending = std::make_shared<Pending>(order_, backend_, label_, first, std::move(group));
    cpu::as_cpu(stream).enqueue([pending = std::move(pending)] { pending->run(); });
  }
  // Runs `body` in the calling thread once every operation issued before is done.
  template <typename Body>
  void in_turn(Body&& body) {
    CHECK(!in_group_, "[{}] a group scope holds only sends and receives", name());
    const std::uint64_t ticket = order_->take_ticket();
    order_->wait_turn(ticket);
    struct Finish {
      IssueOrder* order;
      std::uint64_t ticket;
      ~Finish() { order->finish(ticket); }
    } finish{order_.get(), ticket};
    body();
  }

  std::shared_ptr<HostBackend> backend_;
  std::shared_ptr<IssueOrder> order_;         // shared with the enqueued operations
  std::shared_ptr<const std::string> label_;  // shared with the enqueued operations
  std::uint64_t sequence_ = 0;                // of the last collective issued
  bool in_group_ = false;
  Stream* group_stream_ = nullptr;
  std::vector<HostOp> group_;
};

}  // namespace

HostBackend::~HostBackend() = default;

std::unique_ptr<PeerWindow> HostBackend::make_window(void*, std::size_t, int, std::uint64_t) {
  return nullptr;
}

const char* name_of(HostOpKind kind) {
  switch (kind) {
    case HostOpKind::kAllReduce:
      return "all_reduce";
    case HostOpKind::kAllGather:
      return "all_gather";
    case HostOpKind::kReduceScatter:
      return "reduce_scatter";
    case HostOpKind::kAllToAll:
      return "all_to_all";
    case HostOpKind::kBroadcast:
      return "broadcast";
    case HostOpKind::kBarrier:
      return "barrier";
    case HostOpKind::kSplit:
      return "split";
    case HostOpKind::kWindow:
      return "make_window";
    case HostOpKind::kSend:
      return "send";
    case HostOpKind::kRecv:
      return "recv";
  }
  return "?";
}

std::string to_string(const HostOp& op) {
  std::string text = name_of(op.kind);
  if (op.sequence != 0) text += fmt::format(" #{}", op.sequence);
  switch (op.kind) {
    case HostOpKind::kAllReduce:
    case HostOpKind::kReduceScatter:
      return text + fmt::format(" ({}, {}, {} bytes)", op.reduce == ReduceOp::kSum ? "sum" : "max",
                                name_of(op.dtype), op.bytes());
    case HostOpKind::kAllGather:
    case HostOpKind::kAllToAll:
      return text + fmt::format(" ({}, {} bytes)", name_of(op.dtype), op.bytes());
    case HostOpKind::kBroadcast:
      return text +
             fmt::format(" (from rank {}, {}, {} bytes)", op.peer, name_of(op.dtype), op.bytes());
    case HostOpKind::kSend:
      return text +
             fmt::format(" (to rank {}, {}, {} bytes)", op.peer, name_of(op.dtype), op.bytes());
    case HostOpKind::kRecv:
      return text +
             fmt::format(" (from rank {}, {}, {} bytes)", op.peer, name_of(op.dtype), op.bytes());
    default:
      return text;
  }
}

std::size_t contributed_bytes(const HostOp& op, int rank, int size) {
  switch (op.kind) {
    case HostOpKind::kReduceScatter:
    case HostOpKind::kAllToAll:
      return op.bytes() * static_cast<std::size_t>(size);
    case HostOpKind::kBroadcast:
      return rank == op.peer ? op.bytes() : 0;
    default:
      return op.bytes();
  }
}

std::string find_disagreement(const std::string& group, int size,
                              const std::function<const HostOp&(int rank)>& call_of) {
  const HostOp& first = call_of(0);
  for (int r = 1; r < size; ++r) {
    const HostOp& other = call_of(r);
    const bool is_same = first.kind == other.kind && first.reduce == other.reduce &&
                         first.dtype == other.dtype && first.count == other.count &&
                         first.sequence == other.sequence &&
                         (first.kind != HostOpKind::kBroadcast || first.peer == other.peer);
    if (is_same) continue;
    return fmt::format("[{}] the ranks disagree: rank 0 calls {}, rank {} calls {}", group,
                       to_string(first), r, to_string(other));
  }
  return {};
}

std::unique_ptr<Communicator> make_host_communicator(int rank, int size, const std::string& name,
                                                     std::shared_ptr<HostBackend> backend) {
  return std::make_unique<HostCommunicator>(rank, size, name, std::move(backend));
}

}  // namespace tessera
