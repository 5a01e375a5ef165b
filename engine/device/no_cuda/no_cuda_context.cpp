// Linked instead of engine/device/cuda in a build without the CUDA toolkit.
#include "engine/core/error.h"
#include "engine/device/context.h"
#include "engine/device/stream.h"

namespace tessera::cuda {

std::unique_ptr<BackendContext> make_context(int, const ContextOptions&) {
  TESSERA_FAIL(ErrorKind::kUser,
               "[device] cuda was asked for but this build has no CUDA backend; "
               "build with -DTESSERA_CUDA=ON or use run.device: cpu");
}

int device_count() { return 0; }

}  // namespace tessera::cuda
