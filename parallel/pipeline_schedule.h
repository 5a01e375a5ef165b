// PipelineSchedule: what one rank of a pipeline does in a step, as a pure function of the
// pipeline's shape. A pipeline of `stages` ranks cuts the model into stages x chunks pieces; piece
// g is chunk g / stages of rank g % stages, so a micro-batch goes round the ranks once per chunk.
//
// The schedule is made by playing all ranks in ticks: in a tick each rank makes at most one forward
// or backward, the next of its order whose input has arrived. What a tick produced is exchanged at
// its end, by both sides in one group of sends and receives. So every exchange needs of a peer only
// what lies before it in that peer's list: no order of rendezvous can wait in a circle.
//
//   gpipe        all forwards, then all backwards (Huang et al. 2019)
//   1f1b         at most `stages - rank` micro-batches in flight, then forward and backward by
//   turns
//                (Narayanan et al. 2019, 2021)
//   interleaved  the same over several chunks per rank: a smaller bubble for more messages and more
//                activations (Narayanan et al. 2021)
// Backwards of a chunk come in the order of the micro-batches under every kind, so that all of them
// add up gradients in the same order.
#pragma once

#include <vector>

namespace tessera {

enum class PipelineKind : unsigned char { kGPipe, k1F1B, kInterleaved };

struct PipelineShape {
  int stages = 1;
  int chunks = 1;  // per rank; more than 1 is for kInterleaved
  int micro_batches = 1;
  PipelineKind kind = PipelineKind::k1F1B;

  int pieces() const { return stages * chunks; }
};

// A message between ranks: the residual stream behind a piece, or the gradient in front of one.
struct PipelineTransfer {
  bool is_send = false;
  bool is_gradient = false;
  int peer = -1;  // pipeline rank
  int micro_batch = -1;
  int chunk = -1;   // of this rank: that made it, or will read it
  int buffer = -1;  // of outputs (forward sends), inputs (forward receives) or gradients
};

// One entry of a rank's list. Buffers are numbered from 0 within their kind (PipelineBuffers).
struct PipelineAction {
  enum class Kind : unsigned char { kForward, kBackward, kExchange };
  Kind kind = Kind::kForward;
  int micro_batch = -1;
  int chunk = -1;
  int batch = -1;        // the micro-batch's tokens
  bool starts = false;   // the micro-batch's first action on this rank
  int activations = -1;  // of the chunk: filled by the forward, free after the backward
  int input = -1;        // read by the forward and again by the backward; none for piece 0
  int output = -1;       // written by the forward; none for the last piece
  int gradient = -1;     // backward: of the output in, of the input out. Forward of the last piece:
                         // where the loss leaves its gradient
  std::vector<PipelineTransfer> transfers;  // of an exchange
};

// How many buffers of each kind the list uses.
struct PipelineBuffers {
  std::vector<int> activations;  // per chunk: most micro-batches between forward and backward
  int inputs = 0;
  int outputs = 0;
  int gradients = 0;
  int batches = 0;
};

struct PipelineSchedule {
  std::vector<PipelineAction> actions;
  PipelineBuffers buffers;
  int ticks = 0;  // of the whole pipeline, idle ones of this rank included
};

// kUser where the shape makes no pipeline (more than one chunk without kInterleaved or on one
// rank).
PipelineSchedule pipeline_schedule(const PipelineShape& shape, int rank);

// The buffers for steps of up to shape.micro_batches micro-batches: the last step of an epoch may
// have fewer, and an interleaved schedule of fewer may need more of a kind.
PipelineBuffers pipeline_buffers(const PipelineShape& shape, int rank);

}  // namespace tessera
