// Add, scale/cast, column sums and the ordered sum of parts. All bound by memory: 16-byte accesses, a few
// independent loads in flight per thread, one pass.
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/add_bias.h"
#include "kernels/cuda/partial_sums.cuh"
#include "kernels/cuda_workspace.h"
#include "kernels/ops.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

// ---- out = a + b, out = factor * in: one dtype throughout ------------------------------------------

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const T* a, std::int64_t a_stride, const T* b, std::int64_t b_stride, T* out,
               std::int64_t out_stride, RowChunks work) {
  const std::int64_t row = blockIdx.x / work.chunks;
  const std::int64_t first = (blockIdx.x - row * work.chunks) * (kThreads * kUnroll) + threadIdx.x;
  a += row * a_stride;
  b += row * b_stride;
  out += row * out_stride;
  using A = Access<T, N>;
  typename A::Raw raw_a[kUnroll];
  typename A::Raw raw_b[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t i = first + u * kThreads;
    if (i < work.cols) {
      raw_a[u] = A::load(a + i * N);
      raw_b[u] = A::load(b + i * N);
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t i = first + u * kThreads;
    if (i >= work.cols) return;
    Compute<T> x[N], y[N];
    A::unpack(raw_a[u], x);
    A::unpack(raw_b[u], y);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] += y[j];
    A::write(out + i * N, x);
  }
}

// ---- The same for any mixture of dtypes ------------------------------------------------------------

struct AnyMatrix {
  void* data;
  std::int64_t stride;
  DType dtype;
  explicit AnyMatrix(const Tensor& t) : data(t.data), stride(t.row_stride), dtype(t.dtype) {}
};

template <typename C, int N>
__device__ __forceinline__ void load_some(const AnyMatrix& m, std::int64_t i, C (&out)[N]) {
  if constexpr (N == 8) {
    load_any8(m.data, m.dtype, i, out);
  } else {
    out[0] = load_any<C>(m.data, m.dtype, i);
  }
}
template <typename C, int N>
__device__ __forceinline__ void store_some(const AnyMatrix& m, std::int64_t i, const C (&in)[N]) {
  if constexpr (N == 8) {
    store_any8(m.data, m.dtype, i, in);
  } else {
    store_any<C>(m.data, m.dtype, i, in[0]);
  }
}

template <typename C, int N>
__global__ void __launch_bounds__(kThreads)
    add_any_kernel(AnyMatrix a, AnyMatrix b, AnyMatrix out, RowChunks work) {
  const std::int64_t row = blockIdx.x / work.chunks;
  const std::int64_t i = (blockIdx.x - row * work.chunks) * kThreads + threadIdx.x;
  if (i >= work.cols) return;
  C x[N], y[N];
  load_some(a, row * a.stride + i * N, x);
  load_some(b, row * b.stride + i * N, y);
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] += y[j];
  store_some(out, row * out.stride + i * N, x);
}

template <typename C, int N, int U>
__global__ void __launch_bounds__(kThreads)
    scale_any_kernel(AnyMatrix in, AnyMatrix out, C factor, RowChunks work) {
  const std::int64_t row = blockIdx.x / work.chunks;
  const std::int64_t first = (blockIdx.x - row * work.chunks) * (kThreads * U) + threadIdx.x;
  C x[U][N];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const std::int64_t i = first + u * kThreads;
    if (i < work.cols) load_some(in, row * in.stride + i * N, x[u]);
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const std::int64_t i = first + u * kThreads;
    if (i >= work.cols) return;
#pragma unroll
    for (int j = 0; j < N; ++j) x[u][j] *= factor;
    store_some(out, row * out.stride + i * N, x[u]);
  }
}

