// What every layer's forward and backward needs beside its tensors.
#pragma once

#include "engine/device/stream.h"
#include "parallel/communicator.h"
#include "parallel/param_store.h"

namespace tessera {

struct LayerContext {
  ParamStore& params;
  Communicator& tensor;    // tensor-parallel group
  Stream& stream;          // compute
  bool sequence_parallel;  // activations between blocks are [tokens / tp, hidden]
  bool deterministic;      // ops that have a faster, unordered form must not use it
};

}  // namespace tessera
