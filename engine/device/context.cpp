#include "engine/device/context.h"

#include "engine/core/error.h"
#include "engine/device/stream.h"

namespace tessera {

std::unique_ptr<BackendContext> make_context(Device device, const ContextOptions& options) {
  switch (device.kind) {
    case DeviceKind::kCpu:
      return cpu::make_context(options);
    case DeviceKind::kCuda:
      return cuda::make_context(device.index, options);
    case DeviceKind::kMeta:
      return meta::make_context(options);
  }
  TESSERA_FAIL(ErrorKind::kInternal, "[context] unknown device kind");
}

int cuda_device_count() { return cuda::device_count(); }

ScratchStack& Stream::scratch() const {
  CHECK(scratch_ != nullptr, "[stream] {} has no scratch memory attached", name_);
  return *scratch_;
}

}  // namespace tessera
