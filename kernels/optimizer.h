// AdamW (Loshchilov & Hutter 2019) on a flat shard, gradient norms, and the step's scalars.
#pragma once

#include <cstdint>

#include "engine/core/philox.h"
#include "engine/core/tensor.h"
#include "kernels/moment_format.h"

namespace tessera {

// Random bits for the values of one element that are rounded stochastically (16 for bf16, 20 for
// 8-bit moments): a function of the step's key, the parameter (`stream`) and the element's global
// index, so the same under every layout and on every backend.
struct RoundingNoise {
  std::uint32_t weight;  // 16 bits
  std::uint32_t m;       // 20 bits
  std::uint32_t v;       // 20 bits
};
TESSERA_HOST_DEVICE inline PhiloxKey rounding_key_of(PhiloxKey key, std::int32_t stream) {
  key.seed ^= static_cast<std::uint32_t>(stream);
  return key;
}
// The bits of one half, 0 or 1, of a block: elements 2k and 2k + 1 share block k.
TESSERA_HOST_DEVICE inline RoundingNoise rounding_noise_of(const PhiloxBlock& block, int half) {
  const std::uint32_t low = half == 0 ? block.v[0] : block.v[2];
  const std::uint32_t high = half == 0 ? block.v[1] : block.v[3];
  return RoundingNoise{low & 0xffffu, (low >> 16) | (high & 0xfu) << 16, (high >> 4) & 0xfffffu};
}
TESSERA_HOST_DEVICE inline RoundingNoise rounding_noise(const PhiloxKey& stream_key,
                                                        std::uint64_t global_index) {
  return rounding_noise_of(philox(stream_key, global_index / 2), static_cast<int>(global_index % 2));
}

// A run of a flat shard that belongs to one parameter. Device array; trivially copyable.
struct ShardSegment {
  std::int64_t begin = 0;       // elements within the shard
  std::int64_t end = 0;
  // Element e of the segment is element l = local_begin + (e - begin) of the parameter's local piece
  // and has the global index  global_begin + (l / local_cols) * global_cols + l % local_cols,
  // which keys its random numbers: the same under every layout.
  std::int64_t local_begin = 0;
  std::int64_t global_begin = 0;
  std::int64_t local_cols = 1;
  std::int64_t global_cols = 1;
  float lr_scale = 1.0f;
  float weight_decay = 0.0f;    // 0 for exempt parameters
  std::int32_t count_in_norm = 1; // 0: another rank counts its copy
  std::int32_t stream = 0;      // separates the random numbers of parameters
};

// sum_of_squares += sum over segments with count_in_norm of grad^2, accumulated in fp64 in a fixed
// order. NaN and Inf pass through.
struct SumOfSquares {
  Tensor grad;      // [n] fp32 or bf16
  Tensor segments;  // [num_segments * sizeof(ShardSegment)] u8 on the same device; ascending, disjoint
  Tensor sum;       // [1] fp64, added to
};

// Fills StepControl's results from the reduced sum and denominator:
//   norm = sqrt(sum) / denominator;  clip = min(1, max_grad_norm / (norm + 1e-6));
//   grad_scale = clip / denominator. A non-finite norm clears is_finite. Adds 1 to adam_step when the
// step is applied (finite and with targets).
struct StepControlFinish {
  Tensor control;      // u8 [sizeof(StepControl)]
  Tensor sum;          // [1] fp64
  Tensor denominator;  // [1] fp64
};

// One step on every element of the segments:
//   g = grad * grad_scale;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;
//   p -= lr * lr_scale * (weight_decay * p + (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)),
// with t = StepControl::adam_step and random bits from rounding_noise.
// p is `master` where given (weight = p rounded to nearest), otherwise `weight` itself (bf16 is then
// rounded stochastically). bf16 and 8-bit moments are rounded stochastically; of the latter n is a
// multiple of kMomentBlock. Nothing changes when StepControl says so (not finite, no targets).
struct AdamW {
  Tensor weight;    // [n] bf16 or fp32
  Tensor master;    // [n] fp32 or undefined
  Tensor grad;      // [n] fp32 or bf16
  Tensor m;         // [n] fp32, bf16 or codes (u8, kernels/moment_format.h)
  Tensor v;         // [n]; codes where m has codes
  Tensor m_scale;   // [n / kMomentBlock] fp32 beside codes, else undefined
  Tensor v_scale;
  Tensor segments;  // as SumOfSquares
  Tensor control;   // u8 [sizeof(StepControl)]
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float eps = 1e-8f;
};

}  // namespace tessera
