// Causal grouped-query attention over packed documents in tiles, without matrix units: for fp32 and
// fp64, for head sizes that the library kernels refuse, and as their reference. Bound by shared
// memory and fp32 arithmetic. A tile of queries is a run of rows and may span documents: each row
// carries the range of keys it sees, and key tiles cover the union. Deterministic: dq is summed by
// the block of its queries, dk and dv by the block of their keys.
#include "kernels/cuda/attention_paths.h"
#include "kernels/cuda/attention_ranges.cuh"
#include "kernels/cuda/common.cuh"
#include "kernels/ops.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads =
    256;  // 16 x 16: thread (ty, tx) works on rows ty + 16 i and columns tx + 16 j
constexpr int kSide = 16;
constexpr int kDecodeWarps = 4;

struct View {
  void* data;
  std::int64_t stride;
  DType dtype;
  View() = default;
  explicit View(const Tensor& t) : data(t.data), stride(t.row_stride), dtype(t.dtype) {}
};

struct Arguments {
  View q, k, v, out, dout, dq, dk, dv;
  void* lse;    // [Tq, heads_q] of the arithmetic type, or null
  void* delta;  // [Tq, heads_q]: dout . out
  const std::int32_t* cu_q;
  const std::int32_t* cu_k;
  int documents, heads_q, heads_kv, head_dim, window;
  int queries, keys;  // rows
  double scale;
};

// tile[i][d] = row first + i of head `head`, zero at or past row `rows` and past head_dim: what
// lies behind the last visible row may be uninitialised and must not meet a weight of zero.
template <typename C, int kTile, int kDim>
__device__ __forceinline__ void load_tile(const View& view, int first, int rows, int head,
                                          int head_dim, C (*tile)[kDim + 1]) {
  for (int i = threadIdx.x; i < kTile * kDim; i += kThreads) {
    const int r = i / kDim;
    const int d = i % kDim;
    const bool is_there = first + r < rows && d < head_dim;
    tile[r][d] = is_there ? load_any<C>(view.data, view.dtype,
                                        static_cast<std::int64_t>(first + r) * view.stride +
                                            static_cast<std::int64_t>(head) * head_dim + d)
                          : C(0);
  }
}

// result[i][j] = a[ty + 16 i] . b[tx + 16 j].
template <typename C, int kTile, int kDim>
__device__ __forceinline__ void multiply_rows(const C (*a)[kDim + 1], const C (*b)[kDim + 1],
                                              C (&result)[kTile / kSide][kTile / kSide]) {
  constexpr int M = kTile / kSide;
  const int ty = threadIdx.x / kSide;
  const int tx = threadIdx.x % kSide;
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int j = 0; j < M; ++j) result[i][j] = 0;
  }
#pragma unroll 4
  for (int d = 0; d < kDim; ++d) {
    C x[M], y[M];
#pragma unroll
    for (int i = 0; i < M; ++i) x[i] = a[ty + kSide * i][d];
#pragma unroll
    for (int j = 0; j < M; ++j) y[j] = b[tx + kSide * j][d];
#pragma unroll
    for (int i = 0; i < M; ++i) {
#pragma unroll
      for (int j = 0; j < M; ++j) result[i][j] += x[i] * y[j];
    }
  }
}

// sum[i][j] += sum over r of weights[ty + 16 i][r] x[r][tx + 16 j] (kTransposed: weights[r][ty + 16
// i]).
template <typename C, int kTile, int kDim, bool kTransposed>
__device__ __forceinline__ void add_weighted(const C (*weights)[kTile + 1], const C (*x)[kDim + 1],
                                             C (&sum)[kTile / kSide][kDim / kSide]) {
  constexpr int M = kTile / kSide;
  const int ty = threadIdx.x / kSide;
  const int tx = threadIdx.x % kSide;
#pragma unroll 2
  for (int r = 0; r < kTile; ++r) {
    C w[M];
#pragma unroll
    for (int i = 0; i < M; ++i)
      w[i] = kTransposed ? weights[r][ty + kSide * i] : weights[ty + kSide * i][r];
#pragma unroll
    for (int j = 0; j < kDim / kSide; ++j) {
      const C value = x[r][tx + kSide * j];
#pragma unroll
      for (int i = 0; i < M; ++i) sum[i][j] += w[i] * value;
    }
  }
}

