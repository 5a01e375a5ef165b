// The gradients of causal attention over packed documents on Hopper's tensor cores (wgmma, bf16),
// deterministic, with scratch of two numbers per query and head:
//   p = exp(scale q.k - lse), ds = p (dout.v - dout.out);  dv = p^T dout, dk = scale ds^T q, dq =
//   scale ds k.
// Bound by tensor cores. Two kernels recompute p: one sums dk and dv by the block of their keys
// (over the query heads of the group, in order), the other dq by the block of its queries. No sum
// is shared between blocks, so no order is left open. That costs seven products for the five of a
// kernel with atomic sums, and saves the gradient of the scores in memory.
//
// A block has three warpgroups: one copies tiles of the other side into a ring of stages, two
// multiply 64 own rows each. Weights go from the accumulators of one product to the operands of the
// next in registers. Tiles are runs of rows and may span documents.
#include <algorithm>

#include "kernels/cuda/attention_operands.cuh"
#include "kernels/cuda/attention_paths.h"
#include "kernels/cuda/attention_ranges.cuh"
#include "kernels/cuda/wgmma.cuh"
#include "kernels/cuda_workspace.h"

namespace tessera::cuda {
namespace {

using bf16_t = __nv_bfloat16;

using View = AttentionView;

struct Arguments {
  View q, k, v, out, dout, dq, dk, dv;
  const float* lse;    // [queries, heads_q]
  float* lse_by_head;  // [heads_q, queries], in powers of two
  float* delta;        // [heads_q, queries]: dout . out
  const std::int32_t* cu_q;
  const std::int32_t* cu_k;
  int documents, heads_q, heads_kv, head_dim, window;
  int queries, keys;  // rows
  int row_tiles;      // tiles of a document of the largest length
  float scale;
};

constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kOwnRows = 128;  // of a block; 64 of a multiplying warpgroup
// Blocks of this many (row of documents, head) pairs share what they stream in the L2 cache.
constexpr int kPairsTogether = 16;

template <int kDim_>
struct Config {
  static constexpr int kDim = kDim_;
  static constexpr int kLoop = kDim == 64 ? 128 : 64;  // rows of a streamed tile: what registers hold
  static constexpr int kStages = 4;                    // streamed tiles in shared memory
};

template <typename K>
struct Shared {
  alignas(1024) bf16_t own[2][kOwnRows * K::kDim];               // keys and values; or queries and dout
  alignas(1024) bf16_t loop[K::kStages][2][K::kLoop * K::kDim];  // the other two
  alignas(16) float lse[K::kStages][K::kLoop];                   // of streamed queries
  alignas(16) float delta[K::kStages][K::kLoop];
  Range ranges[kOwnRows];
  Range unions[kOwnRows / 32];
  Range intersections[kOwnRows / 32];
  std::uint64_t own_full;
  std::uint64_t full[K::kStages];
  std::uint64_t empty[K::kStages];
};

// ---- Work of a block
// -------------------------------------------------------------------------------

struct Work {
  int tile;  // first own row / kOwnRows
  int head;
};

// Blocks start in order of their number: those with the most work first, a few pairs at a time.
// `is_late_heavy`: the last tile of a document has the most work.
__device__ __forceinline__ Work work_of_block(int block, int tiles, int row_tiles, int heads, bool is_late_heavy) {
  const int rows = (tiles + row_tiles - 1) / row_tiles;
  const int pairs = rows * heads;
  const int group = block / (kPairsTogether * row_tiles);
  const int in_group = block - group * kPairsTogether * row_tiles;
  const int group_pairs = min(kPairsTogether, pairs - group * kPairsTogether);
  const int place = in_group / group_pairs;
  const int pair = group * kPairsTogether + in_group - place * group_pairs;
  const int row = pair / heads;
  return {row * row_tiles + (is_late_heavy ? row_tiles - 1 - place : place), pair - row * heads};
}

#if TESSERA_HAS_WGMMA

// Ranges of the own rows, of each warp of them and of all, by the first kOwnRows threads.
template <typename K, typename RangeOf>
__device__ __forceinline__ void find_ranges(Shared<K>& shared, RangeOf&& range_of) {
  if (threadIdx.x >= kOwnRows) return;
  const Range own = range_of(static_cast<int>(threadIdx.x));
  shared.ranges[threadIdx.x] = own;
  const bool is_empty = own.begin >= own.end;
  Range all{is_empty ? 0x7fffffff : own.begin, is_empty ? 0 : own.end};
  Range each = own;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    all.begin = min(all.begin, __shfl_xor_sync(0xffffffffu, all.begin, distance));
    all.end = max(all.end, __shfl_xor_sync(0xffffffffu, all.end, distance));
    each.begin = max(each.begin, __shfl_xor_sync(0xffffffffu, each.begin, distance));
    each.end = min(each.end, __shfl_xor_sync(0xffffffffu, each.end, distance));
  }
  if (threadIdx.x % 32 == 0) {
    shared.unions[threadIdx.x / 32] = all;
    shared.intersections[threadIdx.x / 32] = each;
  }
}

// A value that all threads of a warp agree on. The compiler keeps products under way across branches
// on it.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Union of `count` warps' ranges; {0, 0} when nothing is seen.
__device__ __forceinline__ Range union_of_warps(const Range* ranges, int count) {
  Range all = ranges[0];
  for (int i = 1; i < count; ++i) all = {min(all.begin, ranges[i].begin), max(all.end, ranges[i].end)};
  if (all.end == 0) all.begin = 0;
  return {uniform(all.begin), uniform(all.end)};
}

// Copies rows first, first + 1, ... of a head into panels, zeros at or past row `end`. By one
// warpgroup.
template <int kDim, int kRows>
__device__ __forceinline__ void copy_tile(bf16_t* tile, const View& view, int first, int end, int head) {
  constexpr int kChunks = kDim / 8;
  constexpr int kStep = kWarpgroup / kChunks;  // rows between two chunks of a thread
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int row = thread / kChunks;
  const int chunk = thread % kChunks;
  std::uint32_t to = shared_address(tile) + (chunk / 8) * kRows * kPanelRowBytes;
  const bf16_t* from = view.data + static_cast<std::int64_t>(first + row) * view.stride +
                       static_cast<std::int64_t>(head) * kDim + chunk * 8;
#pragma unroll
  for (int r = 0; r < kRows; r += kStep) {
    // kStep divides 8, or is a multiple of it.
    copy_async_16(to + panel_offset(row + r, chunk % 8), from, first + row + r < end);
    from += kStep * view.stride;
  }
}

// d = a b^T: 64 rows from `a_row` on of an own tile, all rows of a streamed one.
template <typename K>
__device__ __forceinline__ void multiply_rows(float (&d)[K::kLoop / 2], const bf16_t* a, int a_row, const bf16_t* b) {
  const std::uint32_t a_start = shared_address(a) + a_row * kPanelRowBytes;
  const std::uint32_t b_start = shared_address(b);
#pragma unroll
  for (int c = 0; c < K::kDim; c += 16) {
    const int panel = c / kPanelColumns;
    const std::uint32_t in_panel = c % kPanelColumns * 2;
    const std::uint64_t a_part = panel_descriptor(a_start + panel * kOwnRows * kPanelRowBytes + in_panel, 0);
    const std::uint64_t b_part = panel_descriptor(b_start + panel * K::kLoop * kPanelRowBytes + in_panel, 0);
    if (c == 0) {
      wgmma_shared<false>(d, a_part, b_part);
    } else {
      wgmma_shared<true>(d, a_part, b_part);
    }
  }
}

// Rounds accumulators to the left operands of the sums: the same threads hold the same elements.
template <typename K>
__device__ __forceinline__ void pack_weights(std::uint32_t (&w)[K::kLoop / 16][4], const float (&d)[K::kLoop / 2]) {
#pragma unroll
  for (int i = 0; i < K::kLoop / 16; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) w[i][j] = pack(d[8 * i + 2 * j], d[8 * i + 2 * j + 1]);
  }
}

