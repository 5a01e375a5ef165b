// s = x + delta; out = s * rstd * weight, and its backward. [T, hidden] row-major; bound by memory:
// forward reads x and delta and writes sum and out once, backward reads dout, s and dsum and writes
// dx once. A row stays in the registers of one block; dweight leaves one row of partial sums per
// block.
#include "kernels/cuda/amax.cuh"
#include "kernels/cuda/partial_sums.cuh"
#include "kernels/cuda_workspace.h"
#include "kernels/ops.h"

namespace tessera::cuda {
namespace {

constexpr int kMaxThreads = 512;

template <typename T>
struct ForwardPointers {
  const T* x;
  const T* delta;  // null without residual addition
  const T* weight;
  T* sum;
  T* out;
  Compute<T>* rstd;  // null when no backward follows
  float* amax;       // null: not recorded
  std::int64_t x_stride, delta_stride, sum_stride, out_stride;
  std::int64_t hidden;
  Compute<T> eps;
};

// One block per row; each thread holds V vectors of N elements.
template <typename T, int N, int V>
__global__ void __launch_bounds__(kMaxThreads) rmsnorm_forward_kernel(ForwardPointers<T> p) {
  using A = Access<T, N>;
  using C = Compute<T>;
  __shared__ C shared[32];
  const std::int64_t row = blockIdx.x;
  const std::int64_t vectors = p.hidden / N;
  const T* x = p.x + row * p.x_stride;
  const T* delta = p.delta == nullptr ? nullptr : p.delta + row * p.delta_stride;
  typename A::Raw raw[V];
  typename A::Raw raw_delta[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const std::int64_t i = threadIdx.x + static_cast<std::int64_t>(v) * blockDim.x;
    if (i < vectors) {
      raw[v] = A::load(x + i * N);
      if (delta != nullptr) raw_delta[v] = A::load(delta + i * N);
    }
  }
  C squares = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const std::int64_t i = threadIdx.x + static_cast<std::int64_t>(v) * blockDim.x;
    if (i >= vectors) continue;
    C s[N];
    A::unpack(raw[v], s);
    if (delta != nullptr) {
      C d[N];
      A::unpack(raw_delta[v], d);
#pragma unroll
      for (int j = 0; j < N; ++j) s[j] += d[j];
      // The stored sum is what the backward and the next block see: normalise the rounded values.
      raw[v] = A::pack(s);
      A::store(p.sum + row * p.sum_stride + i * N, raw[v]);
      A::unpack(raw[v], s);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) squares += s[j] * s[j];
  }
  squares = block_sum(squares, shared);
  const C rstd = C(1) / sqrt(squares / static_cast<C>(p.hidden) + p.eps);
  if (threadIdx.x == 0 && p.rstd != nullptr) p.rstd[row] = rstd;
  LargestMagnitude<T> largest;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const std::int64_t i = threadIdx.x + static_cast<std::int64_t>(v) * blockDim.x;
    if (i >= vectors) continue;
    C s[N], w[N];
    A::unpack(raw[v], s);
    A::read(p.weight + i * N, w);
#pragma unroll
    for (int j = 0; j < N; ++j) s[j] = s[j] * rstd * w[j];
    const typename A::Raw stored = A::pack(s);
    A::store(p.out + row * p.out_stride + i * N, stored);
    largest.add(stored);
  }
  if (p.amax != nullptr) largest.record(p.amax);
}

// Any width and alignment: the row is read again for the second pass (from cache, for usual
// widths).
template <typename T>
__global__ void __launch_bounds__(kMaxThreads) rmsnorm_forward_any_kernel(ForwardPointers<T> p) {
  using C = Compute<T>;
  __shared__ C shared[32];
  const std::int64_t row = blockIdx.x;
  const T* x = p.x + row * p.x_stride;
  C squares = 0;
  for (std::int64_t i = threadIdx.x; i < p.hidden; i += blockDim.x) {
    C s = to_compute(x[i]);
    if (p.delta != nullptr) {
      const T rounded = from_compute<T>(s + to_compute(p.delta[row * p.delta_stride + i]));
      p.sum[row * p.sum_stride + i] = rounded;
      s = to_compute(rounded);
    }
    squares += s * s;
  }
  squares = block_sum(squares, shared);
  const C rstd = C(1) / sqrt(squares / static_cast<C>(p.hidden) + p.eps);
  if (threadIdx.x == 0 && p.rstd != nullptr) p.rstd[row] = rstd;
  // Each thread reads back the elements it wrote itself.
  const T* s = p.delta != nullptr ? p.sum + row * p.sum_stride : x;
  LargestMagnitude<T> largest;
  for (std::int64_t i = threadIdx.x; i < p.hidden; i += blockDim.x) {
    const T stored = from_compute<T>(to_compute(s[i]) * rstd * to_compute(p.weight[i]));
    p.out[row * p.out_stride + i] = stored;
    largest.add(stored);
  }
  if (p.amax != nullptr) largest.record(p.amax);
}

