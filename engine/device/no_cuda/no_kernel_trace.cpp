#include "engine/device/kernel_trace.h"

namespace tessera {

std::unique_ptr<KernelTrace> KernelTrace::start(std::string& problem) {
  problem = "this build has no CUDA backend";
  return nullptr;
}

}  // namespace tessera
