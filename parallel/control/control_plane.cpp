#include "parallel/control/control_plane.h"

#include <map>
#include <mutex>

#include "parallel/communicator.h"

namespace tessera {

// How often each name was used: rounds of one name must not meet each other's keys.
struct ControlPlane::Rounds {
  std::mutex mutex;
  std::map<std::string, std::int64_t> used;
};

ControlPlane::ControlPlane(int rank, int world_size)
    : rank_(rank), world_size_(world_size), rounds_(std::make_unique<Rounds>()) {}

ControlPlane::~ControlPlane() = default;

std::string ControlPlane::next_round(const std::string& name) {
  const std::lock_guard lock(rounds_->mutex);
  return fmt::format("{}#{}", name, ++rounds_->used[name]);
}

void ControlPlane::barrier(const std::string& name, double timeout_seconds) {
  const std::string key = "barrier/" + next_round(name);
  const auto key_of = [&](int rank) { return fmt::format("{}/{}", key, rank); };
  set(key_of(rank_), "");
  // Rank 0 gathers and opens the gate: 2 messages per rank instead of world_size.
  try {
    if (rank_ != 0) {
      get(key + "/open", timeout_seconds);
      return;
    }
    for (int r = 0; r < world_size_; ++r) get(key_of(r), timeout_seconds);
    set(key + "/open", "");
    return;
  } catch (const AbortedError&) {
    throw;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTransient) throw;
  }
  std::string missing;
  for (int r = 0; r < world_size_; ++r) {
    if (!peek(key_of(r))) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", r);
  }
  TESSERA_FAIL(ErrorKind::kTransient, "[control] barrier {}: rank {} waited {:g} s for rank {}",
               name, rank_, timeout_seconds, missing.empty() ? "0" : missing);
}

std::string ControlPlane::broadcast(const std::string& name, const std::string& blob, int root,
                                    double timeout_seconds) {
  const std::string key = "broadcast/" + next_round(name);
  if (rank_ == root) {
    set(key, blob);
    return blob;
  }
  return get(key, timeout_seconds);
}

}  // namespace tessera
