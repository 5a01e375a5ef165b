// What a model keeps of its forward for the backward, and where.
#pragma once

#include <cstdint>

namespace tessera {

// How much of a block's forward is repeated in its backward to save memory.
enum class Recompute : unsigned char {
  kNone,       // everything is kept
  kSelective,  // norm outputs and the SwiGLU output are recomputed: cheap passes, a third of the
               // bytes
  kFull,       // only the block's input is kept
};

// Bytes of an MLP's widest activation above which it takes its tokens in chunks (models/mlp.h). At 1
// GiB the 8b model takes 16,384 of 131,072 tokens at a time: reading and writing the gradients of its
// weights once more per chunk is then 2% of the products' time.
inline constexpr std::int64_t kMlpChunkBytes = std::int64_t{1} << 30;

struct ActivationOptions {
  Recompute recompute = Recompute::kNone;
  // Where nothing but the block's input is kept; see Mlp::chunk_tokens.
  std::int64_t mlp_chunk_bytes = kMlpChunkBytes;
  // Under Recompute::kFull the inputs of the blocks wait for the backward in host memory
  // (models/input_offload.h).
  bool offloads_inputs = false;
};

}  // namespace tessera