template <typename C, int kTile, int kDim>
__device__ __forceinline__ void store_tile(const View& view, int first, int rows, int head,
                                           int head_dim,
                                           const C (&values)[kTile / kSide][kDim / kSide]) {
  const int ty = threadIdx.x / kSide;
  const int tx = threadIdx.x % kSide;
#pragma unroll
  for (int i = 0; i < kTile / kSide; ++i) {
    const int row = first + ty + kSide * i;
    if (row >= rows) continue;
#pragma unroll
    for (int j = 0; j < kDim / kSide; ++j) {
      const int d = tx + kSide * j;
      if (d >= head_dim) continue;
      store_any<C>(view.data, view.dtype,
                   static_cast<std::int64_t>(row) * view.stride +
                       static_cast<std::int64_t>(head) * head_dim + d,
                   values[i][j]);
    }
  }
}

template <typename C, int kTile, int kDim>
struct ForwardShared {
  C q[kTile][kDim + 1];
  C kv[kTile][kDim + 1];
  C scores[kTile][kTile + 1];
  C rescale[kTile];
  C total[kTile];
  Range ranges[kTile];
};

// Grid: query tiles x query heads.
template <typename C, int kTile, int kDim>
__global__ void __launch_bounds__(kThreads) forward_kernel(Arguments a) {
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardShared<C, kTile, kDim>*>(shared_bytes);
  constexpr int M = kTile / kSide;
  constexpr int kLanes = kThreads / kTile;  // threads that share a row of the softmax
  const int first = blockIdx.x * kTile;
  const int head = blockIdx.y;
  const int kv_head = head / (a.heads_q / a.heads_kv);
  const int ty = threadIdx.x / kSide;
  const int tx = threadIdx.x % kSide;
  if (threadIdx.x < kTile) shared.ranges[threadIdx.x] = keys_of_query(a, first + threadIdx.x);
  load_tile<C, kTile, kDim>(a.q, first, a.queries, head, a.head_dim, shared.q);
  __syncthreads();
  const Range all = union_of(shared.ranges, kTile);
  C out[M][kDim / kSide] = {};
  const int soft_row = threadIdx.x / kLanes;
  const int soft_lane = threadIdx.x % kLanes;
  C maximum = minus_infinity<C>();
  C total = 0;
  for (int key = all.begin; key < all.end; key += kTile) {
    load_tile<C, kTile, kDim>(a.k, key, all.end, kv_head, a.head_dim, shared.kv);
    __syncthreads();
    C s[M][M];
    multiply_rows<C, kTile, kDim>(shared.q, shared.kv, s);
#pragma unroll
    for (int i = 0; i < M; ++i) {
      const Range range = shared.ranges[ty + kSide * i];
#pragma unroll
      for (int j = 0; j < M; ++j) {
        const int column = key + tx + kSide * j;
        const bool is_seen = column >= range.begin && column < range.end;
        shared.scores[ty + kSide * i][tx + kSide * j] =
            is_seen ? s[i][j] * static_cast<C>(a.scale) : minus_infinity<C>();
      }
    }
    __syncthreads();
    load_tile<C, kTile, kDim>(a.v, key, all.end, kv_head, a.head_dim, shared.kv);
    C best = maximum;
    for (int c = soft_lane; c < kTile; c += kLanes) best = max(best, shared.scores[soft_row][c]);
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      best = max(best, __shfl_xor_sync(0xffffffffu, best, offset));
    }
    const C shift = best == minus_infinity<C>() ? C(0) : best;
    C sum = 0;
    for (int c = soft_lane; c < kTile; c += kLanes) {
      const C p = exp(shared.scores[soft_row][c] - shift);
      shared.scores[soft_row][c] = p;
      sum += p;
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const C rescale = exp(maximum - shift);
    total = total * rescale + sum;
    maximum = best;
    if (soft_lane == 0) shared.rescale[soft_row] = rescale;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < M; ++i) {
      const C factor = shared.rescale[ty + kSide * i];
#pragma unroll
      for (int j = 0; j < kDim / kSide; ++j) out[i][j] *= factor;
    }
    add_weighted<C, kTile, kDim, false>(shared.scores, shared.kv, out);
    __syncthreads();
  }
  if (soft_lane == 0) {
    shared.total[soft_row] = total > C(0) ? C(1) / total : C(0);
    const int row = first + soft_row;
    if (a.lse != nullptr && row < a.queries && total > C(0)) {
      static_cast<C*>(a.lse)[static_cast<std::int64_t>(row) * a.heads_q + head] =
          maximum + log(total);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int j = 0; j < kDim / kSide; ++j) out[i][j] *= shared.total[ty + kSide * i];
  }
  store_tile<C, kTile, kDim>(a.out, first, a.queries, head, a.head_dim, out);
}

