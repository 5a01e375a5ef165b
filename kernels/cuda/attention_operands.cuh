// What the tensor-core kernels of attention share: operands as the kernels see them and a few
// instructions.
#pragma once

#include "kernels/cuda/common.cuh"

namespace tessera::cuda {

struct AttentionView {
  __nv_bfloat16* data = nullptr;
  std::int64_t stride = 0;  // elements between rows
  AttentionView() = default;
  explicit AttentionView(const Tensor& t) : data(static_cast<__nv_bfloat16*>(t.data)), stride(t.row_stride) {}
};

// Rows may be read and written 16 bytes at a time.
inline bool is_vector_aligned(const Tensor& t) { return is_aligned(t.data) && t.row_stride % 8 == 0; }

constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two bf16, rounded to nearest, the first in the low half.
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace tessera::cuda