// d += w b: weights of 64 rows in registers, as packed accumulators, and a streamed tile.
template <typename K>
__device__ __forceinline__ void add_weighted(float (&d)[K::kDim / 2], const std::uint32_t (&w)[K::kLoop / 16][4],
                                             const bf16_t* b) {
  const std::uint32_t start = shared_address(b);
#pragma unroll
  for (int i = 0; i < K::kLoop / 16; ++i) {
    wgmma_registers(d, w[i], panel_descriptor(start + i * 16 * kPanelRowBytes, K::kLoop * kPanelRowBytes));
  }
}

// Writes a warp's 16 rows, first to first + 15 of a head, by way of the rows `in_tile` on of an own
// tile.
template <int kDim>
__device__ __forceinline__ void store_rows(const View& view, int first, int rows, int head,
                                           const float (&values)[kDim / 2], float factor, bf16_t* tile, int in_tile) {
  const int lane = threadIdx.x % 32;
  char* bytes = reinterpret_cast<char*>(tile);
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    char* panel = bytes + n / 8 * kOwnRows * kPanelRowBytes;
    const int row = in_tile + lane / 4;
    *reinterpret_cast<std::uint32_t*>(panel + panel_offset(row, n % 8) + lane % 4 * 4) =
        pack(values[4 * n] * factor, values[4 * n + 1] * factor);
    *reinterpret_cast<std::uint32_t*>(panel + panel_offset(row + 8, n % 8) + lane % 4 * 4) =
        pack(values[4 * n + 2] * factor, values[4 * n + 3] * factor);
  }
  __syncwarp();
  constexpr int kChunks = kDim / 8;
