// Rotation of the q and k heads of a packed projection (after their optional RMS norm) and copy of v, and
// the backward in place. [T, (hq + 2 hkv) * head_dim]. Bound by memory: each element is read and written
// once; cos and sin come from cache. A group of lanes holds one head: lane l the pairs l*N .. l*N + N - 1.
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/partial_sums.cuh"
#include "kernels/cuda_workspace.h"
#include "kernels/ops.h"

namespace tessera::cuda {
namespace {

constexpr int kMaxThreads = 384;
constexpr int kAnyWarps = 4;

template <typename T>
struct RopePointers {
  using C = Compute<T>;
  const T* in;      // forward: the input; backward: the forward's input (with norm)
  T* out;           // forward: the output; backward: the gradient, in place
  const C* cos;
  const C* sin;
  const std::int32_t* positions;
  const T* q_norm;  // null without norm
  const T* k_norm;
  C* rstd;          // null when not kept
  C* partial;       // [gridDim.x, 2, head_dim]: sums of dq_norm, dk_norm; null when frozen
  std::int64_t in_stride, out_stride, cos_stride, sin_stride;
  std::int64_t tokens, table_rows;
  int heads_q, heads_kv, head_dim, half;
  int copied;       // trailing elements of a row that are copied (v); 0 in place
  C eps;
};

// Rows of the tables outside the caller's promise are not read.
template <typename T>
__device__ __forceinline__ std::int64_t position_of(const RopePointers<T>& p, std::int64_t token) {
  const std::int64_t position = p.positions[token];
  return position < 0 ? 0 : min(position, p.table_rows - 1);
}

template <typename C>
__device__ __forceinline__ C group_sum(C value, int lanes) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned mask = lanes == 32 ? 0xffffffffu : ((1u << lanes) - 1u) << (lane & ~(lanes - 1u));
  for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(mask, value, offset);
  return value;
}

// N cos or sin values of the arithmetic type.
template <typename C, int N>
__device__ __forceinline__ void read_table(const C* p, C (&out)[N]) {
#pragma unroll
  for (int j = 0; j < N; j += kVector<C>) {
    C part[kVector<C>];
    Access<C, kVector<C>>::read(p + j, part);
#pragma unroll
    for (int l = 0; l < kVector<C>; ++l) out[j + l] = part[l];
  }
}

// One block per token; full rotation (2 * half == head_dim), half / N lanes per head.
template <typename T, bool kNorm>
__global__ void __launch_bounds__(kMaxThreads) rope_forward_kernel(RopePointers<T> p) {
  constexpr int N = kVector<T>;
  using A = Access<T, N>;
  using C = Compute<T>;
  const std::int64_t token = blockIdx.x;
  const std::int64_t position = position_of(p, token);
  const int lanes = p.half / N;
  const int heads = p.heads_q + p.heads_kv;
  const int rotated = heads * lanes;
  const T* in = p.in + token * p.in_stride;
  T* out = p.out + token * p.out_stride;
  for (int item = threadIdx.x; item < rotated; item += blockDim.x) {
    const int head = item / lanes;
    const int i = (item - head * lanes) * N;
    C a[N], b[N], cos[N], sin[N];
    A::read(in + head * p.head_dim + i, a);
    A::read(in + head * p.head_dim + p.half + i, b);
    read_table(p.cos + position * p.cos_stride + i, cos);
    read_table(p.sin + position * p.sin_stride + i, sin);
    if constexpr (kNorm) {
      C squares = 0;
#pragma unroll
      for (int j = 0; j < N; ++j) squares += a[j] * a[j] + b[j] * b[j];
      squares = group_sum(squares, lanes);
      const C rstd = C(1) / sqrt(squares / static_cast<C>(p.head_dim) + p.eps);
      if (p.rstd != nullptr && i == 0) p.rstd[token * heads + head] = rstd;
      const T* weight = head < p.heads_q ? p.q_norm : p.k_norm;
      C w[N];
      A::read(weight + i, w);
#pragma unroll
      for (int j = 0; j < N; ++j) a[j] *= rstd * w[j];
      A::read(weight + p.half + i, w);
#pragma unroll
      for (int j = 0; j < N; ++j) b[j] *= rstd * w[j];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const C first = a[j];
      a[j] = first * cos[j] - b[j] * sin[j];
      b[j] = b[j] * cos[j] + first * sin[j];
    }
    A::write(out + head * p.head_dim + i, a);
    A::write(out + head * p.head_dim + p.half + i, b);
  }
  const int v = heads * p.head_dim;
  for (int i = threadIdx.x * N; i < p.copied; i += blockDim.x * N) A::store(out + v + i, A::load(in + v + i));
}

// Blocks take tokens b, b + grid, ... (one each without norm).
template <typename T, bool kNorm>
__global__ void __launch_bounds__(kMaxThreads) rope_backward_kernel(RopePointers<T> p) {
  constexpr int N = kVector<T>;
  using A = Access<T, N>;
  using C = Compute<T>;
  extern __shared__ char dynamic_shared[];
  const int lanes = p.half / N;
  const int heads = p.heads_q + p.heads_kv;
  const int rotated = heads * lanes;
  const int i = static_cast<int>(threadIdx.x) % lanes * N;  // blockDim.x is a multiple of lanes
  C sums[2][2][kNorm ? N : 1] = {};                         // [q or k][first or second half]
  for (std::int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const std::int64_t position = position_of(p, token);
    T* d = p.out + token * p.out_stride;
    C cos[N], sin[N];
    read_table(p.cos + position * p.cos_stride + i, cos);
    read_table(p.sin + position * p.sin_stride + i, sin);
    for (int item = threadIdx.x; item < rotated; item += blockDim.x) {
      const int head = item / lanes;
      T* first_half = d + head * p.head_dim + i;
      C a[N], b[N];
      A::read(first_half, a);
      A::read(first_half + p.half, b);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const C first = a[j];
        a[j] = first * cos[j] + b[j] * sin[j];
        b[j] = b[j] * cos[j] - first * sin[j];
      }
      if constexpr (kNorm) {
        const T* x_row = p.in + token * p.in_stride + head * p.head_dim + i;
        const bool is_query = head < p.heads_q;
        const T* weight = (is_query ? p.q_norm : p.k_norm) + i;
        const C rstd = p.rstd[token * heads + head];
        C x[N], y[N], w[N], u[N];
        A::read(x_row, x);
        A::read(x_row + p.half, y);
        A::read(weight, w);
        A::read(weight + p.half, u);
        C dot = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          dot += a[j] * w[j] * x[j] + b[j] * u[j] * y[j];
          const C da = a[j] * x[j] * rstd;
          const C db = b[j] * y[j] * rstd;
          sums[0][0][j] += is_query ? da : C(0);
          sums[0][1][j] += is_query ? db : C(0);
          sums[1][0][j] += is_query ? C(0) : da;
          sums[1][1][j] += is_query ? C(0) : db;
        }
        const C along = group_sum(dot, lanes) / static_cast<C>(p.head_dim) * rstd * rstd;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          a[j] = rstd * (a[j] * w[j] - x[j] * along);
          b[j] = rstd * (b[j] * u[j] - y[j] * along);
        }
      }
      A::write(first_half, a);
      A::write(first_half + p.half, b);
    }
  }
  if constexpr (kNorm) {
    if (p.partial == nullptr) return;
    // Lanes of a warp that hold the same columns, then the warps in order.
    C* total = reinterpret_cast<C*>(dynamic_shared);  // [2, head_dim]
    for (int j = threadIdx.x; j < 2 * p.head_dim; j += blockDim.x) total[j] = 0;
    for (int offset = lanes; offset < 32; offset *= 2) {
#pragma unroll
      for (int q = 0; q < 2; ++q) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int j = 0; j < N; ++j) sums[q][h][j] += __shfl_xor_sync(0xffffffffu, sums[q][h][j], offset);
        }
      }
    }
    __syncthreads();
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) {
      if (static_cast<int>(threadIdx.x) / 32 == warp && static_cast<int>(threadIdx.x) % 32 < lanes) {
#pragma unroll
        for (int q = 0; q < 2; ++q) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int j = 0; j < N; ++j) total[q * p.head_dim + h * p.half + i + j] += sums[q][h][j];
          }
        }
      }
      __syncthreads();
    }
    C* partial = p.partial + static_cast<std::int64_t>(blockIdx.x) * 2 * p.head_dim;
    for (int j = threadIdx.x; j < 2 * p.head_dim; j += blockDim.x) partial[j] = total[j];
  }
}

