#include "parallel/collective_checks.h"

#include <algorithm>
#include <set>

namespace tessera {
namespace {

void check_operand(const Communicator& group, const char* who, const Tensor& tensor,
                   const Stream& stream) {
  CHECK(tensor.is_dense(), "[{} {}] tensor {} has gaps between its rows, expected a dense one",
        group.name(), who, to_string(tensor));
  CHECK(tensor.device == stream.device(), "[{} {}] tensor {} is not on the stream's device {}",
        group.name(), who, to_string(tensor), to_string(stream.device()));
}

void check_reducible(const Communicator& group, const char* who, DType dtype) {
  const bool is_reducible = dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kBF16 ||
                            dtype == DType::kI64 || dtype == DType::kI32;
  CHECK(is_reducible, "[{} {}] cannot reduce {}, expected fp64, fp32, bf16, int64 or int32",
        group.name(), who, name_of(dtype));
}

// `whole` holds one piece for every rank of the group.
void check_pieces(const Communicator& group, const char* who, const Tensor& piece,
                  const Tensor& whole) {
  CHECK(piece.dtype == whole.dtype && piece.numel() * group.size() == whole.numel(),
        "[{} {}] {} and {} do not fit: the larger must hold {} pieces of the smaller", group.name(),
        who, to_string(piece), to_string(whole), group.size());
}

bool overlaps(const Tensor& a, const Tensor& b) {
  const auto* x = static_cast<const char*>(a.data);
  const auto* y = static_cast<const char*>(b.data);
  return x < y + b.bytes() && y < x + a.bytes() && a.bytes() != 0 && b.bytes() != 0;
}

// In place means exactly this rank's piece; any other overlap would be overwritten while it is
// read.
void check_overlap(const Communicator& group, const char* who, const Tensor& piece,
                   const Tensor& whole) {
  if (piece.data == nullptr || !overlaps(piece, whole)) return;
  const auto* own =
      static_cast<const char*>(whole.data) + piece.bytes() * static_cast<std::size_t>(group.rank());
  CHECK(piece.data == own, "[{} {}] the operands overlap, but not as piece {} of the larger one",
        group.name(), who, group.rank());
}

}  // namespace

void check_all_reduce(const Communicator& group, const Tensor& tensor, const Stream& stream) {
  check_operand(group, "all_reduce", tensor, stream);
  check_reducible(group, "all_reduce", tensor.dtype);
}

void check_all_gather(const Communicator& group, const Tensor& in, const Tensor& out,
                      const Stream& stream) {
  check_operand(group, "all_gather", in, stream);
  check_operand(group, "all_gather", out, stream);
  check_pieces(group, "all_gather", in, out);
  check_overlap(group, "all_gather", in, out);
}

void check_reduce_scatter(const Communicator& group, const Tensor& in, const Tensor& out,
                          const Stream& stream) {
  check_operand(group, "reduce_scatter", in, stream);
  check_operand(group, "reduce_scatter", out, stream);
  check_reducible(group, "reduce_scatter", in.dtype);
  check_pieces(group, "reduce_scatter", out, in);
  check_overlap(group, "reduce_scatter", out, in);
}

void check_all_to_all(const Communicator& group, const Tensor& in, const Tensor& out,
                      const Stream& stream) {
  check_operand(group, "all_to_all", in, stream);
  check_operand(group, "all_to_all", out, stream);
  CHECK(in.dtype == out.dtype && in.numel() == out.numel() && in.numel() % group.size() == 0,
        "[{} all_to_all] {} and {} must be equal and divide into {} pieces", group.name(),
        to_string(in), to_string(out), group.size());
  CHECK(in.data == nullptr || !overlaps(in, out), "[{} all_to_all] in and out overlap",
        group.name());
}

void check_broadcast(const Communicator& group, const Tensor& tensor, int root,
                     const Stream& stream) {
  check_operand(group, "broadcast", tensor, stream);
  CHECK(root >= 0 && root < group.size(), "[{} broadcast] root is {}, expected 0 to {}",
        group.name(), root, group.size() - 1);
}

void check_peer(const Communicator& group, const char* who, const Tensor& tensor, int peer,
                const Stream& stream) {
  check_operand(group, who, tensor, stream);
  CHECK(peer >= 0 && peer < group.size(), "[{} {}] peer is {}, expected 0 to {}", group.name(), who,
        peer, group.size() - 1);
}

int check_subgroup(const Communicator& group, const std::vector<int>& members,
                   const std::string& name) {
  int position = -1;
  std::set<int> seen;
  for (std::size_t i = 0; i < members.size(); ++i) {
    CHECK(members[i] >= 0 && members[i] < group.size() && seen.insert(members[i]).second,
          "[{} subgroup] {} names rank {}, which is doubled or not one of the {} ranks",
          group.name(), name, members[i], group.size());
    if (members[i] == group.rank()) position = static_cast<int>(i);
  }
  CHECK(position >= 0, "[{} subgroup] rank {} is not among the members that it names for {}",
        group.name(), group.rank(), name);
  return position;
}

}  // namespace tessera
