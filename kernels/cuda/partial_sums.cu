#include "kernels/cuda/partial_sums.cuh"

namespace tessera::cuda {
namespace {

constexpr int kColumns = 32;
constexpr int kLanes = 16;

// Block: 32 columns x 16 lanes; lane l adds parts l, l + 16, ...; the lanes are then added in order.
template <typename C>
__global__ void __launch_bounds__(kColumns* kLanes)
    add_partial_sums_kernel(const C* partial, std::int64_t parts, std::int64_t stride, std::int64_t cols,
                            void* out, DType out_dtype, bool accumulate) {
  __shared__ C lanes[kLanes][kColumns];
  const std::int64_t col = static_cast<std::int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  C sum = 0;
  if (col < cols) {
#pragma unroll 4
    for (std::int64_t p = threadIdx.y; p < parts; p += kLanes) sum += partial[p * stride + col];
  }
  lanes[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || col >= cols) return;
  C total = 0;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) total += lanes[lane][threadIdx.x];
  if (accumulate) total += load_any<C>(out, out_dtype, col);
  store_any<C>(out, out_dtype, col, total);
}

}  // namespace

void add_partial_sums(const void* partial, std::int64_t parts, std::int64_t stride, std::int64_t cols,
                      const Tensor& out, bool accumulate, Stream& stream) {
  if (cols == 0) return;
  const cudaStream_t s = native(stream);
  const dim3 block(kColumns, kLanes);
  const unsigned grid = grid_size(ceil_div(cols, kColumns));
  if (out.dtype == DType::kF64) {
    add_partial_sums_kernel<<<grid, block, 0, s>>>(static_cast<const double*>(partial), parts, stride, cols,
                                                   out.data, out.dtype, accumulate);
  } else {
    add_partial_sums_kernel<<<grid, block, 0, s>>>(static_cast<const float*>(partial), parts, stride, cols,
                                                   out.data, out.dtype, accumulate);
  }
  TESSERA_LAUNCHED();
}

}  // namespace tessera::cuda