template <typename T>
struct BackwardPointers {
  const T* dout;
  const T* s;
  const T* weight;
  const Compute<T>* rstd;
  const T* dsum;  // null: no residual gradient
  T* dx;
  Compute<T>* partial;  // [gridDim.x, hidden], null when the weight is frozen
  float* amax;          // null: not recorded
  std::int64_t dout_stride, s_stride, dsum_stride, dx_stride;
  std::int64_t rows, hidden;
};

// Blocks take rows b, b + grid, ... and prefetch the next row before they reduce the current one,
// so memory stays busy. dx = dsum + rstd * (w dout - s rstd^2 mean(w dout s)).
template <typename T, int N, int V>
__global__ void __launch_bounds__(kMaxThreads, 1) rmsnorm_backward_kernel(BackwardPointers<T> p) {
  using A = Access<T, N>;
  using C = Compute<T>;
  __shared__ C shared[2][32];
  const std::int64_t vectors = p.hidden / N;
  C dweight[V][N] = {};
  typename A::Raw weight[V];
  typename A::Raw dout[V], s[V], dsum[V];
  const bool has_dsum = p.dsum != nullptr;
  const auto load_row = [&](std::int64_t row, typename A::Raw(&a)[V], typename A::Raw(&b)[V],
                            typename A::Raw(&c)[V]) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const std::int64_t i = threadIdx.x + static_cast<std::int64_t>(v) * blockDim.x;
      if (i >= vectors) continue;
      a[v] = A::load(p.dout + row * p.dout_stride + i * N);
      b[v] = A::load(p.s + row * p.s_stride + i * N);
      if (has_dsum) c[v] = A::load(p.dsum + row * p.dsum_stride + i * N);
    }
  };
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const std::int64_t i = threadIdx.x + static_cast<std::int64_t>(v) * blockDim.x;
    if (i < vectors) weight[v] = A::load(p.weight + i * N);
  }
  std::int64_t row = blockIdx.x;
  if (row < p.rows) load_row(row, dout, s, dsum);
  LargestMagnitude<T> largest;
  int phase = 0;
  for (; row < p.rows; row += gridDim.x, phase ^= 1) {
    typename A::Raw next_dout[V], next_s[V], next_dsum[V];
    const std::int64_t next = row + gridDim.x;
    if (next < p.rows) load_row(next, next_dout, next_s, next_dsum);
    const C rstd = p.rstd[row];
    C dot = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const std::int64_t i = threadIdx.x + static_cast<std::int64_t>(v) * blockDim.x;
      if (i >= vectors) continue;
      C d[N], x[N], w[N];
      A::unpack(dout[v], d);
      A::unpack(s[v], x);
      A::unpack(weight[v], w);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        dot += d[j] * w[j] * x[j];
        dweight[v][j] += d[j] * (x[j] * rstd);
      }
    }
    dot = block_sum(dot, shared[phase]);
    const C factor = rstd * rstd * rstd * dot / static_cast<C>(p.hidden);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const std::int64_t i = threadIdx.x + static_cast<std::int64_t>(v) * blockDim.x;
      if (i >= vectors) continue;
      C d[N], x[N], w[N];
      A::unpack(dout[v], d);
      A::unpack(s[v], x);
      A::unpack(weight[v], w);
