#include "parallel/one_gpu_communicator.h"

namespace tessera {

std::vector<std::unique_ptr<Communicator>> make_one_gpu_communicators(int, int, double) {
  TESSERA_FAIL(ErrorKind::kUser,
               "[one-gpu] this build has no CUDA; build with the CUDA toolkit, or use run.device: cpu");
}

}  // namespace tessera
