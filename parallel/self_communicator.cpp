// The group of one: collectives check their arguments and copy where in and out differ.
#include <deque>
#include <mutex>
#include <utility>

#include "parallel/collective_checks.h"
#include "parallel/peer_window.h"
#include "parallel/threads/thread_window.h"

namespace tessera {
namespace {

// The first reason of an abort, shared by a group, those split from it and their abort handles.
class AbortState {
 public:
  void abort(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (reason_.empty()) reason_ = reason.empty() ? "no reason was given" : reason;
  }
  void check(const std::string& name) {
    const std::lock_guard lock(mutex_);
    if (!reason_.empty()) throw AbortedError(fmt::format("[{}] ended: {}", name, reason_));
  }

 private:
  std::mutex mutex_;
  std::string reason_;  // empty: not aborted
};

class SelfCommunicator final : public Communicator {
 public:
  SelfCommunicator(const std::string& name, std::shared_ptr<AbortState> state)
      : Communicator(0, 1, name), state_(std::move(state)) {}

  std::unique_ptr<Communicator> split(int color, int, const std::string& name) override {
    check_not_aborted();
    if (color < 0) return nullptr;
    return std::make_unique<SelfCommunicator>(name, state_);
  }
  void all_reduce(const Tensor& tensor, ReduceOp, Stream& stream) override {
    check_all_reduce(*this, tensor, stream);
    check_not_aborted();
  }
  void all_gather(const Tensor& in, const Tensor& out, Stream& stream) override {
    check_all_gather(*this, in, out, stream);
    check_not_aborted();
    copy_tensor(in, out, stream);
  }
  void reduce_scatter(const Tensor& in, const Tensor& out, ReduceOp, Stream& stream) override {
    check_reduce_scatter(*this, in, out, stream);
    check_not_aborted();
    copy_tensor(in, out, stream);
  }
  void all_to_all(const Tensor& in, const Tensor& out, Stream& stream) override {
    check_all_to_all(*this, in, out, stream);
    check_not_aborted();
    copy_tensor(in, out, stream);
  }
  void broadcast(const Tensor& tensor, int root, Stream& stream) override {
    check_broadcast(*this, tensor, root, stream);
    check_not_aborted();
  }
  void send(const Tensor& tensor, int peer, Stream& stream) override {
    check_peer(*this, "send", tensor, peer, stream);
    add(sends_, tensor, stream, "send");
  }
  void recv(const Tensor& tensor, int peer, Stream& stream) override {
    check_peer(*this, "recv", tensor, peer, stream);
    add(recvs_, tensor, stream, "recv");
  }
  void barrier() override { check_not_aborted(); }

  std::unique_ptr<PeerWindow> make_window(const Tensor& memory, int num_flags,
                                          BackendContext&) override {
    check_not_aborted();
    if (memory.device.kind != DeviceKind::kCpu) return nullptr;
    return threads::make_self_window(memory.data, memory.bytes(), num_flags);
  }
  std::function<void(const std::string&)> abort_handle() override {
    return [state = state_](const std::string& reason) { state->abort(reason); };
  }

 protected:
  void group_start() override {
    CHECK(!in_group_, "[{}] a group scope is already open", name());
    in_group_ = true;
  }
  void group_end(bool is_launched) override {
    in_group_ = false;
    const auto sends = std::exchange(sends_, {});
    const auto recvs = std::exchange(recvs_, {});
    if (!is_launched) return;
    check_not_aborted();
    CHECK(sends.size() == recvs.size(), "[{} group] {} sends to itself but {} receives", name(),
          sends.size(), recvs.size());
    for (std::size_t i = 0; i < sends.size(); ++i) copy_tensor(sends[i], recvs[i], *stream_);
  }

 private:
  void add(std::deque<Tensor>& list, const Tensor& tensor, Stream& stream, const char* who) {
    CHECK(in_group_, "[{} {}] a rank can send to itself only inside a group scope", name(), who);
    CHECK((sends_.empty() && recvs_.empty()) || stream_ == &stream,
          "[{} {}] the operations of one group scope must share a stream", name(), who);
    stream_ = &stream;
    list.push_back(tensor);
  }
  void check_not_aborted() { state_->check(name()); }

  std::shared_ptr<AbortState> state_;
  bool in_group_ = false;
  Stream* stream_ = nullptr;  // of the open group
  std::deque<Tensor> sends_;
  std::deque<Tensor> recvs_;
};

}  // namespace

std::unique_ptr<Communicator> make_self_communicator(const std::string& name) {
  return std::make_unique<SelfCommunicator>(name, std::make_shared<AbortState>());
}

}  // namespace tessera
