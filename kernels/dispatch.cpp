// The entry point of every op: check, then the backend of the stream's device.
#include "engine/memory/scratch.h"
#include "kernels/ops.h"

namespace tessera {

#define TESSERA_DISPATCH_OP(function, Arguments)                                                 \
  void function(const Arguments& args, Stream& stream) {                                        \
    check(args);                                                                                 \
    switch (stream.device().kind) {                                                              \
      case DeviceKind::kCpu:                                                                     \
        return cpu::function(args, stream);                                                      \
      case DeviceKind::kCuda:                                                                    \
        return cuda::function(args, stream);                                                     \
      case DeviceKind::kMeta:                                                                    \
        (void)stream.scratch().take(workspace(args, stream.context().capabilities()));           \
        return;                                                                                  \
    }                                                                                            \
  }
TESSERA_OPS(TESSERA_DISPATCH_OP)

}  // namespace tessera
