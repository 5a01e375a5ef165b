// Overlapped products on any backend: one more of the cases that every communicator passes.
#pragma once

#include "tests/parallel/communicator_conformance.h"

namespace tessera::test {

// gather_gemm and gemm_scatter equal the products of the whole between a gather and a reduction,
// and have the same bits on one stream and on two, sent or put, round after round in the same
// memory.
void run_overlap(RankEnv& env);

}  // namespace tessera::test
