#include "parallel/gpu_window.h"

namespace tessera {

BlobExchange exchange_over(ControlPlane& control, const std::string& name,
                           double timeout_seconds) {
  return [&control, name, timeout_seconds](const std::string& own) {
    std::vector<std::string> all;
    for (int rank = 0; rank < control.world_size(); ++rank) {
      all.push_back(control.broadcast(fmt::format("{} of rank {}", name, rank), own, rank,
                                      timeout_seconds));
    }
    return all;
  };
}

}  // namespace tessera
