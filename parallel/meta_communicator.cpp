// A group on the meta device: one process plans for any rank of any world, so arguments are checked
// and nothing moves.
#include "parallel/collective_checks.h"

namespace tessera {
namespace {

class MetaCommunicator final : public Communicator {
 public:
  MetaCommunicator(int rank, int size, const std::string& name) : Communicator(rank, size, name) {}

  std::unique_ptr<Communicator> split(int, int, const std::string& name) override {
    TESSERA_FAIL(ErrorKind::kInternal,
                 "[{} split] a meta group does not know the colors of other ranks; make {} with "
                 "subgroup",
                 this->name(), name);
  }
  std::unique_ptr<Communicator> subgroup(const std::vector<int>& members,
                                         const std::string& name) override {
    const int position = check_subgroup(*this, members, name);
    return std::make_unique<MetaCommunicator>(position, static_cast<int>(members.size()), name);
  }
  void all_reduce(const Tensor& tensor, ReduceOp, Stream& stream) override {
    check_all_reduce(*this, tensor, stream);
  }
  void all_gather(const Tensor& in, const Tensor& out, Stream& stream) override {
    check_all_gather(*this, in, out, stream);
  }
  void reduce_scatter(const Tensor& in, const Tensor& out, ReduceOp, Stream& stream) override {
    check_reduce_scatter(*this, in, out, stream);
  }
  void all_to_all(const Tensor& in, const Tensor& out, Stream& stream) override {
    check_all_to_all(*this, in, out, stream);
  }
  void broadcast(const Tensor& tensor, int root, Stream& stream) override {
    check_broadcast(*this, tensor, root, stream);
  }
  void send(const Tensor& tensor, int peer, Stream& stream) override {
    check_peer(*this, "send", tensor, peer, stream);
  }
  void recv(const Tensor& tensor, int peer, Stream& stream) override {
    check_peer(*this, "recv", tensor, peer, stream);
  }
  void barrier() override {}
  std::function<void(const std::string&)> abort_handle() override {
    return [](const std::string&) {};
  }

 protected:
  void group_start() override {}
  void group_end(bool) override {}
};

}  // namespace

std::unique_ptr<Communicator> make_meta_communicator(int rank, int size, const std::string& name) {
  CHECK(size >= 1 && rank >= 0 && rank < size, "[meta] rank {} of {} ranks", rank, size);
  return std::make_unique<MetaCommunicator>(rank, size, name);
}

}  // namespace tessera
