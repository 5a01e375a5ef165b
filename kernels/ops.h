// Every op of the engine: a free function over an argument struct and a stream. The entry point checks
// the arguments (the same for every device, kInternal errors) and runs the stream's backend; the meta
// device only records the scratch that the planned device would use.
#pragma once

#include <cstddef>

#include "engine/device/stream.h"
#include "kernels/attention.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/gemm.h"
#include "kernels/optimizer.h"
#include "kernels/quantize.h"
#include "kernels/random.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"
#include "kernels/step_control.h"
#include "kernels/swiglu.h"

// The one list of ops: X(function, Arguments).
#define TESSERA_OPS(X)                             \
  X(gemm, Gemm)                                    \
  X(embedding_forward, EmbeddingForward)           \
  X(embedding_backward, EmbeddingBackward)         \
  X(rmsnorm_forward, RmsNormForward)               \
  X(rmsnorm_backward, RmsNormBackward)             \
  X(qkv_rope_forward, QkvRopeForward)              \
  X(qkv_rope_backward, QkvRopeBackward)            \
  X(attention_forward, AttentionForward)           \
  X(attention_backward, AttentionBackward)         \
  X(swiglu_forward, SwiGluForward)                 \
  X(swiglu_backward, SwiGluBackward)               \
  X(add, Add)                                      \
  X(scale, Scale)                                  \
  X(column_sum, ColumnSum)                         \
  X(sum_parts, SumParts)                           \
  X(amax, Amax)                                    \
  X(quantize, Quantize)                            \
  X(quantize_blocks, QuantizeBlocks)               \
  X(cast_losses, CastLosses)                       \
  X(transpose, Transpose)                          \
  X(cross_entropy_stats, CrossEntropyStats)        \
  X(cross_entropy_combine, CrossEntropyCombine)    \
  X(cross_entropy_backward, CrossEntropyBackward)  \
  X(sum_of_squares, SumOfSquares)                  \
  X(step_control_finish, StepControlFinish)        \
  X(adamw, AdamW)                                  \
  X(fill_normal, FillNormal)

namespace tessera {

#define TESSERA_DECLARE_OP(function, Arguments)                              \
  void function(const Arguments& args, Stream& stream);                      \
  void check(const Arguments& args);                                         \
  /* Scratch bytes of the op on a device with these capabilities. */         \
  std::size_t workspace(const Arguments& args, const Capabilities& target);  \
  namespace cpu {                                                            \
  void function(const Arguments& args, Stream& stream);                      \
  }                                                                          \
  namespace cuda {                                                           \
  void function(const Arguments& args, Stream& stream);                      \
  }
TESSERA_OPS(TESSERA_DECLARE_OP)
#undef TESSERA_DECLARE_OP

}  // namespace tessera
