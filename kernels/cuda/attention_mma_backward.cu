// The gradients of causal attention over packed documents on tensor cores (mma.sync, bf16),
// deterministic, with scratch of one number per query and head:
//   p = exp(scale q.k - lse), ds = p (dout.v - dout.out);  dv = p^T dout, dk = scale ds^T q, dq =
//   scale ds k.
// Bound by shared memory and tensor cores. Two kernels recompute p: one sums dk and dv by the block
// of their keys (over the query heads of the group, in order), the other dq by the block of its
// queries. No sum is shared between blocks, so no order is left open. Tiles are runs of rows and
// may span documents.
#include <algorithm>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/attention_operands.cuh"
#include "kernels/cuda/attention_paths.h"
#include "kernels/cuda/attention_ranges.cuh"
#include "kernels/cuda_workspace.h"

namespace tessera::cuda {
namespace {

using bf16_t = __nv_bfloat16;

using View = AttentionView;

struct Arguments {
  View q, k, v, out, dout, dq, dk, dv;
  const float* lse;  // [queries, heads_q]
  float* delta;      // [queries, heads_q]: dout . out
  const std::int32_t* cu_q;
  const std::int32_t* cu_k;
  int documents, heads_q, heads_kv, head_dim, window;
  int queries, keys;  // rows
  float scale;
};

// Queries (of the key kernel; keys of the other) that a warp multiplies at once.
constexpr int kStep = 32;

// ---- Instructions
// ----------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], const bf16_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&r)[4], const bf16_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// c[16, 8] += a[16, 16] b[16, 8].
__device__ __forceinline__ void multiply(float (&c)[4], const std::uint32_t (&a)[4],
                                         std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Tiles in shared memory
// ------------------------------------------------------------------------

// Rows are padded by 16 bytes: the eight rows that a matrix load touches then lie in different
// banks.
template <int kDim>
inline constexpr int kPitch = kDim + 8;

// tile[r] = row first + r of a head, zeros at or past row `end` and past head_dim. Rows behind the
// last visible one may be uninitialised and must not meet a weight of zero.
template <int kDim, int kRows, int kThreads>
__device__ __forceinline__ void load_tile(bf16_t* tile, const View& view, int first, int end,
                                          int head, int head_dim) {
  constexpr int kChunks = kDim / 8;
  static_assert(kRows * kChunks % kThreads == 0);
#pragma unroll
  for (int u = 0; u < kRows * kChunks / kThreads; ++u) {
    const int i = static_cast<int>(threadIdx.x) + u * kThreads;
    const int r = i / kChunks;
    const int d = i % kChunks * 8;
    const bool is_there = first + r < end && d < head_dim;
    const bf16_t* from =
        view.data + (is_there ? static_cast<std::int64_t>(first + r) * view.stride +
                                    static_cast<std::int64_t>(head) * head_dim + d
                              : 0);
    copy_async_16(shared_address(tile + r * kPitch<kDim> + d), from, is_there);
  }
}

// The operands of `multiply` out of a tile. a: rows [row, row + 16), columns [col, col + 16).
template <int kDim>
__device__ __forceinline__ void load_a(std::uint32_t (&a)[4], const bf16_t* tile, int row,
                                       int col) {
  const int lane = threadIdx.x % 32;
  load_matrices(a, tile + (row + lane % 16) * kPitch<kDim> + col + lane / 16 * 8);
}
// The transpose of rows [row, row + 16), columns [col, col + 16) as two b side by side: b[0], b[1]
// for the first eight rows, b[2], b[3] for the others.
template <int kDim>
__device__ __forceinline__ void load_b_of_rows(std::uint32_t (&b)[4], const bf16_t* tile, int row,
                                               int col) {
  const int lane = threadIdx.x % 32;
  load_matrices(b, tile + (row + lane % 8 + lane / 16 * 8) * kPitch<kDim> + col + lane / 8 % 2 * 8);
}
// Rows [row, row + 16), columns [col, col + 16) as two b: the first eight columns, the others.
template <int kDim>
__device__ __forceinline__ void load_b_of_columns(std::uint32_t (&b)[4], const bf16_t* tile,
                                                  int row, int col) {
  const int lane = threadIdx.x % 32;
  load_matrices_transposed(b, tile + (row + lane % 16) * kPitch<kDim> + col + lane / 16 * 8);
}

// sum[16, kDim] += weights[16, kStep] times rows [row, row + kStep) of the tile. The accumulators
// of a product are, rounded, the left operand of the next: columns 16 i to 16 i + 15 are w[2 i] and
// w[2 i + 1].
template <int kDim>
__device__ __forceinline__ void add_product(float (&sum)[kDim / 8][4],
                                            const float (&w)[kStep / 8][4], const bf16_t* tile,
                                            int row) {
#pragma unroll
  for (int i = 0; i < kStep / 16; ++i) {
    const std::uint32_t a[4] = {pack(w[2 * i][0], w[2 * i][1]), pack(w[2 * i][2], w[2 * i][3]),
                                pack(w[2 * i + 1][0], w[2 * i + 1][1]),
                                pack(w[2 * i + 1][2], w[2 * i + 1][3])};
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      std::uint32_t b[4];
      load_b_of_columns<kDim>(b, tile, row + 16 * i, 16 * n);
      multiply(sum[2 * n], a, b[0], b[1]);
      multiply(sum[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// Writes a warp's 16 rows, which are rows first, first + 1, ... of a head, through its rows of a
// tile that nobody else reads any more.
template <int kDim>
__device__ __forceinline__ void store_rows(const View& view, int first, int rows, int head,
                                           int head_dim, const float (&values)[kDim / 8][4],
                                           float factor, bf16_t* own) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    std::uint32_t* upper =
        reinterpret_cast<std::uint32_t*>(own + lane / 4 * kPitch<kDim> + 8 * n + lane % 4 * 2);
    std::uint32_t* lower = upper + 8 * kPitch<kDim> / 2;
    *upper = pack(values[n][0] * factor, values[n][1] * factor);
    *lower = pack(values[n][2] * factor, values[n][3] * factor);
  }
  __syncwarp();
  constexpr int kChunks = kDim / 8;
#pragma unroll
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int r = i / kChunks;
    const int d = i % kChunks * 8;
    if (first + r < rows && d < head_dim) {
      *reinterpret_cast<uint4*>(view.data + static_cast<std::int64_t>(first + r) * view.stride +
                                static_cast<std::int64_t>(head) * head_dim + d) =
          *reinterpret_cast<const uint4*>(own + r * kPitch<kDim> + d);
    }
  }
}

// kWarps warps own 16 rows each of a block's tile; the other side streams through two buffers of
// kLoop rows.
template <int kDim_, int kWarps_, int kLoop_>
struct Config {
  static constexpr int kDim = kDim_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kLoop = kLoop_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTile = 16 * kWarps;
};

template <typename K>
struct Shared {
  bf16_t own[2][K::kTile * kPitch<K::kDim>];      // keys and values; or queries and dout
  bf16_t loop[2][2][K::kLoop * kPitch<K::kDim>];  // two buffers of the other two
  float lse[2][K::kLoop];  // of the queries in the loop buffers, in powers of two
  float delta[2][K::kLoop];
  Range ranges[K::kTile];
};

// ---- dk, dv: grid of key tiles x key heads
// ---------------------------------------------------------

template <typename K>
__global__ void __launch_bounds__(K::kThreads, 1) backward_key_mma_kernel(Arguments a) {
  extern __shared__ __align__(16) char shared_bytes[];
  Shared<K>& shared = *reinterpret_cast<Shared<K>*>(shared_bytes);
  constexpr int kDim = K::kDim;
  const int first = blockIdx.x * K::kTile;
  const int kv_head = blockIdx.y;
  const int group = a.heads_q / a.heads_kv;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < K::kTile) shared.ranges[threadIdx.x] = queries_of_key(a, first + threadIdx.x);
  load_tile<kDim, K::kTile, K::kThreads>(shared.own[0], a.k, first, a.keys, kv_head, a.head_dim);
  load_tile<kDim, K::kTile, K::kThreads>(shared.own[1], a.v, first, a.keys, kv_head, a.head_dim);
  __syncthreads();
  const Range all = union_of(shared.ranges, K::kTile);
  const Range warp_all = union_of(shared.ranges + 16 * warp, 16);
  const Range warp_each = intersection_of(shared.ranges + 16 * warp, 16);
  const Range upper = shared.ranges[16 * warp + lane / 4];
  const Range lower = shared.ranges[16 * warp + lane / 4 + 8];
  const int tiles = (all.end - all.begin + K::kLoop - 1) / K::kLoop;
  const int steps = tiles * group;

  const auto load = [&](int step, int buffer) {
    const int head = kv_head * group + step / tiles;
    const int query = all.begin + step % tiles * K::kLoop;
    load_tile<kDim, K::kLoop, K::kThreads>(shared.loop[buffer][0], a.q, query, all.end, head,
                                           a.head_dim);
    load_tile<kDim, K::kLoop, K::kThreads>(shared.loop[buffer][1], a.dout, query, all.end, head,
                                           a.head_dim);
    if (threadIdx.x < K::kLoop) {
      const int row = query + static_cast<int>(threadIdx.x);
      const std::int64_t at = static_cast<std::int64_t>(row) * a.heads_q + head;
      shared.lse[buffer][threadIdx.x] = row < all.end ? a.lse[at] * kLog2E : 0.0f;
      shared.delta[buffer][threadIdx.x] = row < all.end ? a.delta[at] : 0.0f;
    }
    commit_copies();
  };

  float dk[kDim / 8][4] = {};
  float dv[kDim / 8][4] = {};
  const float factor = a.scale * kLog2E;
  if (steps > 0) load(0, 0);
  for (int step = 0; step < steps; ++step) {
    const int buffer = step % 2;
    if (step + 1 < steps) {
      load(step + 1, 1 - buffer);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    const bf16_t* q = shared.loop[buffer][0];
    const bf16_t* dout = shared.loop[buffer][1];
    const int query = all.begin + step % tiles * K::kLoop;
#pragma unroll 1
    for (int at = 0; at < K::kLoop; at += kStep) {
      if (query + at >= warp_all.end || query + at + kStep <= warp_all.begin) continue;
      // Keys are the rows, queries the columns: both results are left operands of the sums below.
      float s[kStep / 8][4] = {};
      float ds[kStep / 8][4] = {};
#pragma unroll
      for (int d = 0; d < kDim; d += 16) {
        std::uint32_t k[4], v[4];
        load_a<kDim>(k, shared.own[0], 16 * warp, d);
        load_a<kDim>(v, shared.own[1], 16 * warp, d);
#pragma unroll
        for (int n = 0; n < kStep / 16; ++n) {
          std::uint32_t b[4];
          load_b_of_rows<kDim>(b, q, at + 16 * n, d);
          multiply(s[2 * n], k, b[0], b[1]);
          multiply(s[2 * n + 1], k, b[2], b[3]);
          load_b_of_rows<kDim>(b, dout, at + 16 * n, d);
          multiply(ds[2 * n], v, b[0], b[1]);
          multiply(ds[2 * n + 1], v, b[2], b[3]);
        }
      }
      const bool is_whole = query + at >= warp_each.begin && query + at + kStep <= warp_each.end;
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n) {
        const int column = at + 8 * n + lane % 4 * 2;
        const float2 lse = *reinterpret_cast<const float2*>(&shared.lse[buffer][column]);
        const float2 delta = *reinterpret_cast<const float2*>(&shared.delta[buffer][column]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool is_odd = e % 2 == 1;
          const Range& range = e < 2 ? upper : lower;
          const int row = query + column + (is_odd ? 1 : 0);
          const bool is_seen = is_whole || (row >= range.begin && row < range.end);
          const float p = exp2_approximate(s[n][e] * factor - (is_odd ? lse.y : lse.x));
          // Unseen pairs may hold anything, NaN included: they must not be multiplied by zero.
          s[n][e] = is_seen ? p : 0.0f;
          ds[n][e] = is_seen ? p * (ds[n][e] - (is_odd ? delta.y : delta.x)) : 0.0f;
        }
      }
      add_product<kDim>(dv, s, dout, at);
      add_product<kDim>(dk, ds, q, at);
    }
    __syncthreads();
  }
  // A tile that no query sees has not waited for its loads yet.
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  const int own = 16 * warp;
  store_rows<kDim>(a.dk, first + own, a.keys, kv_head, a.head_dim, dk, a.scale,
                   shared.own[0] + own * kPitch<kDim>);
  store_rows<kDim>(a.dv, first + own, a.keys, kv_head, a.head_dim, dv, 1.0f,
                   shared.own[1] + own * kPitch<kDim>);
}

// ---- dq: grid of query tiles x query heads
// ---------------------------------------------------------

template <typename K>
__global__ void __launch_bounds__(K::kThreads, 1) backward_query_mma_kernel(Arguments a) {
  extern __shared__ __align__(16) char shared_bytes[];
  Shared<K>& shared = *reinterpret_cast<Shared<K>*>(shared_bytes);
  constexpr int kDim = K::kDim;
  // Late queries see the most keys: they start first.
  const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * K::kTile;
  const int head = blockIdx.y;
  const int kv_head = head / (a.heads_q / a.heads_kv);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < K::kTile) shared.ranges[threadIdx.x] = keys_of_query(a, first + threadIdx.x);
  load_tile<kDim, K::kTile, K::kThreads>(shared.own[0], a.q, first, a.queries, head, a.head_dim);
  load_tile<kDim, K::kTile, K::kThreads>(shared.own[1], a.dout, first, a.queries, head, a.head_dim);
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  const Range all = union_of(shared.ranges, K::kTile);
  const Range warp_all = union_of(shared.ranges + 16 * warp, 16);
  const Range warp_each = intersection_of(shared.ranges + 16 * warp, 16);
  const Range upper = shared.ranges[16 * warp + lane / 4];
  const Range lower = shared.ranges[16 * warp + lane / 4 + 8];
  const int tiles = (all.end - all.begin + K::kLoop - 1) / K::kLoop;

  std::uint32_t q[kDim / 16][4];
  std::uint32_t dout[kDim / 16][4];
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
    load_a<kDim>(q[d], shared.own[0], 16 * warp, 16 * d);
    load_a<kDim>(dout[d], shared.own[1], 16 * warp, 16 * d);
  }
  float lse[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Range& range = half == 0 ? upper : lower;
    const std::int64_t row = first + 16 * warp + lane / 4 + 8 * half;
    const bool is_there = range.begin < range.end;
    lse[half] = is_there ? a.lse[row * a.heads_q + head] * kLog2E : 0.0f;
    delta[half] = is_there ? a.delta[row * a.heads_q + head] : 0.0f;
  }

