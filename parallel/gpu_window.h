// PeerWindow on GPUs of one machine: threads of one process reach each other's memory directly,
// other processes through CUDA IPC. Puts are copies by the copy engines; a flag is a word in the
// reader's GPU memory that the writer raises and the reader's stream waits for, so that hosts do not
// meet. What ranks need to know of each other they exchange once, when the window is made.
//
// A wait that ends without its flag, by poison or after the time limit, lets its stream go on; the
// error comes out of the next wait of the host for that GPU, and out of every later one as long as
// the window lives.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/core/tensor.h"
#include "parallel/board/abort_tree.h"
#include "parallel/control/control_plane.h"
#include "parallel/peer_window.h"

namespace tessera {

// Collective: gives `own` to every rank and returns everybody's, entry r of rank r.
using BlobExchange = std::function<std::vector<std::string>(const std::string& own)>;

// Through the job's control plane, among all of its ranks. Calls match by `name` and count.
BlobExchange exchange_over(ControlPlane& control, const std::string& name, double timeout_seconds);

struct GpuWindowOptions {
  std::string name;  // of the group, for messages
  int rank = 0;
  int size = 1;
  int num_flags = 0;  // the same on every rank
  double timeout_seconds = 600;
  std::shared_ptr<board::AbortTree> tree;  // whose abort poisons the window; may be null
};

// A window on the peers' `memory`, which was allocated by `context` and outlives the window; null on
// every rank where some rank's GPU cannot reach another's, and in a build without CUDA. Collective.
// Ranks end their windows after a barrier behind the last use.
std::unique_ptr<PeerWindow> make_gpu_window(const GpuWindowOptions& options, const Tensor& memory,
                                            BackendContext& context, const BlobExchange& exchange);

}  // namespace tessera