// Any head size, rotary size and alignment: a warp per head, an element (pair) per lane.
template <typename T>
__global__ void __launch_bounds__(32 * kAnyWarps) rope_forward_any_kernel(RopePointers<T> p) {
  using C = Compute<T>;
  const std::int64_t token = blockIdx.x;
  const std::int64_t position = position_of(p, token);
  const int heads = p.heads_q + p.heads_kv;
  const int lane = threadIdx.x % 32;
  const bool in_place = p.in == p.out;
  for (int head = threadIdx.x / 32; head < heads; head += kAnyWarps) {
    const T* x = p.in + token * p.in_stride + head * p.head_dim;
    T* y = p.out + token * p.out_stride + head * p.head_dim;
    const T* weight = head < p.heads_q ? p.q_norm : p.k_norm;
    C rstd = 1;
    if (weight != nullptr) {
      C squares = 0;
      for (int j = lane; j < p.head_dim; j += 32) squares += to_compute(x[j]) * to_compute(x[j]);
      rstd = C(1) / sqrt(warp_sum(squares) / static_cast<C>(p.head_dim) + p.eps);
      if (p.rstd != nullptr && lane == 0) p.rstd[token * heads + head] = rstd;
    }
    const auto value = [&](int j) {
      const C normed = to_compute(x[j]) * rstd;
      return weight == nullptr ? normed : normed * to_compute(weight[j]);
    };
    for (int j = lane; j < p.half; j += 32) {
      const C first = value(j);
      const C second = value(j + p.half);
      const C cos = p.cos[position * p.cos_stride + j];
      const C sin = p.sin[position * p.sin_stride + j];
      y[j] = from_compute<T>(first * cos - second * sin);
      y[j + p.half] = from_compute<T>(second * cos + first * sin);
    }
    if (!in_place) {
      for (int j = 2 * p.half + lane; j < p.head_dim; j += 32) y[j] = from_compute<T>(value(j));
    }
  }
  const int v = heads * p.head_dim;
  for (int j = threadIdx.x; j < p.copied; j += 32 * kAnyWarps) {
    p.out[token * p.out_stride + v + j] = p.in[token * p.in_stride + v + j];
  }
}