template <typename C, int kTile, int kDim>
struct BackwardShared {
  C q[kTile][kDim + 1];
  C dout[kTile][kDim + 1];
  C k[kTile][kDim + 1];
  C v[kTile][kDim + 1];
  C p[kTile][kTile + 1];
  C ds[kTile][kTile + 1];
  C lse[kTile];
  C delta[kTile];
  Range ranges[kTile];
};

template <typename C, int kTile>
__device__ __forceinline__ void load_row_values(const Arguments& a, int first, int head, C* lse,
                                                C* delta) {
  if (threadIdx.x >= kTile) return;
  const int row = first + threadIdx.x;
  const std::int64_t at = static_cast<std::int64_t>(row) * a.heads_q + head;
  // Rows past the last document have no lse: nothing sees them, but what is read must be finite.
  const bool is_there = row < a.queries && row < a.cu_q[a.documents];
  lse[threadIdx.x] = is_there ? static_cast<const C*>(a.lse)[at] : C(0);
  delta[threadIdx.x] = is_there ? static_cast<const C*>(a.delta)[at] : C(0);
}

// p and ds of (query row ty + 16 i, key column tx + 16 j) into shared memory; `ranges` are of the
// queries (kRangesOfKeys: of the keys, holding query rows).
template <typename C, int kTile, int kDim, bool kRangesOfKeys>
__device__ __forceinline__ void score_gradients(const Arguments& a,
                                                BackwardShared<C, kTile, kDim>& shared, int query,
                                                int key) {
  constexpr int M = kTile / kSide;
  const int ty = threadIdx.x / kSide;
  const int tx = threadIdx.x % kSide;
  C s[M][M], dp[M][M];
  multiply_rows<C, kTile, kDim>(shared.q, shared.k, s);
  multiply_rows<C, kTile, kDim>(shared.dout, shared.v, dp);
#pragma unroll
  for (int i = 0; i < M; ++i) {
    const int r = ty + kSide * i;
#pragma unroll
    for (int j = 0; j < M; ++j) {
      const int c = tx + kSide * j;
      const Range range = shared.ranges[kRangesOfKeys ? c : r];
      const int at = kRangesOfKeys ? query + r : key + c;
      const bool is_seen = at >= range.begin && at < range.end;
      const C p = is_seen ? exp(s[i][j] * static_cast<C>(a.scale) - shared.lse[r]) : C(0);
      if constexpr (kRangesOfKeys) shared.p[r][c] = p;
      // Unseen pairs may hold anything, NaN included: they must not be multiplied by zero.
      shared.ds[r][c] = is_seen ? p * (dp[i][j] - shared.delta[r]) * static_cast<C>(a.scale) : C(0);
    }
  }
}