#pragma unroll
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int r = i / kChunks;
    const int c = i % kChunks;
    if (first + r >= rows) continue;
    *reinterpret_cast<uint4*>(view.data + static_cast<std::int64_t>(first + r) * view.stride +
                              static_cast<std::int64_t>(head) * kDim + c * 8) =
        *reinterpret_cast<const uint4*>(bytes + c / 8 * kOwnRows * kPanelRowBytes + panel_offset(in_tile + r, c % 8));
  }
}

template <typename K>
__device__ __forceinline__ void init_barriers(Shared<K>& shared) {
  if (threadIdx.x == 0) {
    barrier_init(&shared.own_full, kWarpgroup);
    for (int s = 0; s < K::kStages; ++s) {
      barrier_init(&shared.full[s], kWarpgroup);
      barrier_init(&shared.empty[s], 2 * kWarpgroup / 32);
    }
    fence_shared_for_products();
  }
}

// What the copying warpgroup does: own tiles, then `steps` stages. copy_own() and copy_stage(step,
// stage) issue copies. A stage is handed over when the next one's copies are on their way.
template <typename K, typename CopyOwn, typename CopyStage>
__device__ __forceinline__ void run_copies(Shared<K>& shared, int steps, CopyOwn&& copy_own, CopyStage&& copy_stage) {
  const auto hand_over = [&](std::uint64_t* barrier) {
    fence_shared_for_products();
    barrier_arrive(barrier);
  };
  copy_own();
  commit_copies();
  for (int step = 0; step < steps; ++step) {
    const int stage = step % K::kStages;
    if (step >= K::kStages) barrier_wait(&shared.empty[stage], (step / K::kStages - 1) % 2);
    copy_stage(step, stage);
    commit_copies();
    wait_copies<1>();
    hand_over(step == 0 ? &shared.own_full : &shared.full[(step - 1) % K::kStages]);
  }
  wait_copies<0>();
  hand_over(steps == 0 ? &shared.own_full : &shared.full[(steps - 1) % K::kStages]);
}

#endif  // TESSERA_HAS_WGMMA

// ---- dk, dv: blocks of key tiles and key heads
// -----------------------------------------------------

