// What every layer's forward and backward needs beside its tensors.
#pragma once

#include "engine/device/stream.h"
#include "models/quant_state.h"
#include "parallel/communicator.h"
#include "parallel/overlap.h"
#include "parallel/param_store.h"
#include "parallel/param_sync.h"

namespace tessera {

struct LayerContext {
  ParamStore& params;
  ParamSync& sync;  // weights are read under a lease of their bucket; gradients are opened first
  QuantState& quant;
  Communicator& tensor;         // tensor-parallel group
  Overlap& overlap;             // its exchanges under sequence parallelism
  Communicator& context_ranks;  // context-parallel group: shares the tokens of a micro-batch
  Stream& stream;               // compute
  bool sequence_parallel;       // activations between blocks are [tokens / tp, hidden]
  bool deterministic;           // ops that have a faster, unordered form must not use it
  bool reuses_scales = false;   // a forward that is repeated: its amaxes are known already
  bool keeps_inputs = true;     // a forward whose linear layers keep their inputs for the backward
};

// The amax that the producer of `operand` records; undefined where nothing is to be recorded.
inline Tensor amax_to_record(const GemmOperand& operand, const LayerContext& context) {
  return context.reuses_scales ? Tensor{} : operand.amax;
}
// Records it by a pass of its own, for producers that do not.
void measure(const GemmOperand& operand, LayerContext& context);

}  // namespace tessera
