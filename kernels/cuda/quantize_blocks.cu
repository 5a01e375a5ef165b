// FP8 casts with a scale for every 128 elements: one pass finds the scales of a tile, which is as
// large as a block of scales, and writes rows and their transpose. Bound by memory: bf16 moves 2
// bytes in and 1 per copy out; scales add 1/32 of a byte per copy.
#include "kernels/cuda/cast_tile.cuh"
#include "kernels/cuda/decode_blocks.h"
#include "kernels/ops.h"
#include "kernels/quantize.h"

namespace tessera::cuda {
namespace {

static_assert(kTile == kScaleBlock);
static_assert(exponent_of_largest(DType::kF8E4M3) == 8 &&
              exponent_of_largest(DType::kF8E5M2) == 15);

constexpr int kWarps = kTileThreads / 32;

struct BlockPointers {
  const void* in;
  std::uint8_t* row;     // null: no row copy
  std::uint8_t* column;  // null: no transposed copy
  float* row_scale;
  float* column_scale;
  std::int64_t in_stride, row_stride, column_stride;
  std::int64_t row_scale_stride, column_scale_stride;
  std::int64_t rows, cols, depth;
  unsigned tiles_across;
};

// The larger of two packed magnitudes, or the one there is, as bits of fp32.
template <typename T>
__device__ __forceinline__ std::uint32_t largest_of_word(std::uint32_t word) {
  if constexpr (sizeof(T) == 2) return max(word & 0xffffu, word >> 16) << 16;
  return word;
}

// scale[i, j], and zeros behind the last of a row of `count` scales.
__device__ __forceinline__ void write_block_scale(float* scale, std::int64_t stride, std::int64_t i,
                                                  std::int64_t j, std::int64_t count, float value) {
  float* to = scale + i * stride;
  to[j] = value;
  if (j == count - 1) {
    for (std::int64_t pad = count; pad < stride; ++pad) to[pad] = 0.0f;
  }
}

// Blocks of threads that share a multiprocessor while they wait for memory; bf16 needs no more
// registers than that leaves.
template <typename T, ScaleMode kMode>
inline constexpr int kBlocksPerSm = sizeof(T) > 2                 ? 1
                                    : kMode == ScaleMode::kVector ? 3
                                                                  : 4;

// A thread holds 16 neighbours of 4 rows; 8 lanes hold a row of the tile, a warp 4 rows at a time.
template <typename T, __nv_fp8_interpretation_t kFormat, bool kAligned, ScaleMode kMode>
__global__ void __launch_bounds__(kTileThreads, kBlocksPerSm<T, kMode>)
    quantize_blocks_kernel(BlockPointers p) {
  using S = Source<T>;
  constexpr int kExponent = kFormat == __NV_E4M3 ? 8 : 15;
  __shared__ __align__(16) std::uint32_t tile[kTileWords];
  __shared__ std::uint32_t largest_of_warp[kWarps][kMode == ScaleMode::kVector ? kTile : 1];
  __shared__ __align__(16) float column_factor[kTile];
  const std::int64_t tile_row = blockIdx.x / p.tiles_across;
  const std::int64_t tile_col = blockIdx.x - tile_row * p.tiles_across;
  const std::int64_t r0 = tile_row * kTile;
  const std::int64_t c0 = tile_col * kTile;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int chunk_col = static_cast<int>(threadIdx.x) % kChunksPerRow * kChunk;
  const int first_row = static_cast<int>(threadIdx.x) / kChunksPerRow;
  constexpr int kRowStep = kTileThreads / kChunksPerRow;
  const std::int64_t col = c0 + chunk_col;
  const auto some = static_cast<int>(min(static_cast<std::int64_t>(kChunk), p.cols - col));

  S source[kChunksPerThread];
#pragma unroll
  for (int u = 0; u < kChunksPerThread; ++u) {
    const std::int64_t row = r0 + first_row + u * kRowStep;
    const T* from = static_cast<const T*>(p.in) + row * p.in_stride + col;
    if (row >= p.rows || some <= 0) {
      source[u].clear();
    } else if (kAligned) {
      source[u].load(from);
    } else {
      source[u].load_some(from, some);
    }
  }

  std::uint32_t row_largest[kChunksPerThread];
  std::uint32_t column_largest[S::kWords] = {};
#pragma unroll
  for (int u = 0; u < kChunksPerThread; ++u) {
    std::uint32_t largest = 0;
#pragma unroll
    for (int w = 0; w < S::kWords; ++w) {
      const std::uint32_t magnitude = source[u].magnitude(w);
      largest = S::larger(largest, magnitude);
      column_largest[w] = S::larger(column_largest[w], magnitude);
    }
    largest = largest_of_word<T>(largest);
#pragma unroll
    for (int step = 1; step < kChunksPerRow; step *= 2)
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    row_largest[u] = largest;
  }

  const bool writes_columns = p.column != nullptr && r0 < p.depth;
  float block_factor = 0.0f;
  if constexpr (kMode == ScaleMode::kBlock) {
    std::uint32_t largest =
        max(max(row_largest[0], row_largest[1]), max(row_largest[2], row_largest[3]));
    static_assert(kChunksPerThread == 4);
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0) largest_of_warp[warp][0] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) largest = max(largest, largest_of_warp[w][0]);
    const Fp8Factors factors = fp8_block_factors(__uint_as_float(largest), kExponent);
    block_factor = factors.quantize;
    if (threadIdx.x == 0 && p.row != nullptr && r0 < p.rows) {
      write_block_scale(p.row_scale, p.row_scale_stride, tile_row, tile_col,
                        (p.cols + kTile - 1) / kTile, factors.dequantize);
    }
    if (threadIdx.x == 0 && writes_columns) {
      write_block_scale(p.column_scale, p.column_scale_stride, tile_col, tile_row,
                        (p.depth + kTile - 1) / kTile, factors.dequantize);
    }
  }

#pragma unroll
  for (int u = 0; u < kChunksPerThread; ++u) {
    const int local = first_row + u * kRowStep;
    const std::int64_t row = r0 + local;
    float factor = block_factor;
    if constexpr (kMode == ScaleMode::kVector) {
      const Fp8Factors factors = fp8_block_factors(__uint_as_float(row_largest[u]), kExponent);
      factor = factors.quantize;
      if (p.row != nullptr && row < p.rows && chunk_col == 0)
        p.row_scale[tile_col * p.row_scale_stride + row] = factors.dequantize;
    }
    // Rows past the end stay zero: 0 times a NaN factor would not.
    const uint4 bytes =
        row < p.rows ? source[u].template convert<kFormat>(factor) : make_uint4(0, 0, 0, 0);
    if (p.row != nullptr && row < p.rows && some > 0) {
      std::uint8_t* to = p.row + row * p.row_stride + col;
      if constexpr (kAligned) {
        *reinterpret_cast<uint4*>(to) = bytes;
      } else {
        store_some(to, bytes, some);
      }
    }
    if (kMode == ScaleMode::kBlock && writes_columns)
      *reinterpret_cast<uint4*>(tile + word_index(local, chunk_col / 4)) = bytes;
  }
  if (!writes_columns) return;