template <typename K>
__global__ void __launch_bounds__(kThreads, 1) backward_key_wgmma_kernel(const __grid_constant__ Arguments a) {
#if TESSERA_HAS_WGMMA
  extern __shared__ char shared_bytes[];
  Shared<K>& shared = *reinterpret_cast<Shared<K>*>(shared_bytes + (1024 - shared_address(shared_bytes) % 1024) % 1024);
  constexpr int kDim = K::kDim;
  constexpr int kLoop = K::kLoop;
  const int key_tiles = (a.keys + kOwnRows - 1) / kOwnRows;
  const Work work = work_of_block(blockIdx.x, key_tiles, a.row_tiles, a.heads_kv, false);
  if (work.tile >= key_tiles) return;
  const int first = work.tile * kOwnRows;
  const int kv_head = work.head;
  const int group = a.heads_q / a.heads_kv;
  find_ranges(shared, [&](int i) { return queries_of_key(a, first + i); });
  init_barriers(shared);
  __syncthreads();
  const Range all = union_of_warps(shared.unions, kOwnRows / 32);
  const int tiles = (all.end - all.begin + kLoop - 1) / kLoop;
  const int steps = tiles * group;
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / kWarpgroup);

  if (warpgroup == 0) {
    give_registers<40>();
    const int thread = threadIdx.x;
    int head = kv_head * group;
    int tile = 0;
    run_copies(
        shared, steps,
        [&] {
          copy_tile<kDim, kOwnRows>(shared.own[0], a.k, first, a.keys, kv_head);
          copy_tile<kDim, kOwnRows>(shared.own[1], a.v, first, a.keys, kv_head);
        },
        [&](int, int stage) {
          const int query = all.begin + tile * kLoop;
          copy_tile<kDim, kLoop>(shared.loop[stage][0], a.q, query, all.end, head);
          copy_tile<kDim, kLoop>(shared.loop[stage][1], a.dout, query, all.end, head);
          if (thread < kLoop) {
            const int row = query + thread;
            const std::int64_t at = static_cast<std::int64_t>(head) * a.queries + row;
            copy_async_4(shared_address(&shared.lse[stage][thread]), a.lse_by_head + at, row < all.end);
            copy_async_4(shared_address(&shared.delta[stage][thread]), a.delta + at, row < all.end);
          }
          if (++tile == tiles) {
            tile = 0;
            ++head;
          }
        });
  } else {
    take_registers<232>();
    const int lane = threadIdx.x % 32;
    const int half = warpgroup - 1;
    const int warp_row = 64 * half + threadIdx.x % kWarpgroup / 32 * 16;
    const Range some = union_of_warps(shared.unions + 2 * half, 2);
    const Range each{uniform(max(shared.intersections[2 * half].begin, shared.intersections[2 * half + 1].begin)),
                     uniform(min(shared.intersections[2 * half].end, shared.intersections[2 * half + 1].end))};
    const Range upper = shared.ranges[warp_row + lane / 4];
    const Range lower = shared.ranges[warp_row + lane / 4 + 8];
    const float factor = a.scale * kLog2E;
    float dk[kDim / 2], dv[kDim / 2];
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0;
    barrier_wait(&shared.own_full, 0);
    int tile = 0;
    for (int step = 0; step < steps; ++step) {
      const int stage = step % K::kStages;
      const int query = all.begin + tile * kLoop;
      if (++tile == tiles) tile = 0;
      barrier_wait(&shared.full[stage], step / K::kStages % 2);
      if (query < some.end && query + kLoop > some.begin) {
        // Keys are the rows, queries the columns: both results are left operands of the sums below.
        float s[kLoop / 2], ds[kLoop / 2];
        wgmma_fence();
        multiply_rows<K>(s, shared.own[0], 64 * half, shared.loop[stage][0]);
        wgmma_commit();
        multiply_rows<K>(ds, shared.own[1], 64 * half, shared.loop[stage][1]);
        wgmma_commit();
        const bool is_whole = query >= each.begin && query + kLoop <= each.end;
        const float* lse = shared.lse[stage] + lane % 4 * 2;
        const float* delta = shared.delta[stage] + lane % 4 * 2;
        wgmma_wait<1>();
#pragma unroll
        for (int n = 0; n < kLoop / 8; ++n) {
          const float2 l = *reinterpret_cast<const float2*>(lse + 8 * n);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            s[4 * n + e] = exp2_approximate(s[4 * n + e] * factor - (e % 2 == 0 ? l.x : l.y));
          }
        }
        wgmma_wait<0>();
#pragma unroll
        for (int n = 0; n < kLoop / 8; ++n) {
          const float2 d = *reinterpret_cast<const float2*>(delta + 8 * n);
#pragma unroll
          for (int e = 0; e < 4; ++e) ds[4 * n + e] = s[4 * n + e] * (ds[4 * n + e] - (e % 2 == 0 ? d.x : d.y));
        }
        if (!is_whole) {
          // Unseen pairs may hold anything, NaN included: they must not be multiplied by zero.
#pragma unroll
          for (int i = 0; i < kLoop / 2; ++i) {
            const Range& range = i % 4 < 2 ? upper : lower;
            const int row = query + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (row < range.begin || row >= range.end) s[i] = ds[i] = 0;
          }
        }
        std::uint32_t w[kLoop / 16][4], dw[kLoop / 16][4];
        pack_weights<K>(w, s);
        pack_weights<K>(dw, ds);
        wgmma_fence();
        add_weighted<K>(dv, w, shared.loop[stage][1]);
        add_weighted<K>(dk, dw, shared.loop[stage][0]);
        wgmma_commit();
        wgmma_wait<0>();
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.empty[stage]);
    }
    // The other warps of the warpgroup have read the own rows.
    sync_threads<kWarpgroup>(1 + half);
    store_rows<kDim>(a.dk, first + warp_row, a.keys, kv_head, dk, a.scale, shared.own[0], warp_row);
    store_rows<kDim>(a.dv, first + warp_row, a.keys, kv_head, dv, 1.0f, shared.own[1], warp_row);
  }
