// Softmax statistics of a vocabulary shard in one pass (running maximum and sum), their combination over
// shards, and softmax - onehot in place. [C, vocab_shard]; bound by memory: stats reads the logits once,
// backward reads and writes them once. Every sum has a fixed order.
#include "kernels/cuda/common.cuh"
#include "kernels/ops.h"

namespace tessera::cuda {
namespace {

constexpr int kStatsThreads = 512;
constexpr int kStatsUnroll = 4;
constexpr int kThreads = 256;
constexpr int kUnroll = 4;

template <typename T, typename C>
__device__ __forceinline__ C exp_of(C x) {
  if constexpr (sizeof(T) == 2) {
    return __expf(x);  // error far below that of bf16 logits
  } else {
    return exp(x);
  }
}

// Maximum and sum of exp(x - maximum) over the elements seen so far.
template <typename T>
struct Running {
  using C = Compute<T>;
  C maximum = minus_infinity<C>();
  C sum = 0;

  template <int N>
  __device__ __forceinline__ void add(const C (&x)[N]) {
    C best = maximum;
#pragma unroll
    for (int j = 0; j < N; ++j) best = max(best, x[j]);
    // Nothing but -inf (masked logits) so far: there is no mass to rescale and none to add. The sum
    // must still see a NaN, which max() ignores.
    const C shift = best == minus_infinity<C>() ? C(0) : best;
    sum *= exp_of<T>(maximum - shift);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += exp_of<T>(x[j] - shift);
    maximum = best;
  }
  __device__ __forceinline__ void merge(C other_maximum, C other_sum) {
    const C best = max(maximum, other_maximum);
    const C shift = best == minus_infinity<C>() ? C(0) : best;
    sum = sum * exp_of<T>(maximum - shift) + other_sum * exp_of<T>(other_maximum - shift);
    maximum = best;
  }
};

// One block per row.
template <typename T, int N>
__global__ void __launch_bounds__(kStatsThreads)
    cross_entropy_stats_kernel(const T* logits, std::int64_t stride, const std::int32_t* targets,
                               Compute<T>* stats, std::int64_t first_row, std::int64_t valid_cols) {
  using A = Access<T, N>;
  using C = Compute<T>;
  __shared__ C maxima[kStatsThreads / 32];
  __shared__ C sums[kStatsThreads / 32];
  const std::int64_t row = blockIdx.x;
  const T* x = logits + row * stride;
  const std::int64_t vectors = valid_cols / N;
  Running<T> running;
  for (std::int64_t begin = 0; begin < vectors; begin += kStatsThreads * kStatsUnroll) {
    typename A::Raw raw[kStatsUnroll];
#pragma unroll
    for (int u = 0; u < kStatsUnroll; ++u) {
      const std::int64_t i = begin + u * kStatsThreads + threadIdx.x;
      if (i < vectors) raw[u] = A::load(x + i * N);
    }
#pragma unroll
    for (int u = 0; u < kStatsUnroll; ++u) {
      const std::int64_t i = begin + u * kStatsThreads + threadIdx.x;
      if (i >= vectors) break;
      C values[N];
      A::unpack(raw[u], values);
      running.add(values);
    }
  }
  const std::int64_t tail = vectors * N + threadIdx.x;
  if (tail < valid_cols) {
    const C value[1] = {to_compute(x[tail])};
    running.add(value);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const C other_maximum = __shfl_down_sync(0xffffffffu, running.maximum, offset);
    const C other_sum = __shfl_down_sync(0xffffffffu, running.sum, offset);
    running.merge(other_maximum, other_sum);
  }
  if (threadIdx.x % 32 == 0) {
    maxima[threadIdx.x / 32] = running.maximum;
    sums[threadIdx.x / 32] = running.sum;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kStatsThreads / 32; ++w) running.merge(maxima[w], sums[w]);
  const std::int64_t target = targets[row];
  const std::int64_t col = target - first_row;
  stats[3 * row] = running.maximum;
  stats[3 * row + 1] = running.sum;
  stats[3 * row + 2] = target >= 0 && col >= 0 && col < valid_cols ? to_compute(x[col]) : C(0);
}

// One block for all rows: thread t takes rows t, t + 1024, ..., so the loss has one order of summation.
template <typename C>
__global__ void __launch_bounds__(1024)
    cross_entropy_combine_kernel(const C* stats, std::int64_t shards, std::int64_t count,
                                 const std::int32_t* targets, C* lse, C* nll, double* loss_sum) {
  __shared__ double shared[32];
  double loss = 0;
  for (std::int64_t t = threadIdx.x; t < count; t += blockDim.x) {
    double maximum = minus_infinity<double>();
    double target_logit = 0;
    for (std::int64_t s = 0; s < shards; ++s) {
      const C* shard = stats + (s * count + t) * 3;
      maximum = max(maximum, static_cast<double>(shard[0]));
      target_logit += static_cast<double>(shard[2]);
    }
    double sum = 0;
    for (std::int64_t s = 0; s < shards; ++s) {
      const C* shard = stats + (s * count + t) * 3;
      // A shard of padding only has the maximum -inf and no mass.
      if (shard[1] != C(0)) sum += exp(static_cast<double>(shard[0]) - maximum) * static_cast<double>(shard[1]);
    }
    const double log_sum = log(sum);
    lse[t] = static_cast<C>(maximum + log_sum);
    // maximum - target first: no rounding at the size of the logits enters the loss.
    const double row_loss = targets[t] < 0 ? 0.0 : (maximum - target_logit) + log_sum;
    if (nll != nullptr) nll[t] = static_cast<C>(row_loss);
    loss += row_loss;
  }
  loss = block_sum(loss, shared);
  if (threadIdx.x == 0 && loss_sum != nullptr) *loss_sum += loss;
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_backward_kernel(T* logits, std::int64_t stride, const std::int32_t* targets,
                                  const Compute<T>* lse_of, std::int64_t first_row, std::int64_t valid_cols,
                                  RowChunks work) {
  using A = Access<T, N>;
  using C = Compute<T>;
  const std::int64_t row = blockIdx.x / work.chunks;
  const std::int64_t first = (blockIdx.x - row * work.chunks) * (kThreads * kUnroll) + threadIdx.x;
  T* x = logits + row * stride;
  const std::int64_t target = targets[row];
  const C zero[N] = {};
  if (target < 0) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t i = first + u * kThreads;
      if (i < work.cols) A::write(x + i * N, zero);
    }
    return;
  }
  const C lse = lse_of[row];
  const std::int64_t target_col = target - first_row;
  typename A::Raw raw[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t i = first + u * kThreads;
    if (i < work.cols) raw[u] = A::load(x + i * N);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t i = first + u * kThreads;
    if (i >= work.cols) return;
    C values[N];
    A::unpack(raw[u], values);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const std::int64_t col = i * N + j;
      const C p = exp_of<T>(values[j] - lse) - (col == target_col ? C(1) : C(0));
      values[j] = col < valid_cols ? p : C(0);
    }
    A::write(x + i * N, values);
  }
}

}  // namespace

