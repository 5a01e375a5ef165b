// The words in GPU memory by which ranks of a window signal each other, and the kernels that raise
// and await them. Every rank has a block; each peer writes a row of its own, so that no two ranks
// ever write to the same word and none needs atomics across the link.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera::cuda {

// At the start of a rank's block; the flags follow, [writers, num_flags].
struct WindowHeader {
  std::uint64_t is_poisoned;
  char reason[504];
};
static_assert(sizeof(WindowHeader) == 512);

// What a wait that ended without its flag leaves, in page-locked host memory.
struct WindowFailure {
  enum Code : std::uint32_t { kNone, kBeingWritten, kPoisoned, kLate };
  std::uint32_t code;
  std::int32_t flag;
  std::uint64_t wanted;
  std::uint64_t current;
};

struct WindowWait {
  const std::uint64_t* flags;  // of the flag, of writer 0
  std::int64_t stride;         // to the next writer's
  int writers;
  int flag;  // its number, for the failure
  std::uint64_t value;
  std::uint64_t limit_nanoseconds;
  const WindowHeader* header;
  WindowFailure* failure;  // as the GPU sees it
};

// Raises *flag to at least `value`, behind everything that the stream did before.
void raise_window_flag(std::uint64_t* flag, std::uint64_t value, cudaStream_t stream);
// Holds the stream until one of the writers' words has reached the value, the block is poisoned or
// the limit is over.
void await_window_flag(const WindowWait& wait, cudaStream_t stream);

}  // namespace tessera::cuda
