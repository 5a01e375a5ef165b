// Linked instead of kernels/cuda in a build without the CUDA toolkit. Never reached in practice: no
// cuda stream can exist there.
#include "kernels/gemm_choices.h"
#include "kernels/ops.h"

namespace tessera::cuda {

#define TESSERA_NO_CUDA_OP(function, Arguments)                                        \
  void function(const Arguments&, Stream&) {                                           \
    TESSERA_FAIL(ErrorKind::kUser, "[" #function "] this build has no CUDA backend");  \
  }
TESSERA_OPS(TESSERA_NO_CUDA_OP)

std::string export_gemm_choices(BackendContext&) { return {}; }
int import_gemm_choices(BackendContext&, const std::string&) { return 0; }

}  // namespace tessera::cuda