#pragma unroll
      for (int j = 0; j < N; ++j) d[j] = d[j] * w[j] * rstd - x[j] * factor;
      if (has_dsum) {
        A::unpack(dsum[v], x);
#pragma unroll
        for (int j = 0; j < N; ++j) d[j] += x[j];
      }
      const typename A::Raw stored = A::pack(d);
      A::store(p.dx + row * p.dx_stride + i * N, stored);
      largest.add(stored);
      dout[v] = next_dout[v];
      s[v] = next_s[v];
      dsum[v] = next_dsum[v];
    }
  }
  if (p.amax != nullptr) largest.record(p.amax);
  if (p.partial == nullptr) return;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const std::int64_t i = threadIdx.x + static_cast<std::int64_t>(v) * blockDim.x;
    if (i >= vectors) continue;
    C* out = p.partial + static_cast<std::int64_t>(blockIdx.x) * p.hidden + i * N;
#pragma unroll
    for (int j = 0; j < N; j += 16 / static_cast<int>(sizeof(C))) {
      if constexpr (N % 4 == 0 && sizeof(C) == 4) {
        *reinterpret_cast<float4*>(out + j) =
            make_float4(dweight[v][j], dweight[v][j + 1], dweight[v][j + 2], dweight[v][j + 3]);
      } else {
        for (int l = 0; l < 2 && j + l < N; ++l) out[j + l] = dweight[v][j + l];
      }
    }
  }
}

// Any width and alignment. The block's row of partial sums lives in scratch memory; a thread
// touches only its own columns of it.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads) rmsnorm_backward_any_kernel(BackwardPointers<T> p) {
  using C = Compute<T>;
  __shared__ C shared[2][32];
  C* partial = p.partial == nullptr ? nullptr : p.partial + blockIdx.x * p.hidden;
  if (partial != nullptr) {
    for (std::int64_t i = threadIdx.x; i < p.hidden; i += blockDim.x) partial[i] = 0;
  }
  LargestMagnitude<T> largest;
  int phase = 0;
  for (std::int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, phase ^= 1) {
    const T* dout = p.dout + row * p.dout_stride;
    const T* s = p.s + row * p.s_stride;
    const C rstd = p.rstd[row];
    C dot = 0;
    for (std::int64_t i = threadIdx.x; i < p.hidden; i += blockDim.x) {
      const C d = to_compute(dout[i]);
      const C x = to_compute(s[i]);
      dot += d * to_compute(p.weight[i]) * x;
      if (partial != nullptr) partial[i] += d * (x * rstd);
    }
    dot = block_sum(dot, shared[phase]);
    const C factor = rstd * rstd * rstd * dot / static_cast<C>(p.hidden);
    for (std::int64_t i = threadIdx.x; i < p.hidden; i += blockDim.x) {
      C d = to_compute(dout[i]) * to_compute(p.weight[i]) * rstd - to_compute(s[i]) * factor;
      if (p.dsum != nullptr) d += to_compute(p.dsum[row * p.dsum_stride + i]);
      const T stored = from_compute<T>(d);
      p.dx[row * p.dx_stride + i] = stored;
      largest.add(stored);
    }
  }
  if (p.amax != nullptr) largest.record(p.amax);
}

// Threads of a block that holds a row of `vectors` vectors, `per_thread` each.
int row_threads(std::int64_t vectors, int per_thread) {
  return static_cast<int>(ceil_div(ceil_div(vectors, per_thread), 32) * 32);
}

// Calls launch(vectors per thread, threads) with the smallest number of vectors per thread from
// `wanted` up whose block is small enough; false when the row is too wide for registers.
template <int kMinimum, typename Launch>
bool choose_row_block(std::int64_t vectors, int preferred_threads, Launch&& launch) {
  if (row_threads(vectors, kMinimum) <= preferred_threads) {
    launch(std::integral_constant<int, kMinimum>{}, row_threads(vectors, kMinimum));
    return true;
  }
  if (row_threads(vectors, 2) <= kMaxThreads) {
    launch(std::integral_constant<int, 2>{}, row_threads(vectors, 2));
    return true;
  }
  if (row_threads(vectors, 4) <= kMaxThreads) {
    launch(std::integral_constant<int, 4>{}, row_threads(vectors, 4));
    return true;
  }
  return false;
}

}  // namespace

