// out = silu(gate) * up on [gate | up], and its gradients. Bound by memory: forward moves 3
// elements per output, backward 5; 16-byte accesses, two vectors in flight per thread and operand.
#include "kernels/cuda/amax.cuh"
#include "kernels/ops.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 2;

template <typename T, typename C>
__device__ __forceinline__ C sigmoid(C x) {
  if constexpr (sizeof(T) == 2) {
    // Approximate exp and division: far below bf16's rounding.
    return __fdividef(1.0f, 1.0f + __expf(-x));
  } else {
    return C(1) / (C(1) + exp(-x));
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    swiglu_forward_kernel(const T* gate_up, std::int64_t in_stride, T* out, std::int64_t out_stride,
                          std::int64_t ffn, RowChunks work, float* amax) {
  using A = Access<T, N>;
  using C = Compute<T>;
  const std::int64_t row = blockIdx.x / work.chunks;
  const std::int64_t first = (blockIdx.x - row * work.chunks) * (kThreads * kUnroll) + threadIdx.x;
  const T* gate = gate_up + row * in_stride;
  const T* up = gate + ffn;
  typename A::Raw raw_gate[kUnroll], raw_up[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t i = first + u * kThreads;
    if (i < work.cols) {
      raw_gate[u] = A::load(gate + i * N);
      raw_up[u] = A::load(up + i * N);
    }
  }
  LargestMagnitude<T> largest;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t i = first + u * kThreads;
    if (i >= work.cols) break;
    C g[N], x[N];
    A::unpack(raw_gate[u], g);
    A::unpack(raw_up[u], x);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] *= g[j] * sigmoid<T>(g[j]);
    const typename A::Raw stored = A::pack(x);
    A::store(out + row * out_stride + i * N, stored);
    largest.add(stored);
  }
  if (amax != nullptr) largest.record(amax);
}

// dgate = dout * up * (sig + gate sig (1 - sig)); dup = dout * gate * sig. dgate_up may be gate_up:
// each element is read by the thread that writes it.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(const T* dout, std::int64_t dout_stride, const T* gate_up,
                           std::int64_t in_stride, T* dgate_up, std::int64_t out_stride,
                           std::int64_t ffn, RowChunks work, float* amax) {
  using A = Access<T, N>;
  using C = Compute<T>;
  const std::int64_t row = blockIdx.x / work.chunks;
  const std::int64_t first = (blockIdx.x - row * work.chunks) * (kThreads * kUnroll) + threadIdx.x;
  const T* gate = gate_up + row * in_stride;
  const T* up = gate + ffn;
  typename A::Raw raw_d[kUnroll], raw_gate[kUnroll], raw_up[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t i = first + u * kThreads;
    if (i < work.cols) {
      raw_d[u] = A::load(dout + row * dout_stride + i * N);
      raw_gate[u] = A::load(gate + i * N);
      raw_up[u] = A::load(up + i * N);
    }
  }
  T* dgate = dgate_up + row * out_stride;
  LargestMagnitude<T> largest;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t i = first + u * kThreads;
    if (i >= work.cols) break;
    C d[N], g[N], x[N];
    A::unpack(raw_d[u], d);
    A::unpack(raw_gate[u], g);
    A::unpack(raw_up[u], x);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const C sig = sigmoid<T>(g[j]);
      const C silu = g[j] * sig;
      g[j] = d[j] * x[j] * (sig + silu * (C(1) - sig));
      x[j] = d[j] * silu;
    }
    const typename A::Raw stored_gate = A::pack(g);
    const typename A::Raw stored_up = A::pack(x);
    A::store(dgate + i * N, stored_gate);
    A::store(dgate + ffn + i * N, stored_up);
    largest.add(stored_gate);
    largest.add(stored_up);
  }
  if (amax != nullptr) largest.record(amax);
}

}  // namespace

void swiglu_forward(const SwiGluForward& args, Stream& stream) {
  const std::int64_t ffn = args.out.cols();
  if (args.out.numel() == 0) return;
  const cudaStream_t s = native(stream);
  visit_float(args.out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto width) {
      constexpr int N = decltype(width)::value;
      const RowChunks work(args.out.rows(), ffn / N, kThreads * kUnroll);
      swiglu_forward_kernel<T, N><<<work.blocks(), kThreads, 0, s>>>(
          pointer<T>(args.gate_up), args.gate_up.row_stride, pointer<T>(args.out),
          args.out.row_stride, ffn, work, amax_pointer(args.amax));
    };
    if (ffn % kVector<T> == 0 && rows_aligned(args.gate_up) && rows_aligned(args.out)) {
      launch(std::integral_constant<int, kVector<T>>{});
    } else {
      launch(std::integral_constant<int, 1>{});
    }
  });
  TESSERA_LAUNCHED();
}

void swiglu_backward(const SwiGluBackward& args, Stream& stream) {
  const std::int64_t ffn = args.dout.cols();
  if (args.dout.numel() == 0) return;
  const cudaStream_t s = native(stream);
  visit_float(args.dout.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto width) {
      constexpr int N = decltype(width)::value;
      const RowChunks work(args.dout.rows(), ffn / N, kThreads * kUnroll);
      swiglu_backward_kernel<T, N><<<work.blocks(), kThreads, 0, s>>>(
          pointer<T>(args.dout), args.dout.row_stride, pointer<T>(args.gate_up),
          args.gate_up.row_stride, pointer<T>(args.dgate_up), args.dgate_up.row_stride, ffn, work,
          amax_pointer(args.amax));
    };
    if (ffn % kVector<T> == 0 && rows_aligned(args.dout) && rows_aligned(args.gate_up) &&
        rows_aligned(args.dgate_up)) {
      launch(std::integral_constant<int, kVector<T>>{});
    } else {
      launch(std::integral_constant<int, 1>{});
    }
  });
  TESSERA_LAUNCHED();
}

}  // namespace tessera::cuda