template <typename T>
__global__ void __launch_bounds__(32 * kAnyWarps) rope_backward_any_kernel(RopePointers<T> p) {
  using C = Compute<T>;
  extern __shared__ char dynamic_shared[];
  C* sums = reinterpret_cast<C*>(dynamic_shared);  // [warps, 2, head_dim]
  const int heads = p.heads_q + p.heads_kv;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (p.partial != nullptr) {
    for (int j = threadIdx.x; j < kAnyWarps * 2 * p.head_dim; j += 32 * kAnyWarps) sums[j] = 0;
    __syncthreads();
  }
  for (std::int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const std::int64_t position = position_of(p, token);
    const C* cos = p.cos + position * p.cos_stride;
    const C* sin = p.sin + position * p.sin_stride;
    for (int head = warp; head < heads; head += kAnyWarps) {
      T* d = p.out + token * p.out_stride + head * p.head_dim;
      const bool is_query = head < p.heads_q;
      const T* weight = is_query ? p.q_norm : p.k_norm;
      // The gradient before the rotation, of elements j and j + half.
      const auto unrotate = [&](int j, C& a, C& b) {
        const C first = to_compute(d[j]);
        const C second = to_compute(d[j + p.half]);
        a = first * cos[j] + second * sin[j];
        b = second * cos[j] - first * sin[j];
      };
      if (weight == nullptr) {
        for (int j = lane; j < p.half; j += 32) {
          C a, b;
          unrotate(j, a, b);
          d[j] = from_compute<T>(a);
          d[j + p.half] = from_compute<T>(b);
        }
        continue;
      }
      const T* x = p.in + token * p.in_stride + head * p.head_dim;
      const C rstd = p.rstd[token * heads + head];
      C* sum = sums + (warp * 2 + (is_query ? 0 : 1)) * p.head_dim;
      C dot = 0;
      const auto look = [&](int j, C g) {
        dot += g * to_compute(weight[j]) * to_compute(x[j]);
        if (p.partial != nullptr) sum[j] += g * to_compute(x[j]) * rstd;
      };
      for (int j = lane; j < p.half; j += 32) {
        C a, b;
        unrotate(j, a, b);
        look(j, a);
        look(j + p.half, b);
      }
      for (int j = 2 * p.half + lane; j < p.head_dim; j += 32) look(j, to_compute(d[j]));
      const C along = warp_sum(dot) / static_cast<C>(p.head_dim) * rstd * rstd;
      const auto write = [&](int j, C g) {
        d[j] = from_compute<T>(rstd * (g * to_compute(weight[j]) - to_compute(x[j]) * along));
      };
      for (int j = lane; j < p.half; j += 32) {
        C a, b;
        unrotate(j, a, b);
        write(j, a);
        write(j + p.half, b);
      }
      for (int j = 2 * p.half + lane; j < p.head_dim; j += 32) write(j, to_compute(d[j]));
    }
  }
  if (p.partial == nullptr) return;
  __syncthreads();
  for (int j = threadIdx.x; j < 2 * p.head_dim; j += 32 * kAnyWarps) {
    C total = 0;
    for (int w = 0; w < kAnyWarps; ++w) total += sums[w * 2 * p.head_dim + j];
    p.partial[static_cast<std::int64_t>(blockIdx.x) * 2 * p.head_dim + j] = total;
  }
}