void rmsnorm_forward(const RmsNormForward& args, Stream& stream) {
  const std::int64_t rows = args.x.rows();
  if (rows == 0 || args.x.cols() == 0) return;
  const cudaStream_t s = native(stream);
  visit_float(args.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVector<T>;
    ForwardPointers<T> p{};
    p.x = pointer<T>(args.x);
    p.x_stride = args.x.row_stride;
    p.weight = pointer<T>(args.weight);
    p.out = pointer<T>(args.out);
    p.out_stride = args.out.row_stride;
    p.hidden = args.x.cols();
    p.eps = static_cast<Compute<T>>(args.eps);
    if (args.rstd.defined()) p.rstd = pointer<Compute<T>>(args.rstd);
    p.amax = amax_pointer(args.amax);
    if (args.delta.defined()) {
      p.delta = pointer<T>(args.delta);
      p.delta_stride = args.delta.row_stride;
      p.sum = pointer<T>(args.sum);
      p.sum_stride = args.sum.row_stride;
    }
    const bool aligned =
        p.hidden % N == 0 && rows_aligned(args.x) && rows_aligned(args.out) &&
        is_aligned(args.weight.data) &&
        (!args.delta.defined() || (rows_aligned(args.delta) && rows_aligned(args.sum)));
    const unsigned grid = grid_size(rows);
    if constexpr (!std::is_same_v<T, double>) {
      if (aligned && choose_row_block<1>(p.hidden / N, 128, [&](auto per_thread, int threads) {
            rmsnorm_forward_kernel<T, N, decltype(per_thread)::value><<<grid, threads, 0, s>>>(p);
          })) {
        return;
      }
    }
    const int threads = static_cast<int>(std::min<std::int64_t>(256, ceil_div(p.hidden, 32) * 32));
    rmsnorm_forward_any_kernel<T><<<grid, threads, 0, s>>>(p);
  });
  TESSERA_LAUNCHED();
}

void rmsnorm_backward(const RmsNormBackward& args, Stream& stream) {
  const std::int64_t rows = args.s.rows();
  const std::int64_t hidden = args.s.cols();
  if (hidden == 0) return;
  const Capabilities& target = stream.context().capabilities();
  const std::int64_t parts = rmsnorm_parts(rows, hidden, target);
  const auto scratch = stream.scratch().take(device_scratch(args, target));
  const cudaStream_t s = native(stream);
  visit_float(args.s.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int N = kVector<T>;
    BackwardPointers<T> p{};
    p.dout = pointer<T>(args.dout);
    p.dout_stride = args.dout.row_stride;
    p.s = pointer<T>(args.s);
    p.s_stride = args.s.row_stride;
    p.weight = pointer<T>(args.weight);
    p.rstd = pointer<Compute<T>>(args.rstd);
    if (args.dsum.defined()) {
      p.dsum = pointer<T>(args.dsum);
      p.dsum_stride = args.dsum.row_stride;
    }
    p.dx = pointer<T>(args.dx);
    p.dx_stride = args.dx.row_stride;
    p.partial = args.dweight.defined() ? static_cast<Compute<T>*>(scratch.data()) : nullptr;
    p.amax = amax_pointer(args.amax);
    p.rows = rows;
    p.hidden = hidden;
    const bool aligned = hidden % N == 0 && rows_aligned(args.dout) && rows_aligned(args.s) &&
                         rows_aligned(args.dx) && is_aligned(args.weight.data) &&
                         (!args.dsum.defined() || rows_aligned(args.dsum));
    const unsigned grid = grid_size(parts);
    if constexpr (!std::is_same_v<T, double>) {
      if (aligned &&
          choose_row_block<2>(hidden / N, kMaxThreads, [&](auto per_thread, int threads) {
            rmsnorm_backward_kernel<T, N, decltype(per_thread)::value><<<grid, threads, 0, s>>>(p);
          })) {
        return;
      }
    }
    const int threads =
        static_cast<int>(std::min<std::int64_t>(kMaxThreads, ceil_div(hidden, 32) * 32));
    rmsnorm_backward_any_kernel<T><<<grid, threads, 0, s>>>(p);
  });
  TESSERA_LAUNCHED();
  if (args.dweight.defined()) {
    add_partial_sums(scratch.data(), parts, hidden, hidden, args.dweight, args.accumulate_dweight,
                     stream);
  }
}

}  // namespace tessera::cuda