// out[t, j] = bias[j] (+ out) (+ product), for products whose library kernel cannot add the bias itself.
template <typename C>
__global__ void __launch_bounds__(kThreads)
    add_bias_kernel(AnyMatrix bias, bool accumulate, const float* product, AnyMatrix out, RowChunks work) {
  const std::int64_t row = blockIdx.x / work.chunks;
  const std::int64_t i = (blockIdx.x - row * work.chunks) * kThreads + threadIdx.x;
  if (i >= work.cols) return;
  const std::int64_t at = row * out.stride + i;
  C value = load_any<C>(bias.data, bias.dtype, i);
  if (accumulate) value += load_any<C>(out.data, out.dtype, at);
  if (product != nullptr) value += static_cast<C>(product[row * work.cols + i]);
  store_any<C>(out.data, out.dtype, at, value);
}

// The tensors as few rows as possible: one row where all are dense.
struct Extent {
  std::int64_t rows;
  std::int64_t cols;
};
template <typename... Tensors>
Extent extent_of(const Tensor& first, const Tensors&... rest) {
  const bool dense = first.is_dense() && (rest.is_dense() && ...);
  return dense ? Extent{1, first.numel()} : Extent{first.rows(), first.cols()};
}

// ---- Column sums -----------------------------------------------------------------------------------

constexpr int kSumRows = 8;

// Block: 32 lanes of N columns x 8 rows at a time; partial[part, :] = sum of this block's rows.
template <typename T, int N>
__global__ void __launch_bounds__(32 * kSumRows)
    column_sum_kernel(const T* in, std::int64_t stride, std::int64_t rows, std::int64_t cols,
                      std::int64_t rows_per_part, Compute<T>* partial) {
  using C = Compute<T>;
  __shared__ C shared[kSumRows][32 * N];
  const std::int64_t col = (static_cast<std::int64_t>(blockIdx.x) * 32 + threadIdx.x) * N;
  const std::int64_t begin = blockIdx.y * rows_per_part;
  const std::int64_t end = min(rows, begin + rows_per_part);
  C sum[N] = {};
  if (col < cols) {
#pragma unroll 4
    for (std::int64_t r = begin + threadIdx.y; r < end; r += kSumRows) {
      C x[N];
      Access<T, N>::read(in + r * stride + col, x);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += x[j];
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) shared[threadIdx.y][threadIdx.x * N + j] = sum[j];
  __syncthreads();
  for (int j = threadIdx.y * 32 + threadIdx.x; j < 32 * N; j += 32 * kSumRows) {
    const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * 32 * N + j;
    if (c >= cols) continue;
    C total = 0;
#pragma unroll
    for (int r = 0; r < kSumRows; ++r) total += shared[r][j];
    partial[blockIdx.y * cols + c] = total;
  }
}

// ---- Sum (or maximum) of equal parts ---------------------------------------------------------------

template <typename T, int N, bool kMaximum>
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(const T* in, T* out, std::int64_t vectors, std::int64_t part, int count) {
  using A = Access<T, N>;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= vectors) return;
  const T* p = in + i * N;
  Compute<T> sum[N];
  A::read(p, sum);
#pragma unroll 4
  for (int c = 1; c < count; ++c) {
    Compute<T> x[N];
    A::read(p + c * part, x);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if constexpr (kMaximum) {
        // A NaN must reach the result whichever side it is on.
        sum[j] = (x[j] > sum[j] || x[j] != x[j]) ? x[j] : sum[j];
      } else {
        sum[j] += x[j];
      }
    }
  }
  A::write(out + i * N, sum);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_parts_integer_kernel(const T* in, T* out, std::int64_t part, int count, bool maximum) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= part) return;
  T sum = in[i];
  for (int c = 1; c < count; ++c) {
    const T x = in[i + c * part];
    sum = maximum ? max(sum, x) : sum + x;
  }
  out[i] = sum;
}

// The dtypes that only communicators of small formats use.
__global__ void __launch_bounds__(kThreads)
    sum_parts_any_kernel(const void* in, void* out, DType dtype, std::int64_t part, int count, bool maximum) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= part) return;
  float sum = load_any<float>(in, dtype, i);
  for (int c = 1; c < count; ++c) {
    const float x = load_any<float>(in, dtype, i + c * part);
    if (maximum) {
      sum = (x > sum || x != x) ? x : sum;
    } else {
      sum += x;
    }
  }
  store_any<float>(out, dtype, i, sum);
}