// Grid: query tiles x query heads.
template <typename C, int kTile, int kDim>
__global__ void __launch_bounds__(kThreads) backward_query_kernel(Arguments a) {
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<C, kTile, kDim>*>(shared_bytes);
  const int first = blockIdx.x * kTile;
  const int head = blockIdx.y;
  const int kv_head = head / (a.heads_q / a.heads_kv);
  if (threadIdx.x < kTile) shared.ranges[threadIdx.x] = keys_of_query(a, first + threadIdx.x);
  load_row_values<C, kTile>(a, first, head, shared.lse, shared.delta);
  load_tile<C, kTile, kDim>(a.q, first, a.queries, head, a.head_dim, shared.q);
  load_tile<C, kTile, kDim>(a.dout, first, a.queries, head, a.head_dim, shared.dout);
  __syncthreads();
  const Range all = union_of(shared.ranges, kTile);
  C dq[kTile / kSide][kDim / kSide] = {};
  for (int key = all.begin; key < all.end; key += kTile) {
    load_tile<C, kTile, kDim>(a.k, key, all.end, kv_head, a.head_dim, shared.k);
    load_tile<C, kTile, kDim>(a.v, key, all.end, kv_head, a.head_dim, shared.v);
    __syncthreads();
    score_gradients<C, kTile, kDim, false>(a, shared, first, key);
    __syncthreads();
    add_weighted<C, kTile, kDim, false>(shared.ds, shared.k, dq);
    __syncthreads();
  }
  store_tile<C, kTile, kDim>(a.dq, first, a.queries, head, a.head_dim, dq);
}

// Grid: key tiles x key heads; the query heads of the group are added in order.
template <typename C, int kTile, int kDim>
__global__ void __launch_bounds__(kThreads) backward_key_kernel(Arguments a) {
  extern __shared__ __align__(16) char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<C, kTile, kDim>*>(shared_bytes);
  const int first = blockIdx.x * kTile;
  const int kv_head = blockIdx.y;
  const int group = a.heads_q / a.heads_kv;
  if (threadIdx.x < kTile) shared.ranges[threadIdx.x] = queries_of_key(a, first + threadIdx.x);
  load_tile<C, kTile, kDim>(a.k, first, a.keys, kv_head, a.head_dim, shared.k);
  load_tile<C, kTile, kDim>(a.v, first, a.keys, kv_head, a.head_dim, shared.v);
  __syncthreads();
  const Range all = union_of(shared.ranges, kTile);
  C dk[kTile / kSide][kDim / kSide] = {};
  C dv[kTile / kSide][kDim / kSide] = {};
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (int query = all.begin; query < all.end; query += kTile) {
      load_tile<C, kTile, kDim>(a.q, query, all.end, head, a.head_dim, shared.q);
      load_tile<C, kTile, kDim>(a.dout, query, all.end, head, a.head_dim, shared.dout);
      load_row_values<C, kTile>(a, query, head, shared.lse, shared.delta);
      __syncthreads();
      score_gradients<C, kTile, kDim, true>(a, shared, query, first);
      __syncthreads();
      add_weighted<C, kTile, kDim, true>(shared.p, shared.dout, dv);
      add_weighted<C, kTile, kDim, true>(shared.ds, shared.q, dk);
      __syncthreads();
    }
  }
  store_tile<C, kTile, kDim>(a.dk, first, a.keys, kv_head, a.head_dim, dk);
  store_tile<C, kTile, kDim>(a.dv, first, a.keys, kv_head, a.head_dim, dv);
}

// delta = dout . out; a warp per (row, head).
template <typename C>
__global__ void __launch_bounds__(kThreads) delta_kernel(Arguments a) {
  const std::int64_t item =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (item >= static_cast<std::int64_t>(a.queries) * a.heads_q) return;
  const std::int64_t row = divide(item, a.heads_q);
  const std::int64_t col = (item - row * a.heads_q) * a.head_dim;
  C sum = 0;
  for (int d = threadIdx.x % 32; d < a.head_dim; d += 32) {
    sum += load_any<C>(a.dout.data, a.dout.dtype, row * a.dout.stride + col + d) *
           load_any<C>(a.out.data, a.out.dtype, row * a.out.stride + col + d);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) static_cast<C*>(a.delta)[item] = sum;
}