#else
  __trap();
#endif
}

// ---- dq: blocks of query tiles and query heads
// -----------------------------------------------------

template <typename K>
__global__ void __launch_bounds__(kThreads, 1) backward_query_wgmma_kernel(const __grid_constant__ Arguments a) {
#if TESSERA_HAS_WGMMA
  extern __shared__ char shared_bytes[];
  Shared<K>& shared = *reinterpret_cast<Shared<K>*>(shared_bytes + (1024 - shared_address(shared_bytes) % 1024) % 1024);
  constexpr int kDim = K::kDim;
  constexpr int kLoop = K::kLoop;
  const int query_tiles = (a.queries + kOwnRows - 1) / kOwnRows;
  const Work work = work_of_block(blockIdx.x, query_tiles, a.row_tiles, a.heads_q, true);
  if (work.tile >= query_tiles) return;
  const int first = work.tile * kOwnRows;
  const int head = work.head;
  const int kv_head = head / (a.heads_q / a.heads_kv);
  find_ranges(shared, [&](int i) { return keys_of_query(a, first + i); });
  init_barriers(shared);
  __syncthreads();
  const Range all = union_of_warps(shared.unions, kOwnRows / 32);
  const int steps = (all.end - all.begin + kLoop - 1) / kLoop;
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / kWarpgroup);

  if (warpgroup == 0) {
    give_registers<40>();
    run_copies(
        shared, steps,
        [&] {
          copy_tile<kDim, kOwnRows>(shared.own[0], a.q, first, a.queries, head);
          copy_tile<kDim, kOwnRows>(shared.own[1], a.dout, first, a.queries, head);
        },
        [&](int step, int stage) {
          const int key = all.begin + step * kLoop;
          copy_tile<kDim, kLoop>(shared.loop[stage][0], a.k, key, all.end, kv_head);
          copy_tile<kDim, kLoop>(shared.loop[stage][1], a.v, key, all.end, kv_head);
        });
  } else {
    take_registers<232>();
    const int lane = threadIdx.x % 32;
    const int half = warpgroup - 1;
    const int warp_row = 64 * half + threadIdx.x % kWarpgroup / 32 * 16;
    const Range some = union_of_warps(shared.unions + 2 * half, 2);
    const Range each{uniform(max(shared.intersections[2 * half].begin, shared.intersections[2 * half + 1].begin)),
                     uniform(min(shared.intersections[2 * half].end, shared.intersections[2 * half + 1].end))};
    const Range upper = shared.ranges[warp_row + lane / 4];
    const Range lower = shared.ranges[warp_row + lane / 4 + 8];
    const float factor = a.scale * kLog2E;
    float lse[2], delta[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const Range& range = e == 0 ? upper : lower;
      const std::int64_t at = static_cast<std::int64_t>(head) * a.queries + first + warp_row + lane / 4 + 8 * e;
      const bool is_there = range.begin < range.end;
      lse[e] = is_there ? a.lse_by_head[at] : 0.0f;
      delta[e] = is_there ? a.delta[at] : 0.0f;
    }
    float dq[kDim / 2];
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dq[i] = 0;
    barrier_wait(&shared.own_full, 0);
    for (int step = 0; step < steps; ++step) {
      const int stage = step % K::kStages;
      const int key = all.begin + step * kLoop;
      barrier_wait(&shared.full[stage], step / K::kStages % 2);
      if (key < some.end && key + kLoop > some.begin) {
        float s[kLoop / 2], ds[kLoop / 2];
        wgmma_fence();
        multiply_rows<K>(s, shared.own[0], 64 * half, shared.loop[stage][0]);
        wgmma_commit();
        multiply_rows<K>(ds, shared.own[1], 64 * half, shared.loop[stage][1]);
        wgmma_commit();
        const bool is_whole = key >= each.begin && key + kLoop <= each.end;
        wgmma_wait<1>();
#pragma unroll
        for (int i = 0; i < kLoop / 2; ++i) s[i] = exp2_approximate(s[i] * factor - lse[i / 2 % 2]);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kLoop / 2; ++i) ds[i] = s[i] * (ds[i] - delta[i / 2 % 2]);
        if (!is_whole) {
#pragma unroll
          for (int i = 0; i < kLoop / 2; ++i) {
            const Range& range = i % 4 < 2 ? upper : lower;
            const int column = key + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (column < range.begin || column >= range.end) ds[i] = 0;
          }
        }
        std::uint32_t dw[kLoop / 16][4];
        pack_weights<K>(dw, ds);
        wgmma_fence();
        add_weighted<K>(dq, dw, shared.loop[stage][0]);
        wgmma_commit();
        wgmma_wait<0>();
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&shared.empty[stage]);
    }
    sync_threads<kWarpgroup>(1 + half);
    store_rows<kDim>(a.dq, first + warp_row, a.queries, head, dq, a.scale, shared.own[0], warp_row);
  }