template <typename T, int N>
void launch_sum_parts(const SumParts& args, std::int64_t n, cudaStream_t s) {
  const std::int64_t vectors = n / N;
  const unsigned grid = grid_size(ceil_div(vectors, kThreads));
  const T* in = pointer<T>(args.in);
  T* out = pointer<T>(args.out);
  if (args.maximum) {
    sum_parts_kernel<T, N, true><<<grid, kThreads, 0, s>>>(in, out, vectors, n, args.count);
  } else {
    sum_parts_kernel<T, N, false><<<grid, kThreads, 0, s>>>(in, out, vectors, n, args.count);
  }
}

template <typename T>
void launch_sum_parts_integer(const SumParts& args, std::int64_t n, cudaStream_t s) {
  sum_parts_integer_kernel<<<grid_size(ceil_div(n, kThreads)), kThreads, 0, s>>>(
      pointer<T>(args.in), pointer<T>(args.out), n, args.count, args.maximum);
}

}  // namespace

void add(const Add& args, Stream& stream) {
  if (args.out.numel() == 0) return;
  const cudaStream_t s = native(stream);
  const Extent extent = extent_of(args.a, args.b, args.out);
  const bool aligned = rows_aligned(args.a) && rows_aligned(args.b) && rows_aligned(args.out);
  if (args.a.dtype == args.b.dtype && args.a.dtype == args.out.dtype &&
      (args.a.dtype == DType::kBF16 || args.a.dtype == DType::kF32)) {
    visit_float(args.a.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      const auto launch = [&](auto width) {
        constexpr int N = decltype(width)::value;
        const RowChunks work(extent.rows, extent.cols / N, kThreads * kUnroll);
        add_kernel<T, N><<<work.blocks(), kThreads, 0, s>>>(
            pointer<T>(args.a), args.a.row_stride, pointer<T>(args.b), args.b.row_stride,
            pointer<T>(args.out), args.out.row_stride, work);
      };
      if (aligned && extent.cols % kVector<T> == 0) {
        launch(std::integral_constant<int, kVector<T>>{});
      } else {
        launch(std::integral_constant<int, 1>{});
      }
    });
  } else {
    const bool is_double =
        args.a.dtype == DType::kF64 || args.b.dtype == DType::kF64 || args.out.dtype == DType::kF64;
    const bool wide = aligned && extent.cols % 8 == 0;
    const RowChunks work(extent.rows, wide ? extent.cols / 8 : extent.cols, kThreads);
    const AnyMatrix a(args.a), b(args.b), out(args.out);
    if (is_double) {
      const RowChunks scalar(extent.rows, extent.cols, kThreads);
      add_any_kernel<double, 1><<<scalar.blocks(), kThreads, 0, s>>>(a, b, out, scalar);
    } else if (wide) {
      add_any_kernel<float, 8><<<work.blocks(), kThreads, 0, s>>>(a, b, out, work);
    } else {
      add_any_kernel<float, 1><<<work.blocks(), kThreads, 0, s>>>(a, b, out, work);
    }
  }
  TESSERA_LAUNCHED();
}

void scale(const Scale& args, Stream& stream) {
  if (args.out.numel() == 0) return;
  const cudaStream_t s = native(stream);
  const Extent extent = extent_of(args.in, args.out);
  const AnyMatrix in(args.in), out(args.out);
  if (args.in.dtype == DType::kF64 || args.out.dtype == DType::kF64) {
    const RowChunks work(extent.rows, extent.cols, kThreads);
    scale_any_kernel<double, 1, 1><<<work.blocks(), kThreads, 0, s>>>(in, out, args.factor, work);
  } else if (rows_aligned(args.in) && rows_aligned(args.out) && extent.cols % 8 == 0) {
    const RowChunks work(extent.rows, extent.cols / 8, kThreads * 2);
    scale_any_kernel<float, 8, 2>
        <<<work.blocks(), kThreads, 0, s>>>(in, out, static_cast<float>(args.factor), work);
  } else {
    const RowChunks work(extent.rows, extent.cols, kThreads);
    scale_any_kernel<float, 1, 1>
        <<<work.blocks(), kThreads, 0, s>>>(in, out, static_cast<float>(args.factor), work);
  }
  TESSERA_LAUNCHED();
}

