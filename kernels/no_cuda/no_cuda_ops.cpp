// Linked instead of kernels/cuda in a build without the CUDA toolkit. Never reached in practice: no
// cuda stream can exist there.
#include "kernels/ops.h"

namespace tessera::cuda {

#define TESSERA_NO_CUDA_OP(function, Arguments)                                        \
  void function(const Arguments&, Stream&) {                                           \
    TESSERA_FAIL(ErrorKind::kUser, "[" #function "] this build has no CUDA backend");  \
  }
TESSERA_OPS(TESSERA_NO_CUDA_OP)

}  // namespace tessera::cuda
