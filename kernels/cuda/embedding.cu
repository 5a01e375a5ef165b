// Row gather, and its gradient: the rows of dout that belong to one token are added in ascending order by
// the warp that finds the token's first entry in `order`. Bound by memory.
#include "kernels/cuda/common.cuh"
#include "kernels/ops.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 128;

// Block per token. Raw moves of V: the element type does not matter.
template <typename V>
__global__ void __launch_bounds__(kThreads)
    embedding_forward_kernel(const std::int32_t* tokens, const V* weight, std::int64_t weight_stride,
                             std::int64_t weight_rows, V* out, std::int64_t out_stride, std::int64_t cols,
                             std::int64_t first_row) {
  const std::int64_t t = blockIdx.x;
  const std::int64_t row = tokens[t] - first_row;
  const bool is_here = row >= 0 && row < weight_rows;
  const V* from = weight + (is_here ? row : 0) * weight_stride;
  V* to = out + t * out_stride;
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < cols; i += kThreads) {
    V value{};
    if (is_here) value = from[i];
    to[i] = value;
  }
}

// Warp per (entry of order, 32 * N columns). Only the first entry of a token works; it reads the token's
// rows four at a time, so that several loads are in flight, and adds them in order.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    embedding_backward_kernel(const std::int32_t* tokens, const std::int32_t* order, std::int64_t count,
                              const T* dout, std::int64_t dout_stride, void* dweight, DType dweight_dtype,
                              std::int64_t dweight_stride, std::int64_t dweight_rows, std::int64_t cols,
                              std::int64_t first_row, bool accumulate) {
  using C = Compute<T>;
  const std::int64_t entry = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const std::int64_t col = (static_cast<std::int64_t>(blockIdx.y) * 32 + threadIdx.x % 32) * N;
  if (entry >= count || col >= cols) return;
  const std::int32_t token = tokens[order[entry]];
  const std::int64_t row = token - first_row;
  if (row < 0 || row >= dweight_rows) return;
  if (entry > 0 && tokens[order[entry - 1]] == token) return;
  C sum[N] = {};
  std::int64_t e = entry;
  while (e < count) {
    std::int32_t position[4];
    typename Access<T, N>::Raw raw[4];
    int found = 0;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      position[u] = e + u < count ? order[e + u] : -1;
      const bool is_same = position[u] >= 0 && tokens[position[u]] == token && found == u;
      if (is_same) {
        found = u + 1;
        raw[u] = Access<T, N>::load(dout + position[u] * dout_stride + col);
      }
    }
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      if (u < found) {
        C x[N];
        Access<T, N>::unpack(raw[u], x);
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += x[j];
      }
    }
    if (found < 4) break;
    e += 4;
  }
  const std::int64_t at = row * dweight_stride + col;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (accumulate) sum[j] += load_any<C>(dweight, dweight_dtype, at + j);
    store_any<C>(dweight, dweight_dtype, at + j, sum[j]);
  }
}

__global__ void __launch_bounds__(kThreads)
    zero_rows_kernel(std::uint8_t* data, std::int64_t stride_bytes, std::int64_t row_bytes) {
  std::uint8_t* row = data + blockIdx.x * stride_bytes;
  for (std::int64_t i = threadIdx.x; i < row_bytes; i += kThreads) row[i] = 0;
}

template <typename V>
void launch_forward(const EmbeddingForward& args, cudaStream_t s) {
  const std::int64_t per = static_cast<std::int64_t>(sizeof(V) / size_of(args.out.dtype));
  embedding_forward_kernel<V><<<grid_size(args.out.rows()), kThreads, 0, s>>>(
      pointer<std::int32_t>(args.tokens), pointer<V>(args.weight), args.weight.row_stride / per,
      args.weight.rows(), pointer<V>(args.out), args.out.row_stride / per, args.out.cols() / per,
      args.first_row);
}

}  // namespace

void embedding_forward(const EmbeddingForward& args, Stream& stream) {
  if (args.out.numel() == 0) return;
  const cudaStream_t s = native(stream);
  const std::int64_t per_vector = static_cast<std::int64_t>(16 / size_of(args.out.dtype));
  if (args.out.cols() % per_vector == 0 && rows_aligned(args.out) && rows_aligned(args.weight)) {
    launch_forward<uint4>(args, s);
  } else if (size_of(args.out.dtype) == 2) {
    launch_forward<std::uint16_t>(args, s);
  } else if (size_of(args.out.dtype) == 4) {
    launch_forward<std::uint32_t>(args, s);
  } else {
    launch_forward<std::uint64_t>(args, s);
  }
  TESSERA_LAUNCHED();
}

void embedding_backward(const EmbeddingBackward& args, Stream& stream) {
  if (args.dweight.numel() == 0) return;
  const cudaStream_t s = native(stream);
  const std::int64_t cols = args.dweight.cols();
  if (!args.accumulate) {
    const std::size_t size = size_of(args.dweight.dtype);
    if (args.dweight.is_dense()) {
      CUDA_CHECK(cudaMemsetAsync(args.dweight.data, 0, args.dweight.bytes(), s));
    } else {
      zero_rows_kernel<<<grid_size(args.dweight.rows()), kThreads, 0, s>>>(
          pointer<std::uint8_t>(args.dweight), args.dweight.row_stride * static_cast<std::int64_t>(size),
          cols * static_cast<std::int64_t>(size));
      TESSERA_LAUNCHED();
    }
  }
  const std::int64_t count = args.tokens.numel();
  if (count == 0) return;
  visit_float(args.dout.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto width) {
      constexpr int N = decltype(width)::value;
      const dim3 grid(grid_size(ceil_div(count, kThreads / 32)), static_cast<unsigned>(ceil_div(cols, 32 * N)));
      embedding_backward_kernel<T, N><<<grid, kThreads, 0, s>>>(
          pointer<std::int32_t>(args.tokens), pointer<std::int32_t>(args.order), count, pointer<T>(args.dout),
          args.dout.row_stride, args.dweight.data, args.dweight.dtype, args.dweight.row_stride,
          args.dweight.rows(), cols, args.first_row, args.accumulate);
    };
    if (cols % kVector<T> == 0 && rows_aligned(args.dout)) {
      launch(std::integral_constant<int, kVector<T>>{});
    } else {
      launch(std::integral_constant<int, 1>{});
    }
  });
  TESSERA_LAUNCHED();
}

}  // namespace tessera::cuda
