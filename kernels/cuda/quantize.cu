// Largest magnitudes; FP8 casts that write rows and their transpose in one pass; transposes of
// bytes. All bound by memory: a cast of bf16 moves 2 bytes in and 1 per copy out, an amax reads 2.
#include "kernels/cuda/amax.cuh"
#include "kernels/cuda/cast_tile.cuh"
#include "kernels/ops.h"
#include "kernels/quantize.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = kTileThreads;

// ---- amax
// ------------------------------------------------------------------------------------------

constexpr int kLoads = 8;

// A grid of a few blocks per multiprocessor walks over chunks of rows; each thread has kLoads
// vectors in flight.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const T* in, std::int64_t stride, std::int64_t cols, std::int64_t chunks_per_row,
                std::int64_t chunks, float* amax) {
  using A = Access<T, N>;
  LargestMagnitude<T> largest;
  for (std::int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const std::int64_t row = divide(chunk, chunks_per_row);
    const std::int64_t first = (chunk - row * chunks_per_row) * (kThreads * kLoads) + threadIdx.x;
    const T* p = in + row * stride;
    typename A::Raw raw[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const std::int64_t i = first + u * kThreads;
      raw[u] = A::load(p + (i < cols ? i : 0) *
                               N);  // past the end: a value that has been counted anyway
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) largest.add(raw[u]);
  }
  largest.record(amax);
}

// ---- Losses of casts
// ------------------------------------------------------------------------------

// A block per row and grid stride; counts are integers, so their order leaves no trace.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    cast_losses_kernel(const T* in, std::int64_t in_stride, const std::uint8_t* copy, std::int64_t copy_stride,
                       std::int64_t rows, std::int64_t cols, unsigned long long* counts) {
  unsigned nonzero = 0;
  unsigned lost = 0;
  for (std::int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    for (std::int64_t c = threadIdx.x; c < cols; c += kThreads) {
      const bool is_there = static_cast<float>(to_compute(in[r * in_stride + c])) != 0;
      nonzero += is_there ? 1u : 0u;
      lost += is_there && (copy[r * copy_stride + c] & 0x7fu) == 0 ? 1u : 0u;
    }
  }
  nonzero = __reduce_add_sync(0xffffffffu, nonzero);
  lost = __reduce_add_sync(0xffffffffu, lost);
  if (threadIdx.x % 32 == 0) {
    if (nonzero != 0) atomicAdd(&counts[0], static_cast<unsigned long long>(nonzero));
    if (lost != 0) atomicAdd(&counts[1], static_cast<unsigned long long>(lost));
  }
}

// ---- Casts and transposes
// --------------------------------------------------------------------------

struct CastPointers {
  const void* in;
  std::uint8_t* row;     // null: no row copy
  std::uint8_t* column;  // null: no transposed copy
  const float* amax;     // null: bytes are moved as they are
  float* scale;
  std::int64_t in_stride, row_stride, column_stride;
  std::int64_t rows, cols, depth;
  unsigned tiles_across;
  float largest;
};

// kAligned: all rows start at multiples of 16 bytes and rows and columns hold multiples of 16
// elements.
template <typename T, __nv_fp8_interpretation_t kFormat, bool kAligned>
__global__ void __launch_bounds__(kThreads) cast_kernel(CastPointers p) {
  __shared__ __align__(16) std::uint32_t tile[kTileWords];
  const std::int64_t tile_row = blockIdx.x / p.tiles_across;
  const std::int64_t r0 = tile_row * kTile;
  const std::int64_t c0 = (blockIdx.x - tile_row * p.tiles_across) * kTile;
  float factor = 1.0f;
  if constexpr (sizeof(T) > 1) {
    const Fp8Factors factors = fp8_factors(*p.amax, p.largest);
    factor = factors.quantize;
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.scale = factors.dequantize;
  }

  const int chunk_col = static_cast<int>(threadIdx.x) % kChunksPerRow * kChunk;
  const int first_row = static_cast<int>(threadIdx.x) / kChunksPerRow;
  constexpr int kRowStep = kThreads / kChunksPerRow;  // 32
  const std::int64_t col = c0 + chunk_col;
  const auto some = static_cast<int>(min(static_cast<std::int64_t>(kChunk), p.cols - col));
  Source<T> source[kChunksPerThread];
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
#pragma unroll
  for (int u = 0; u < kChunksPerThread; ++u) {
    const int local = first_row + u * kRowStep;
    const std::int64_t row = r0 + local;
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
    if (p.column != nullptr)
      *reinterpret_cast<uint4*>(tile + word_index(local, chunk_col / 4)) = bytes;
  }
  if (p.column == nullptr) return;
  __syncthreads();

  store_columns<kAligned>(tile, p.column, p.column_stride, r0, c0, p.cols, p.depth);
}