namespace {

void launch_add_bias(const Tensor& bias, bool accumulate, const float* product, const Tensor& out,
                     Stream& stream) {
  if (out.numel() == 0) return;
  const cudaStream_t s = native(stream);
  const RowChunks work(out.rows(), out.cols(), kThreads);
  const auto kernel = out.dtype == DType::kF64 ? add_bias_kernel<double> : add_bias_kernel<float>;
  kernel<<<work.blocks(), kThreads, 0, s>>>(AnyMatrix(bias), accumulate, product, AnyMatrix(out), work);
  TESSERA_LAUNCHED();
}

}  // namespace

void add_bias(const Tensor& bias, bool accumulate, const Tensor& out, Stream& stream) {
  launch_add_bias(bias, accumulate, nullptr, out, stream);
}

void add_product_and_bias(const Tensor& product, const Tensor& bias, bool accumulate, const Tensor& out,
                          Stream& stream) {
  launch_add_bias(bias, accumulate, pointer<float>(product), out, stream);
}

void column_sum(const ColumnSum& args, Stream& stream) {
  const std::int64_t rows = args.in.rows();
  const std::int64_t cols = args.in.cols();
  if (cols == 0) return;
  const Capabilities& target = stream.context().capabilities();
  const RowParts parts = column_sum_parts(rows, cols, target);
  const auto scratch = stream.scratch().take(device_scratch(args, target));
  const cudaStream_t s = native(stream);
  visit_float(args.in.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto width) {
      constexpr int N = decltype(width)::value;
      const dim3 grid(grid_size(ceil_div(cols, 32 * N)), static_cast<unsigned>(parts.parts));
      column_sum_kernel<T, N><<<grid, dim3(32, kSumRows), 0, s>>>(
          pointer<T>(args.in), args.in.row_stride, rows, cols, parts.rows_per_part,
          static_cast<Compute<T>*>(scratch.data()));
    };
    if (rows_aligned(args.in) && cols % kVector<T> == 0) {
      launch(std::integral_constant<int, kVector<T>>{});
    } else {
      launch(std::integral_constant<int, 1>{});
    }
  });
  TESSERA_LAUNCHED();
  add_partial_sums(scratch.data(), parts.parts, cols, cols, args.out, args.accumulate, stream);
}

void sum_parts(const SumParts& args, Stream& stream) {
  const std::int64_t n = args.out.numel();
  if (n == 0) return;
  const cudaStream_t s = native(stream);
  if (args.in.dtype == DType::kI64) {
    launch_sum_parts_integer<std::int64_t>(args, n, s);
  } else if (args.in.dtype == DType::kI32) {
    launch_sum_parts_integer<std::int32_t>(args, n, s);
  } else if (args.in.dtype == DType::kF16 || size_of(args.in.dtype) == 1) {
    sum_parts_any_kernel<<<grid_size(ceil_div(n, kThreads)), kThreads, 0, s>>>(
        args.in.data, args.out.data, args.in.dtype, n, args.count, args.maximum);
  } else {
    visit_float(args.in.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if (is_aligned(args.in.data) && is_aligned(args.out.data) && n % kVector<T> == 0) {
        launch_sum_parts<T, kVector<T>>(args, n, s);
      } else {
        launch_sum_parts<T, 1>(args, n, s);
      }
    });
  }
  TESSERA_LAUNCHED();
}

}  // namespace tessera::cuda