  if constexpr (kMode == ScaleMode::kVector) {
    // The columns of 4 rows per lane, then of the warp's 4 lanes to a column, then of all warps.
#pragma unroll
    for (int w = 0; w < S::kWords; ++w) {
      std::uint32_t largest = column_largest[w];
      largest = S::larger(largest, __shfl_xor_sync(0xffffffffu, largest, kChunksPerRow));
      largest = S::larger(largest, __shfl_xor_sync(0xffffffffu, largest, 2 * kChunksPerRow));
      if (lane >= kChunksPerRow) continue;
      if constexpr (sizeof(T) == 2) {
        largest_of_warp[warp][chunk_col + 2 * w] = largest << 16;
        largest_of_warp[warp][chunk_col + 2 * w + 1] = largest & 0xffff0000u;
      } else {
        largest_of_warp[warp][chunk_col + w] = largest;
      }
    }
    __syncthreads();
    if (threadIdx.x < kTile) {
      std::uint32_t largest = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) largest = max(largest, largest_of_warp[w][threadIdx.x]);
      const Fp8Factors factors = fp8_block_factors(__uint_as_float(largest), kExponent);
      column_factor[threadIdx.x] = factors.quantize;
      if (c0 + threadIdx.x < p.cols)
        p.column_scale[tile_row * p.column_scale_stride + c0 + threadIdx.x] = factors.dequantize;
    }
    __syncthreads();
    float factors[kChunk];
#pragma unroll
    for (int j = 0; j < kChunk; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(column_factor + chunk_col + j);
      factors[j] = four.x;
      factors[j + 1] = four.y;
      factors[j + 2] = four.z;
      factors[j + 3] = four.w;
    }
#pragma unroll
    for (int u = 0; u < kChunksPerThread; ++u) {
      const int local = first_row + u * kRowStep;
      *reinterpret_cast<uint4*>(tile + word_index(local, chunk_col / 4)) =
          r0 + local < p.rows ? source[u].template convert_each<kFormat>(factors)
                              : make_uint4(0, 0, 0, 0);
    }
  }
  __syncthreads();
  store_columns<kAligned>(tile, p.column, p.column_stride, r0, c0, p.cols, p.depth);
}

