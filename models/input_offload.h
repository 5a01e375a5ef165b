// InputOffload: the inputs of a model's blocks in host memory between forward and backward, where a
// full recompute keeps nothing else. On the device there are two, which blocks use in turn: while a
// block computes, the input of the one before it in a forward goes out, and that of the next one of a
// backward comes in.
//
// Copies run on a stream of their own, ordered with the computation by events; the host never waits.
// The numbers are those that would have stayed on the device, to the bit.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "engine/device/stream.h"
#include "engine/memory/arena.h"

namespace tessera {

class InputOffload {
 public:
  // `copies` may be the compute stream itself. Both outlive this.
  InputOffload(Stream& compute, Stream& copies);

  // Room for `count` inputs of this shape, numbered from 0, in `host` and for two of them in
  // `device`. Those of neighbouring blocks have neighbouring numbers.
  void plan(int count, DType dtype, Shape shape, Arena& device, Arena& host);

  // Where the computation may write input `id` from here on.
  Tensor write(int id);
  // Input `id` is complete on the compute stream and stays as it is until a later call of write();
  // it is wanted again.
  void keep(int id);
  // Starts to bring input `id` back, unless it is there; nothing below 0. The computation has
  // enqueued all that reads the input of the same parity.
  void fetch(int id);
  // Input `id` for the computation to read from here on; fetched if need be.
  Tensor read(int id);

 private:
  struct Slot {
    Tensor tensor;
    int id = -1;                    // of what it holds, or will when `moved` is reached
    std::unique_ptr<Event> used;    // on the compute stream
    std::unique_ptr<Event> moved;   // on the copy stream: the last copy out of it or into it
  };
  Slot& slot(int id) { return slots_[static_cast<std::size_t>(id % 2)]; }
  void copy(Slot& slot, void* to, const void* from);
  void await(const Slot& slot);

  Stream* compute_;
  Stream* copies_;
  std::array<Slot, 2> slots_;
  std::vector<Tensor> host_;
};

}  // namespace tessera
