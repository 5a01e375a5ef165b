#include "parallel/communicator.h"

#include "parallel/collective_checks.h"
#include "parallel/peer_window.h"

namespace tessera {

Communicator::~Communicator() = default;

std::unique_ptr<Communicator> Communicator::subgroup(const std::vector<int>& members,
                                                     const std::string& name) {
  const int position = check_subgroup(*this, members, name);
  auto group = split(members.front(), position, name);
  CHECK(group->size() == static_cast<int>(members.size()),
        "[{} subgroup] rank {} named {} members of {}, but {} ranks named the same first one",
        this->name(), rank(), members.size(), name, group->size());
  return group;
}

std::unique_ptr<PeerWindow> Communicator::make_window(const Tensor&, int, BackendContext&) {
  return nullptr;
}

void copy_tensor(const Tensor& in, const Tensor& out, Stream& stream) {
  CHECK(in.dtype == out.dtype && in.numel() == out.numel(), "[copy_tensor] {} does not fit into {}",
        to_string(in), to_string(out));
  CHECK(in.is_dense() && out.is_dense(), "[copy_tensor] {} and {} must be dense", to_string(in),
        to_string(out));
  if (in.data == out.data || in.bytes() == 0) return;
  stream.copy_bytes(out.data, in.data, in.bytes());
}

}  // namespace tessera