  const auto load = [&](int tile, int buffer) {
    const int key = all.begin + tile * K::kLoop;
    load_tile<kDim, K::kLoop, K::kThreads>(shared.loop[buffer][0], a.k, key, all.end, kv_head,
                                           a.head_dim);
    load_tile<kDim, K::kLoop, K::kThreads>(shared.loop[buffer][1], a.v, key, all.end, kv_head,
                                           a.head_dim);
    commit_copies();
  };

  float dq[kDim / 8][4] = {};
  const float factor = a.scale * kLog2E;
  if (tiles > 0) load(0, 0);
  for (int tile = 0; tile < tiles; ++tile) {
    const int buffer = tile % 2;
    if (tile + 1 < tiles) {
      load(tile + 1, 1 - buffer);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    const bf16_t* k = shared.loop[buffer][0];
    const bf16_t* v = shared.loop[buffer][1];
    const int key = all.begin + tile * K::kLoop;
#pragma unroll 1
    for (int at = 0; at < K::kLoop; at += kStep) {
      if (key + at >= warp_all.end || key + at + kStep <= warp_all.begin) continue;
      float s[kStep / 8][4] = {};
      float ds[kStep / 8][4] = {};
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
#pragma unroll
        for (int n = 0; n < kStep / 16; ++n) {
          std::uint32_t b[4];
          load_b_of_rows<kDim>(b, k, at + 16 * n, 16 * d);
          multiply(s[2 * n], q[d], b[0], b[1]);
          multiply(s[2 * n + 1], q[d], b[2], b[3]);
          load_b_of_rows<kDim>(b, v, at + 16 * n, 16 * d);
          multiply(ds[2 * n], dout[d], b[0], b[1]);
          multiply(ds[2 * n + 1], dout[d], b[2], b[3]);
        }
      }
      const bool is_whole = key + at >= warp_each.begin && key + at + kStep <= warp_each.end;
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Range& range = e < 2 ? upper : lower;
          const int column = key + at + 8 * n + lane % 4 * 2 + e % 2;
          const bool is_seen = is_whole || (column >= range.begin && column < range.end);
          const float p = exp2_approximate(s[n][e] * factor - lse[e / 2]);
          ds[n][e] = is_seen ? p * (ds[n][e] - delta[e / 2]) : 0.0f;
        }
      }
      add_product<kDim>(dq, ds, k, at);
    }
    __syncthreads();
  }
  // A tile that sees no key has only just read its queries.
  __syncthreads();
  const int own = 16 * warp;
  store_rows<kDim>(a.dq, first + own, a.queries, head, a.head_dim, dq, a.scale,
                   shared.own[0] + own * kPitch<kDim>);
}