template <typename T, __nv_fp8_interpretation_t kFormat>
void launch_cast(CastPointers p, bool aligned, cudaStream_t s) {
  const std::int64_t across = ceil_div(p.cols, kTile);
  const std::int64_t down = ceil_div(std::max(p.rows, p.column != nullptr ? p.depth : 0), kTile);
  p.tiles_across = grid_size(across);
  const unsigned grid = grid_size(across * down);
  if (aligned) {
    cast_kernel<T, kFormat, true><<<grid, kThreads, 0, s>>>(p);
  } else {
    cast_kernel<T, kFormat, false><<<grid, kThreads, 0, s>>>(p);
  }
}

CastPointers cast_pointers(const Tensor& in, const Tensor& row, const Tensor& column) {
  CastPointers p{};
  p.in = in.data;
  p.in_stride = in.row_stride;
  p.rows = in.rows();
  p.cols = in.cols();
  if (row.defined()) {
    p.row = static_cast<std::uint8_t*>(row.data);
    p.row_stride = row.row_stride;
  }
  if (column.defined()) {
    p.column = static_cast<std::uint8_t*>(column.data);
    p.column_stride = column.row_stride;
    p.depth = column.cols();
  }
  return p;
}

__global__ void scale_of_nothing_kernel(const float* amax, float largest, float* scale) {
  *scale = fp8_factors(*amax, largest).dequantize;
}

}  // namespace

void amax(const Amax& args, Stream& stream) {
  if (args.in.numel() == 0) return;
  const cudaStream_t s = native(stream);
  const bool dense = args.in.is_dense();
  const std::int64_t rows = dense ? 1 : args.in.rows();
  const std::int64_t cols = dense ? args.in.numel() : args.in.cols();
  visit_float(args.in.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, double>) {
      const auto launch = [&](auto width) {
        constexpr int N = decltype(width)::value;
        const std::int64_t per_row = ceil_div(cols / N, kThreads * kLoads);
        const std::int64_t chunks = rows * per_row;
        const unsigned grid = grid_size(std::min<std::int64_t>(
            chunks, 8 * static_cast<std::int64_t>(std::max(1, sm_count(stream)))));
        amax_kernel<T, N><<<grid, kThreads, 0, s>>>(pointer<T>(args.in), args.in.row_stride,
                                                    cols / N, per_row, chunks,
                                                    pointer<float>(args.amax));
      };
      if (cols % kVector<T> == 0 && is_aligned(args.in.data) && (dense || rows_aligned(args.in))) {
        launch(std::integral_constant<int, kVector<T>>{});
      } else {
        launch(std::integral_constant<int, 1>{});
      }
    }
  });
  TESSERA_LAUNCHED();
}

void quantize(const Quantize& args, Stream& stream) {
  const cudaStream_t s = native(stream);
  const DType format = args.row.defined() ? args.row.dtype : args.column.dtype;
  CastPointers p = cast_pointers(args.in, args.row, args.column);
  p.amax = pointer<float>(args.amax);
  p.scale = pointer<float>(args.scale);
  p.largest = largest_of(format);
  if (p.cols == 0 || std::max(p.rows, p.depth) == 0) {
    scale_of_nothing_kernel<<<1, 1, 0, s>>>(p.amax, p.largest, p.scale);
    TESSERA_LAUNCHED();
    return;
  }
  const bool aligned = is_aligned_cast(args.in, args.row, args.column);
  const bool is_e4m3 = format == DType::kF8E4M3;
  if (args.in.dtype == DType::kBF16) {
    is_e4m3 ? launch_cast<__nv_bfloat16, __NV_E4M3>(p, aligned, s)
            : launch_cast<__nv_bfloat16, __NV_E5M2>(p, aligned, s);
  } else {
    is_e4m3 ? launch_cast<float, __NV_E4M3>(p, aligned, s)
            : launch_cast<float, __NV_E5M2>(p, aligned, s);
  }
  TESSERA_LAUNCHED();
}

void cast_losses(const CastLosses& args, Stream& stream) {
  if (args.in.numel() == 0) return;
  const unsigned blocks = grid_size(std::min<std::int64_t>(args.in.rows(), 2048));
  const auto launch = [&](const auto* in) {
    cast_losses_kernel<<<blocks, kThreads, 0, native(stream)>>>(
        in, args.in.row_stride, pointer<std::uint8_t>(args.row), args.row.row_stride, args.in.rows(), args.in.cols(),
        pointer<unsigned long long>(args.counts));
  };
  args.in.dtype == DType::kBF16 ? launch(pointer<__nv_bfloat16>(args.in)) : launch(pointer<float>(args.in));
  TESSERA_LAUNCHED();
}

void transpose(const Transpose& args, Stream& stream) {
  CastPointers p = cast_pointers(args.in, Tensor{}, args.out);
  if (p.cols == 0 || p.depth == 0) return;
  launch_cast<std::uint8_t, __NV_E4M3>(p, is_aligned_cast(args.in, Tensor{}, args.out),
                                       native(stream));
  TESSERA_LAUNCHED();
}

}  // namespace tessera::cuda