// One query per block and head: decoding. Warps take every fourth key; a lane holds head_dim / 32
// columns.
template <typename C>
__global__ void __launch_bounds__(32 * kDecodeWarps) decode_kernel(Arguments a) {
  constexpr int kColumns = 8;
  __shared__ C maxima[kDecodeWarps];
  __shared__ C totals[kDecodeWarps];
  __shared__ C sums[kDecodeWarps][32 * kColumns];
  const int row = blockIdx.x;
  const int head = blockIdx.y;
  const int kv_head = head / (a.heads_q / a.heads_kv);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const Range range = keys_of_query(a, row);
  const std::int64_t q_at = row * a.q.stride + static_cast<std::int64_t>(head) * a.head_dim;
  C q[kColumns], out[kColumns] = {};
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int d = lane + 32 * i;
    q[i] = d < a.head_dim ? load_any<C>(a.q.data, a.q.dtype, q_at + d) * static_cast<C>(a.scale)
                          : C(0);
  }
  C maximum = minus_infinity<C>();
  C total = 0;
  for (int key = range.begin + warp; key < range.end; key += kDecodeWarps) {
    const std::int64_t k_at = key * a.k.stride + static_cast<std::int64_t>(kv_head) * a.head_dim;
    const std::int64_t v_at = key * a.v.stride + static_cast<std::int64_t>(kv_head) * a.head_dim;
    C score = 0;
    C value[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int d = lane + 32 * i;
      value[i] = 0;
      if (d < a.head_dim) {
        score += q[i] * load_any<C>(a.k.data, a.k.dtype, k_at + d);
        value[i] = load_any<C>(a.v.data, a.v.dtype, v_at + d);
      }
    }
    score = warp_sum(score);
    const C best = max(maximum, score);
    const C rescale = exp(maximum - best);
    const C p = exp(score - best);
    total = total * rescale + p;
    maximum = best;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out[i] = out[i] * rescale + p * value[i];
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sums[warp][lane + 32 * i] = out[i];
  if (lane == 0) {
    maxima[warp] = maximum;
    totals[warp] = total;
  }
  __syncthreads();
  C best = minus_infinity<C>();
  for (int w = 0; w < kDecodeWarps; ++w) best = max(best, maxima[w]);
  const C shift = best == minus_infinity<C>() ? C(0) : best;
  C all = 0;
  C factors[kDecodeWarps];
#pragma unroll
  for (int w = 0; w < kDecodeWarps; ++w) {
    factors[w] = exp(maxima[w] - shift);
    all += totals[w] * factors[w];
  }
  for (int d = threadIdx.x; d < a.head_dim; d += 32 * kDecodeWarps) {
    C value = 0;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) value += sums[w][d] * factors[w];
    store_any<C>(a.out.data, a.out.dtype,
                 row * a.out.stride + static_cast<std::int64_t>(head) * a.head_dim + d,
                 all > C(0) ? value / all : C(0));
  }
  if (threadIdx.x == 0 && a.lse != nullptr && all > C(0)) {
    static_cast<C*>(a.lse)[static_cast<std::int64_t>(row) * a.heads_q + head] = best + log(all);
  }
}

template <typename C_, int kTile_, int kDim_>
struct Config {
  using C = C_;
  static constexpr int kTile = kTile_;
  static constexpr int kDim = kDim_;
};

// Calls launch(Config) with the largest tile whose shared memory (of the backward) the GPU has.
template <typename Launch>
void choose_config(DType dtype, int head_dim, std::size_t shared_limit, Launch&& launch) {
  const auto fits = [shared_limit](auto config) {
    using K = decltype(config);
    return sizeof(BackwardShared<typename K::C, K::kTile, K::kDim>) <= shared_limit;
  };
  if (dtype == DType::kF64) return launch(Config<double, 16, 256>{});
  if (head_dim <= 64) return launch(Config<float, 64, 64>{});
  if (head_dim <= 128 && fits(Config<float, 64, 128>{})) return launch(Config<float, 64, 128>{});
  if (head_dim <= 128) return launch(Config<float, 32, 128>{});
  launch(Config<float, 32, 256>{});
}

