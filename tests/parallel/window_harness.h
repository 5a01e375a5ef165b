// What every window must do, on the CPU and on GPUs, for ranks that are threads or processes. A case
// runs on every rank and throws when something is wrong.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "engine/core/tensor.h"
#include "engine/device/context.h"
#include "parallel/peer_window.h"

namespace tessera::test {

struct WindowEnv {
  int rank = 0;
  int size = 1;
  BackendContext& context;
  // Collective.
  std::function<std::unique_ptr<PeerWindow>(const Tensor& memory, int num_flags)> make;
  std::function<void()> barrier;
};

// "gathers": a gather by copies alone, over several rounds in the same memory. "poisoned": poison
// ends a wait, and what comes later, with its reason. "late": a flag that nobody raises is named
// after the window's time limit, which is short, but not the barrier's. False: there is no such
// case.
bool run_window_case(const std::string& name, WindowEnv& env);

// Time limit of the case "late", in seconds.
inline constexpr double kShortWindowSeconds = 0.4;

}  // namespace tessera::test