// delta = dout . out; a warp per (row, head), a lane per eight columns.
__global__ void __launch_bounds__(256) delta_kernel(Arguments a) {
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (item >= static_cast<std::int64_t>(a.queries) * a.heads_q) return;
  const std::int64_t row = divide(item, a.heads_q);
  const int d = static_cast<int>(threadIdx.x % 32) * 8;
  const std::int64_t col = (item - row * a.heads_q) * a.head_dim + d;
  float sum = 0;
  if (d < a.head_dim) {
    float x[8], y[8];
    Access<bf16_t, 8>::read(a.dout.data + row * a.dout.stride + col, x);
    Access<bf16_t, 8>::read(a.out.data + row * a.out.stride + col, y);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += x[j] * y[j];
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) a.delta[item] = sum;
}

// ---- Host side
// -------------------------------------------------------------------------------------

template <typename K, typename Kernel>
void launch(Kernel kernel, int rows, int heads, const Arguments& a, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(Shared<K>));
  if (rows == 0) return;
  CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const dim3 grid(static_cast<unsigned>(ceil_div(rows, K::kTile)), static_cast<unsigned>(heads));
  kernel<<<grid, K::kThreads, kBytes, stream>>>(a);
  TESSERA_LAUNCHED();
}

template <typename K>
void launch_both(const Arguments& a, cudaStream_t stream) {
  launch<K>(backward_query_mma_kernel<K>, a.queries, a.heads_q, a, stream);
  launch<K>(backward_key_mma_kernel<K>, a.keys, a.heads_kv, a, stream);
}

}  // namespace