// Threads such that a token's items take whole rounds of the block.
int block_threads(int items) {
  const int rounds = static_cast<int>(ceil_div(std::max(items, 1), kMaxThreads));
  return static_cast<int>(ceil_div(ceil_div(std::max(items, 1), rounds), 32) * 32);
}

template <typename T, typename Args>
RopePointers<T> common_pointers(const Args& args, std::int64_t tokens) {
  using C = Compute<T>;
  RopePointers<T> p{};
  p.cos = pointer<C>(args.cos);
  p.sin = pointer<C>(args.sin);
  p.cos_stride = args.cos.row_stride;
  p.sin_stride = args.sin.row_stride;
  p.positions = pointer<std::int32_t>(args.positions);
  p.tokens = tokens;
  p.table_rows = args.cos.rows();
  p.heads_q = static_cast<int>(args.layout.heads_q);
  p.heads_kv = static_cast<int>(args.layout.heads_kv);
  p.head_dim = static_cast<int>(args.layout.head_dim);
  p.half = static_cast<int>(args.cos.cols());
  if (args.q_norm.defined()) {
    p.q_norm = pointer<T>(args.q_norm);
    p.k_norm = pointer<T>(args.k_norm);
  }
  return p;
}

// Whether the vector kernels apply: a power of two of lanes per head, all accesses aligned.
template <typename T>
bool is_regular(const RopePointers<T>& p, const Tensor& cos, const Tensor& sin) {
  const int lanes = p.half / kVector<T>;
  return 2 * p.half == p.head_dim && p.half % kVector<T> == 0 && lanes >= 1 && lanes <= 32 &&
         (lanes & (lanes - 1)) == 0 && rows_aligned(cos) && rows_aligned(sin) &&
         is_aligned(p.q_norm) && is_aligned(p.k_norm);
}

}  // namespace