template <typename T, __nv_fp8_interpretation_t kFormat>
void launch(BlockPointers p, ScaleMode mode, bool aligned, cudaStream_t s) {
  const std::int64_t across = ceil_div(p.cols, kTile);
  p.tiles_across = grid_size(across);
  const unsigned grid = grid_size(across * ceil_div(std::max(p.rows, p.depth), kTile));
  const auto with_mode = [&](auto tag) {
    constexpr ScaleMode kMode = decltype(tag)::value;
    if (aligned) {
      quantize_blocks_kernel<T, kFormat, true, kMode><<<grid, kTileThreads, 0, s>>>(p);
    } else {
      quantize_blocks_kernel<T, kFormat, false, kMode><<<grid, kTileThreads, 0, s>>>(p);
    }
  };
  if (mode == ScaleMode::kVector) {
    with_mode(std::integral_constant<ScaleMode, ScaleMode::kVector>{});
  } else {
    with_mode(std::integral_constant<ScaleMode, ScaleMode::kBlock>{});
  }
}

// ---- Decoding

constexpr int kDecodeThreads = 256;

// A thread takes 16 neighbours, which have one scale: blocks are multiples of 16.
template <__nv_fp8_interpretation_t kFormat>
__global__ void decode_kernel(const std::uint8_t* in, std::int64_t stride, const float* scale,
                              std::int64_t scale_stride, bool is_block, std::int64_t first,
                              std::int64_t chunks_per_row, std::int64_t chunks,
                              __nv_bfloat16* out) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kDecodeThreads +
                         static_cast<std::int64_t>(threadIdx.x);
  if (i >= chunks) return;
  const std::int64_t local = divide(i, chunks_per_row);
  const std::int64_t row = first + local;
  const std::int64_t chunk = i - local * chunks_per_row;
  const std::int64_t block = chunk * kChunk / kScaleBlock;
  const float factor = is_block ? scale[row / kScaleBlock * scale_stride + block]
                                : scale[block * scale_stride + row];
  const uint4 raw = *reinterpret_cast<const uint4*>(in + row * stride + chunk * kChunk);
  const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  float values[kChunk];
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    const auto byte = static_cast<__nv_fp8_storage_t>(words[j / 4] >> (8 * (j % 4)));
    values[j] = __half2float(__half(__nv_cvt_fp8_to_halfraw(byte, kFormat))) * factor;
  }
  using A = Access<__nv_bfloat16, 8>;
  __nv_bfloat16* to = out + i * kChunk;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float eight[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) eight[j] = values[8 * half + j];
    A::write(to + 8 * half, eight);
  }
}

}  // namespace

void quantize_blocks(const QuantizeBlocks& args, Stream& stream) {
  BlockPointers p{};
  p.in = args.in.data;
  p.in_stride = args.in.row_stride;
  p.rows = args.in.rows();
  p.cols = args.in.cols();
  if (args.row.defined()) {
    p.row = static_cast<std::uint8_t*>(args.row.data);
    p.row_stride = args.row.row_stride;
    p.row_scale = pointer<float>(args.row_scale);
    p.row_scale_stride = args.row_scale.cols();
  }
  if (args.column.defined()) {
    p.column = static_cast<std::uint8_t*>(args.column.data);
    p.column_stride = args.column.row_stride;
    p.column_scale = pointer<float>(args.column_scale);
    p.column_scale_stride = args.column_scale.cols();
    p.depth = args.column.cols();
  }
  if (p.cols == 0 || std::max(p.rows, p.depth) == 0) return;
  const cudaStream_t s = native(stream);
  const bool aligned = is_aligned_cast(args.in, args.row, args.column);
  const DType format = args.row.defined() ? args.row.dtype : args.column.dtype;
  const bool is_e4m3 = format == DType::kF8E4M3;
  if (args.in.dtype == DType::kBF16) {
    is_e4m3 ? launch<__nv_bfloat16, __NV_E4M3>(p, args.mode, aligned, s)
            : launch<__nv_bfloat16, __NV_E5M2>(p, args.mode, aligned, s);
  } else {
    is_e4m3 ? launch<float, __NV_E4M3>(p, args.mode, aligned, s)
            : launch<float, __NV_E5M2>(p, args.mode, aligned, s);
  }
  TESSERA_LAUNCHED();
}

void decode_blocks(const Tensor& in, const Tensor& scale, ScaleMode mode, std::int64_t first,
                   const Tensor& out, Stream& stream) {
  const std::int64_t per_row = in.cols() / kChunk;
  const std::int64_t chunks = out.rows() * per_row;
  if (chunks == 0) return;
  const unsigned grid = grid_size(ceil_div(chunks, kDecodeThreads));
  const auto run = [&](auto kernel) {
    kernel<<<grid, kDecodeThreads, 0, native(stream)>>>(
        static_cast<const std::uint8_t*>(in.data), in.row_stride, pointer<float>(scale),
        scale.cols(), mode == ScaleMode::kBlock, first, per_row, chunks,
        pointer<__nv_bfloat16>(out));
  };
  in.dtype == DType::kF8E4M3 ? run(decode_kernel<__NV_E4M3>) : run(decode_kernel<__NV_E5M2>);
  TESSERA_LAUNCHED();
}

}  // namespace tessera::cuda
