#include "engine/train/replica_check.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "checkpoint/crc32c.h"
#include "engine/core/error.h"
#include "engine/device/buffer.h"

namespace tessera {
namespace {

constexpr std::int64_t kChunk = std::int64_t{64} << 20;

// The checksums of all ranks, one rank's behind the other's.
std::vector<std::int64_t> gather(Communicator& group, const std::vector<std::int64_t>& own, ModelRuntime& runtime) {
  const auto count = static_cast<std::int64_t>(own.size());
  Stream& stream = runtime.compute();
  const Buffer memory(runtime.context(), own.size() * sizeof(std::int64_t) * static_cast<std::size_t>(group.size() + 1));
  const Tensor all(memory.data(), DType::kI64, Shape{count * (group.size() + 1)}, memory.device());
  const Tensor mine = all.flat_slice(count * group.size(), count);
  std::vector<std::int64_t> result(own.size() * static_cast<std::size_t>(group.size()));
  stream.copy_bytes(mine.data, own.data(), mine.bytes());
  group.all_gather(mine, all.flat_slice(0, count * group.size()), stream);
  stream.copy_bytes(result.data(), all.data, result.size() * sizeof(std::int64_t));
  stream.synchronize();
  return result;
}

}  // namespace

ReplicaCheck::ReplicaCheck(ModelRuntime& runtime) : runtime_(&runtime) {
  const ParamStore& params = runtime.params();
  for (int b = 0; b < params.num_buckets(); ++b) {
    for (const ParamSpec& spec : params.bucket(b).params) {
      names_.push_back(spec.name);
      tensor_copies_.push_back(spec.placement.kind == Placement::Kind::kReplicated);
    }
  }
  all_.assign(names_.size(), true);
}

std::vector<std::int64_t> ReplicaCheck::checksums() const {
  const ParamStore& params = runtime_->params();
  Stream& stream = runtime_->compute();
  std::vector<char> host;
  const auto add = [&](const Tensor& flat, std::uint32_t before) {
    const auto* data = static_cast<const char*>(flat.data);
    for (std::int64_t at = 0; at < static_cast<std::int64_t>(flat.bytes()); at += kChunk) {
      const auto bytes = static_cast<std::size_t>(std::min<std::int64_t>(kChunk, static_cast<std::int64_t>(flat.bytes()) - at));
      host.resize(bytes);
      stream.copy_bytes(host.data(), data + at, bytes);
      stream.synchronize();
      before = crc32c(host.data(), bytes, before);
    }
    return before;
  };
  std::vector<std::int64_t> result;
  for (int b = 0; b < params.num_buckets(); ++b) {
    const std::size_t first = result.size();
    result.resize(first + params.bucket(b).params.size(), 0);
    if (params.shards_weights()) {
      for (const ShardPiece& piece : params.shard(b).pieces) {
        std::int64_t& sum = result[first + static_cast<std::size_t>(piece.param)];
        sum = add(params.shard(b).weight.flat_slice(piece.shard_begin, piece.length), static_cast<std::uint32_t>(sum));
      }
      continue;
    }
    for (std::size_t i = 0; i < params.bucket(b).params.size(); ++i) {
      result[first + i] = add(params.weight({b, static_cast<int>(i)}), 0);
    }
  }
  return result;
}

std::string ReplicaCheck::compare(Communicator& group, const char* kind, const std::vector<std::int64_t>& own,
                           const std::vector<bool>& is_compared, std::int64_t step) const {
  if (group.size() == 1) return {};
  const std::vector<std::int64_t> all = gather(group, own, *runtime_);
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (!is_compared[i]) continue;
    std::map<std::int64_t, std::vector<int>> ranks_of;
    for (int rank = 0; rank < group.size(); ++rank) {
      ranks_of[all[static_cast<std::size_t>(rank) * own.size() + i]].push_back(rank);
    }
    if (ranks_of.size() == 1) continue;
    // Those that most agree on are taken for right.
    const auto most = std::max_element(ranks_of.begin(), ranks_of.end(), [](const auto& a, const auto& b) {
      return a.second.size() < b.second.size();
    });
    std::vector<int> alone;
    for (const auto& [checksum, ranks] : ranks_of) {
      if (checksum != most->first) alone.insert(alone.end(), ranks.begin(), ranks.end());
    }
    std::sort(alone.begin(), alone.end());
    return fmt::format(
        "[replicas] after step {} the copies of {} differ: of {} {} ranks, {} {} from {}. Memory or a GPU is faulty, or a "
        "sum was left out: look at `tessera doctor` on these ranks' machines; the next start goes on from the last "
        "checkpoint",
        step, names_[i], group.size(), kind, fmt::join(alone, ", "), alone.size() == 1 ? "differs" : "differ",
        fmt::join(most->second, ", "));
  }
  return {};
}

void ReplicaCheck::check(std::int64_t step) const {
  const std::vector<std::int64_t> own = checksums();
  const ProcessMesh& mesh = runtime_->mesh();
  std::string problem;
  if (!runtime_->params().shards_weights()) {
    problem = compare(mesh.data_context(), "data-parallel", own, all_, step);
  } else if (mesh.has_replicas()) {
    problem = compare(mesh.replicas(), "data-parallel", own, all_, step);
  }
  // Both, whatever the first says: others take part.
  const std::string other = compare(mesh.tensor(), "tensor-parallel", own, tensor_copies_, step);
  if (problem.empty()) problem = other;
  if (!problem.empty()) TESSERA_FAIL(ErrorKind::kTransient, "{}", problem);
}

}  // namespace tessera