void qkv_rope_forward(const QkvRopeForward& args, Stream& stream) {
  const std::int64_t tokens = args.in.rows();
  if (tokens == 0) return;
  const cudaStream_t s = native(stream);
  visit_float(args.in.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    RopePointers<T> p = common_pointers<T>(args, tokens);
    p.in = pointer<T>(args.in);
    p.in_stride = args.in.row_stride;
    p.out = pointer<T>(args.out);
    p.out_stride = args.out.row_stride;
    p.rstd = args.rstd.defined() && args.q_norm.defined() ? pointer<Compute<T>>(args.rstd) : nullptr;
    p.copied = args.in.data == args.out.data ? 0 : static_cast<int>(args.layout.kv_cols());
    p.eps = static_cast<Compute<T>>(args.eps);
    const unsigned grid = grid_size(tokens);
    if (is_regular(p, args.cos, args.sin) && rows_aligned(args.in) && rows_aligned(args.out)) {
      const int threads = block_threads((p.heads_q + p.heads_kv) * (p.half / kVector<T>));
      if (p.q_norm != nullptr) {
        rope_forward_kernel<T, true><<<grid, threads, 0, s>>>(p);
      } else {
        rope_forward_kernel<T, false><<<grid, threads, 0, s>>>(p);
      }
    } else {
      rope_forward_any_kernel<T><<<grid, 32 * kAnyWarps, 0, s>>>(p);
    }
  });
  TESSERA_LAUNCHED();
}

void qkv_rope_backward(const QkvRopeBackward& args, Stream& stream) {
  const std::int64_t tokens = args.d.rows();
  const Capabilities& target = stream.context().capabilities();
  const std::int64_t parts = qk_norm_parts(tokens, target);
  const bool has_norm = args.q_norm.defined();
  const bool has_weight_gradient = args.dq_norm.defined();
  if (tokens == 0 && !has_weight_gradient) return;
  const auto scratch = stream.scratch().take(device_scratch(args, target));
  const cudaStream_t s = native(stream);
  visit_float(args.d.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    RopePointers<T> p = common_pointers<T>(args, tokens);
    p.out = pointer<T>(args.d);
    p.out_stride = args.d.row_stride;
    if (has_norm) {
      p.in = pointer<T>(args.in);
      p.in_stride = args.in.row_stride;
      p.rstd = pointer<Compute<T>>(args.rstd);
    }
    p.partial = has_weight_gradient ? static_cast<Compute<T>*>(scratch.data()) : nullptr;
    const unsigned grid = grid_size(has_norm ? parts : std::max<std::int64_t>(tokens, 1));
    const std::size_t sums = has_norm ? 2 * static_cast<std::size_t>(p.head_dim) * sizeof(Compute<T>) : 0;
    if (is_regular(p, args.cos, args.sin) && rows_aligned(args.d) && (!has_norm || rows_aligned(args.in))) {
      const int threads = block_threads((p.heads_q + p.heads_kv) * (p.half / kVector<T>));
      if (has_norm) {
        rope_backward_kernel<T, true><<<grid, threads, sums, s>>>(p);
      } else {
        rope_backward_kernel<T, false><<<grid, threads, 0, s>>>(p);
      }
    } else {
      rope_backward_any_kernel<T><<<grid, 32 * kAnyWarps, kAnyWarps * sums, s>>>(p);
    }
  });
  TESSERA_LAUNCHED();
  if (!has_weight_gradient) return;
  const std::int64_t head_dim = args.layout.head_dim;
  const std::size_t size = args.d.dtype == DType::kF64 ? 8 : 4;
  const char* partial = static_cast<const char*>(scratch.data());
  add_partial_sums(partial, parts, 2 * head_dim, head_dim, args.dq_norm, args.accumulate_dq_norm, stream);
  add_partial_sums(partial + static_cast<std::size_t>(head_dim) * size, parts, 2 * head_dim, head_dim, args.dk_norm,
                   args.accumulate_dk_norm, stream);
}

}  // namespace tessera::cuda