void cross_entropy_stats(const CrossEntropyStats& args, Stream& stream) {
  if (args.logits.rows() == 0) return;
  const cudaStream_t s = native(stream);
  visit_float(args.logits.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto width) {
      constexpr int N = decltype(width)::value;
      cross_entropy_stats_kernel<T, N><<<grid_size(args.logits.rows()), kStatsThreads, 0, s>>>(
          pointer<T>(args.logits), args.logits.row_stride, pointer<std::int32_t>(args.targets),
          pointer<Compute<T>>(args.stats), args.first_row, args.valid_cols);
    };
    if (rows_aligned(args.logits)) {
      launch(std::integral_constant<int, kVector<T>>{});
    } else {
      launch(std::integral_constant<int, 1>{});
    }
  });
  TESSERA_LAUNCHED();
}

void cross_entropy_combine(const CrossEntropyCombine& args, Stream& stream) {
  const std::int64_t shards = args.stats.shape[0];
  const std::int64_t count = args.stats.shape[1];
  if (count == 0) return;
  const cudaStream_t s = native(stream);
  double* loss_sum = args.loss_sum.defined() ? pointer<double>(args.loss_sum) : nullptr;
  const auto launch = [&](auto tag) {
    using C = typename decltype(tag)::type;
    C* nll = args.nll.defined() ? pointer<C>(args.nll) : nullptr;
    cross_entropy_combine_kernel<C><<<1, 1024, 0, s>>>(pointer<C>(args.stats), shards, count,
                                                       pointer<std::int32_t>(args.targets),
                                                       pointer<C>(args.lse), nll, loss_sum);
  };
  if (args.stats.dtype == DType::kF64) {
    launch(TypeTag<double>{});
  } else {
    launch(TypeTag<float>{});
  }
  TESSERA_LAUNCHED();
}

void cross_entropy_backward(const CrossEntropyBackward& args, Stream& stream) {
  if (args.logits.numel() == 0) return;
  const cudaStream_t s = native(stream);
  visit_float(args.logits.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto width) {
      constexpr int N = decltype(width)::value;
      const RowChunks work(args.logits.rows(), args.logits.cols() / N, kThreads * kUnroll);
      cross_entropy_backward_kernel<T, N><<<work.blocks(), kThreads, 0, s>>>(
          pointer<T>(args.logits), args.logits.row_stride, pointer<std::int32_t>(args.targets),
          pointer<Compute<T>>(args.lse), args.first_row, args.valid_cols, work);
    };
    if (rows_aligned(args.logits) && args.logits.cols() % kVector<T> == 0) {
      launch(std::integral_constant<int, kVector<T>>{});
    } else {
      launch(std::integral_constant<int, 1>{});
    }
  });
  TESSERA_LAUNCHED();
}

}  // namespace tessera::cuda