#else
  __trap();
#endif
}

// delta = dout . out and the scaled log-sum-exps, both by head. A block takes 32 rows of a head:
// eight threads a row, so that what it writes is one run.
__global__ void __launch_bounds__(256) delta_kernel(Arguments a) {
  const int head = blockIdx.y;
  const int row = static_cast<int>(blockIdx.x) * 32 + static_cast<int>(threadIdx.x) / 8;
  if (row >= a.queries) return;
  float sum = 0;
  for (int d = static_cast<int>(threadIdx.x) % 8 * 8; d < a.head_dim; d += 64) {
    const std::int64_t col = static_cast<std::int64_t>(head) * a.head_dim + d;
    float x[8], y[8];
    Access<bf16_t, 8>::read(a.dout.data + row * a.dout.stride + col, x);
    Access<bf16_t, 8>::read(a.out.data + row * a.out.stride + col, y);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += x[j] * y[j];
  }
  const unsigned lanes = __activemask();
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) sum += __shfl_xor_sync(lanes, sum, distance);
  if (threadIdx.x % 8 == 0) {
    const std::int64_t at = static_cast<std::int64_t>(head) * a.queries + row;
    a.delta[at] = sum;
    a.lse_by_head[at] = a.lse[static_cast<std::int64_t>(row) * a.heads_q + head] * kLog2E;
  }
}

// ---- Host side
// -------------------------------------------------------------------------------------

template <typename K, typename Kernel>
void launch(Kernel kernel, int rows, int heads, const Arguments& a, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(Shared<K>)) + 1024;
  if (rows == 0) return;
  CUDA_CHECK(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const std::int64_t row_groups = ceil_div(ceil_div(rows, kOwnRows), a.row_tiles);
  kernel<<<grid_size(row_groups * a.row_tiles * heads), kThreads, kBytes, stream>>>(a);
  TESSERA_LAUNCHED();
}

template <typename K>
void launch_both(const Arguments& a, cudaStream_t stream) {
  launch<K>(backward_query_wgmma_kernel<K>, a.queries, a.heads_q, a, stream);
  launch<K>(backward_key_wgmma_kernel<K>, a.keys, a.heads_kv, a, stream);
}

}  // namespace

bool wgmma_attention_backward(const AttentionBackward& args, Stream& stream) {
  if (!wgmma_attention_applies(args, stream.context().capabilities())) return false;
  for (const Tensor* t : {&args.q, &args.k, &args.v, &args.out, &args.dout, &args.dq, &args.dk, &args.dv}) {
    if (!is_vector_aligned(*t)) return false;
  }
  CHECK(args.q.rows() < (std::int64_t{1} << 31) - 1024 && args.k.rows() < (std::int64_t{1} << 31) - 1024,
        "[attention_backward] {} queries and {} keys, the CUDA kernels go up to 2^31", args.q.rows(), args.k.rows());
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
  const std::int64_t longest = std::max<std::int64_t>(1, std::min(args.shape.max_length, args.k.rows()));
  a.row_tiles = static_cast<int>(ceil_div(longest, kOwnRows));
  a.scale = args.shape.scale;
  const std::int64_t items = static_cast<std::int64_t>(a.queries) * a.heads_q;
  const auto scratch = stream.scratch().take(static_cast<std::size_t>(2 * items) * sizeof(float));
  a.delta = static_cast<float*>(scratch.data());
  a.lse_by_head = a.delta + items;
  const cudaStream_t s = native(stream);
  if (items > 0) {
    delta_kernel<<<dim3(grid_size(ceil_div(a.queries, 32)), static_cast<unsigned>(a.heads_q)), 256, 0, s>>>(a);
    TESSERA_LAUNCHED();
  }
  if (a.head_dim == 64) {
    launch_both<Config<64>>(a, s);
  } else {
    launch_both<Config<128>>(a, s);
  }
  return true;
}

}  // namespace tessera::cuda