template <typename Kernel>
void launch_tiles(Kernel kernel, std::size_t shared_bytes, int tiles, int heads, const Arguments& a,
                  cudaStream_t stream) {
  CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared_bytes)));
  kernel<<<dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(heads)), kThreads, shared_bytes,
           stream>>>(a);
  TESSERA_LAUNCHED();
}

template <typename Args>
Arguments common_arguments(const Args& args) {
  CHECK(args.shape.head_dim <= 256, "[attention] head_dim is {}, the CUDA kernels go up to 256",
        args.shape.head_dim);
  CHECK(args.q.rows() < (std::int64_t{1} << 31) - 1024 &&
            args.k.rows() < (std::int64_t{1} << 31) - 1024,
        "[attention] {} queries and {} keys, the CUDA kernels go up to 2^31", args.q.rows(),
        args.k.rows());
  Arguments a{};
  a.q = View(args.q);
  a.k = View(args.k);
  a.v = View(args.v);
  a.out = View(args.out);
  a.lse = args.lse.defined() ? args.lse.data : nullptr;
  a.cu_q = pointer<std::int32_t>(args.cu_q);
  a.cu_k = pointer<std::int32_t>(args.cu_k);
  a.documents = static_cast<int>(args.cu_q.numel() - 1);
  a.heads_q = static_cast<int>(args.shape.heads_q);
  a.heads_kv = static_cast<int>(args.shape.heads_kv);
  a.head_dim = static_cast<int>(args.shape.head_dim);
  a.window = static_cast<int>(std::min<std::int64_t>(args.shape.window, 0x3fffffff));
  a.queries = static_cast<int>(args.q.rows());
  a.keys = static_cast<int>(args.k.rows());
  a.scale = static_cast<double>(args.shape.scale);
  return a;
}

int tiles_of(int rows, int tile) { return (rows + tile - 1) / tile; }

// ---- Document bounds for the library kernels
// -------------------------------------------------------

__global__ void document_offsets_kernel(DocumentOffsets o) {
  for (std::int64_t d = threadIdx.x; d <= o.documents; d += blockDim.x) {
    if (d < o.documents) {
      o.length_q[d] = o.cu_q[d + 1] - o.cu_q[d];
      o.length_k[d] = o.cu_k[d + 1] - o.cu_k[d];
    }
    for (int i = 0; i < o.count; ++i) {
      const std::int32_t begin = o.arrays[i].of_keys ? o.cu_k[d] : o.cu_q[d];
      o.arrays[i].offsets[d] = begin * o.arrays[i].stride;
    }
  }
}

struct Rows {
  std::uint8_t* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t stride_bytes = 0;
  std::int64_t row_bytes = 0;
};
constexpr int kMaxTails = 3;
struct Tails {
  Rows of[kMaxTails];
};

// Blocks take every gridDim.x-th row from the end on: usually there is none, and few blocks say so sooner than
// a block for each row.
__global__ void zero_rows_past_end_kernel(const std::int32_t* cu, std::int64_t documents, Tails tails) {
  const Rows& t = tails.of[blockIdx.y];
  for (std::int64_t r = cu[documents] + static_cast<std::int64_t>(blockIdx.x); r < t.rows; r += gridDim.x) {
    std::uint8_t* row = t.data + r * t.stride_bytes;
    for (std::int64_t i = threadIdx.x; i < t.row_bytes; i += blockDim.x) row[i] = 0;
  }
}

}  // namespace

