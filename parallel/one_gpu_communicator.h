// One-gpu: N thread ranks on one GPU, so that everything parallel runs on a single card. The calling
// threads meet on the host as the CPU's thread ranks do (parallel/board: signature checks, time limit,
// abort); the data moves on the device, ordered by CUDA events, and reductions add in rank order: the
// bits are those of the thread ranks.
#pragma once

#include <memory>
#include <vector>

#include "parallel/communicator.h"

namespace tessera {

// `size` communicators for threads of this process (at most 64), entry r for the thread of rank r; each
// rank has its own context on GPU `device`. A call blocks its thread until every rank has made it; its
// work is then enqueued on the rank's stream. A wait for a missing rank that is longer than
// `timeout_seconds` aborts the group and names it. kUser in a build without CUDA.
std::vector<std::unique_ptr<Communicator>> make_one_gpu_communicators(int size, int device = 0,
                                                                      double timeout_seconds = 600);

}  // namespace tessera