bool mma_attention_backward(const AttentionBackward& args, Stream& stream) {
  if (!mma_attention_applies(args, stream.context().capabilities())) return false;
  for (const Tensor* t :
       {&args.q, &args.k, &args.v, &args.out, &args.dout, &args.dq, &args.dk, &args.dv}) {
    if (!is_vector_aligned(*t)) return false;
  }
  CHECK(args.q.rows() < (std::int64_t{1} << 31) - 1024 &&
            args.k.rows() < (std::int64_t{1} << 31) - 1024,
        "[attention_backward] {} queries and {} keys, the CUDA kernels go up to 2^31",
        args.q.rows(), args.k.rows());
  Arguments a{};
  a.q = View(args.q);
  a.k = View(args.k);
  a.v = View(args.v);
  a.out = View(args.out);
  a.dout = View(args.dout);
  a.dq = View(args.dq);
  a.dk = View(args.dk);
  a.dv = View(args.dv);
  a.lse = pointer<float>(args.lse);
  a.cu_q = pointer<std::int32_t>(args.cu_q);
  a.cu_k = pointer<std::int32_t>(args.cu_k);
  a.documents = static_cast<int>(args.cu_q.numel() - 1);
  a.heads_q = static_cast<int>(args.shape.heads_q);
  a.heads_kv = static_cast<int>(args.shape.heads_kv);
  a.head_dim = static_cast<int>(args.shape.head_dim);
  a.window = static_cast<int>(std::min<std::int64_t>(args.shape.window, 0x3fffffff));
  a.queries = static_cast<int>(args.q.rows());
  a.keys = static_cast<int>(args.k.rows());
  a.scale = args.shape.scale;
  const std::int64_t items = static_cast<std::int64_t>(a.queries) * a.heads_q;
  const auto scratch = stream.scratch().take(static_cast<std::size_t>(items) * sizeof(float));
  a.delta = static_cast<float*>(scratch.data());
  const cudaStream_t s = native(stream);
  if (items > 0) {
    delta_kernel<<<grid_size(ceil_div(items, 8)), 256, 0, s>>>(a);
    TESSERA_LAUNCHED();
  }
  const std::size_t limit = as_cuda(stream).cuda_context().shared_memory_limit();
  if (a.head_dim <= 64) {
    using Large = Config<64, 8, 64>;
    if (sizeof(Shared<Large>) <= limit) {
      launch_both<Large>(a, s);
    } else {
      launch_both<Config<64, 4, 32>>(a, s);
    }
  } else {
    using Large = Config<128, 8, 64>;
    if (sizeof(Shared<Large>) <= limit) {
      launch_both<Large>(a, s);
    } else {
      launch_both<Config<128, 4, 32>>(a, s);
    }
  }
  return true;
}

}  // namespace tessera::cuda