void plain_attention_forward(const AttentionForward& args, Stream& stream) {
  if (args.q.numel() == 0) return;
  const Arguments a = common_arguments(args);
  const cudaStream_t s = native(stream);
  if (a.queries <= a.documents) {
    const dim3 grid(static_cast<unsigned>(a.queries), static_cast<unsigned>(a.heads_q));
    if (args.q.dtype == DType::kF64) {
      decode_kernel<double><<<grid, 32 * kDecodeWarps, 0, s>>>(a);
    } else {
      decode_kernel<float><<<grid, 32 * kDecodeWarps, 0, s>>>(a);
    }
    TESSERA_LAUNCHED();
    return;
  }
  const std::size_t limit = as_cuda(stream).cuda_context().shared_memory_limit();
  choose_config(args.q.dtype, a.head_dim, limit, [&](auto config) {
    using K = decltype(config);
    launch_tiles(forward_kernel<typename K::C, K::kTile, K::kDim>,
                 sizeof(ForwardShared<typename K::C, K::kTile, K::kDim>),
                 tiles_of(a.queries, K::kTile), a.heads_q, a, s);
  });
}

void plain_attention_backward(const AttentionBackward& args, Stream& stream) {
  Arguments a = common_arguments(args);
  a.dout = View(args.dout);
  a.dq = View(args.dq);
  a.dk = View(args.dk);
  a.dv = View(args.dv);
  const std::int64_t items = static_cast<std::int64_t>(a.queries) * a.heads_q;
  const std::size_t size = args.q.dtype == DType::kF64 ? 8 : 4;
  const auto scratch = stream.scratch().take(static_cast<std::size_t>(items) * size);
  a.delta = scratch.data();
  const cudaStream_t s = native(stream);
  if (items > 0) {
    const unsigned grid = grid_size(ceil_div(items, kThreads / 32));
    if (args.q.dtype == DType::kF64) {
      delta_kernel<double><<<grid, kThreads, 0, s>>>(a);
    } else {
      delta_kernel<float><<<grid, kThreads, 0, s>>>(a);
    }
    TESSERA_LAUNCHED();
  }
  const std::size_t limit = as_cuda(stream).cuda_context().shared_memory_limit();
  choose_config(args.q.dtype, a.head_dim, limit, [&](auto config) {
    using K = decltype(config);
    constexpr std::size_t shared = sizeof(BackwardShared<typename K::C, K::kTile, K::kDim>);
    if (a.queries > 0) {
      launch_tiles(backward_query_kernel<typename K::C, K::kTile, K::kDim>, shared,
                   tiles_of(a.queries, K::kTile), a.heads_q, a, s);
    }
    if (a.keys > 0) {
      launch_tiles(backward_key_kernel<typename K::C, K::kTile, K::kDim>, shared,
                   tiles_of(a.keys, K::kTile), a.heads_kv, a, s);
    }
  });
}

void fill_document_offsets(const DocumentOffsets& offsets, Stream& stream) {
  const cudaStream_t s = native(stream);
  const int threads =
      static_cast<int>(std::min<std::int64_t>(1024, ceil_div(offsets.documents + 1, 32) * 32));
  document_offsets_kernel<<<1, threads, 0, s>>>(offsets);
  TESSERA_LAUNCHED();
}

void zero_rows_past_end(const Tensor& cu, std::initializer_list<Tensor> tensors, Stream& stream) {
  CHECK(tensors.size() <= kMaxTails, "[zero_rows_past_end] {} tensors, at most {}", tensors.size(), kMaxTails);
  Tails tails;
  unsigned count = 0;
  for (const Tensor& t : tensors) {
    if (t.numel() == 0) continue;
    const auto size = static_cast<std::int64_t>(size_of(t.dtype));
    tails.of[count++] = {pointer<std::uint8_t>(t), t.rows(), t.row_stride * size, t.cols() * size};
  }
  if (count == 0) return;
  zero_rows_past_end_kernel<<<dim3(64, count), 64, 0, native(stream)>>>(pointer<std::int32_t>(cu), cu.numel() - 1,
                                                                       tails);
  TESSERA_LAUNCHED();
}

}  // namespace tessera::cuda
