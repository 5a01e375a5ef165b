// Largest magnitudes; FP8 casts that write rows and their transpose in one pass; transposes of
// bytes. All bound by memory: a cast of bf16 moves 2 bytes in and 1 per copy out, an amax reads 2.
#include "kernels/cuda/amax.cuh"
#include "kernels/ops.h"
#include "kernels/quantize.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

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

// ---- Casts and transposes
// --------------------------------------------------------------------------

// A block takes a tile of 128 x 128: 256 bytes of every bf16 row in, 128 bytes of every row and of
// every column out. A thread converts 16 neighbours of a row at a time to one 16-byte value, which
// goes out as the row copy and into shared memory; it then gathers 16 rows of 4 columns, transposes
// them in registers, and writes 16 bytes of each column.
constexpr int kTile = 128;
constexpr int kChunk = 16;                     // elements of a 16-byte FP8 store
constexpr int kChunksPerRow = kTile / kChunk;  // 8
constexpr int kChunksPerThread = kTile * kChunksPerRow / kThreads;  // 4
constexpr int kWordsPerRow = kTile / 4;
// Every 16 rows are moved on by 4 banks: the 8 groups of rows that a warp gathers from then cover
// all banks.
constexpr int kSkew = 4;
constexpr int kTileWords = kTile * kWordsPerRow + (kTile / 16) * kSkew;

__device__ __forceinline__ int word_index(int row, int word) {
  return row * kWordsPerRow + (row / 16) * kSkew + word;
}

// 16 source elements of a row as loaded.
template <typename T>
struct Source {
  static constexpr int kVectors = kChunk * static_cast<int>(sizeof(T)) / 16;
  uint4 raw[kVectors];

  __device__ __forceinline__ void load(const T* p) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) raw[v] = reinterpret_cast<const uint4*>(p)[v];
  }
  __device__ __forceinline__ void load_some(const T* p, int count) {
    std::uint32_t words[4 * kVectors] = {};
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      if (j >= count) break;
      std::uint32_t bits;
      if constexpr (sizeof(T) == 1) {
        bits = *reinterpret_cast<const std::uint8_t*>(p + j);
      } else if constexpr (sizeof(T) == 2) {
        bits = *reinterpret_cast<const std::uint16_t*>(p + j);
      } else {
        bits = *reinterpret_cast<const std::uint32_t*>(p + j);
      }
      words[j / kPerWord] |= bits << (j % kPerWord * 8 * static_cast<int>(sizeof(T)) % 32);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      raw[v] = make_uint4(words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3]);
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) raw[v] = make_uint4(0, 0, 0, 0);
  }

  // The 16 elements times `factor` in the FP8 format; bytes stay as they are.
  template <__nv_fp8_interpretation_t kFormat>
  __device__ __forceinline__ uint4 convert(float factor) const {
    if constexpr (sizeof(T) == 1) {
      return raw[0];
    } else {
      constexpr int N = kVector<T>;
      std::uint32_t words[4];
      float values[kChunk];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float some[N];
        Access<T, N>::unpack(raw[v], some);
#pragma unroll
        for (int j = 0; j < N; ++j) values[v * N + j] = some[j] * factor;
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const std::uint32_t low = __nv_cvt_float2_to_fp8x2(
            make_float2(values[4 * w], values[4 * w + 1]), __NV_SATFINITE, kFormat);
        const std::uint32_t high = __nv_cvt_float2_to_fp8x2(
            make_float2(values[4 * w + 2], values[4 * w + 3]), __NV_SATFINITE, kFormat);
        words[w] = low | high << 16;
      }
      return make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

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

__device__ __forceinline__ void store_some(std::uint8_t* p, const uint4& value, int count) {
  const std::uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    if (j < count) p[j] = static_cast<std::uint8_t>(words[j / 4] >> (8 * (j % 4)));
  }
}

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

  // 8 lanes cover 128 bytes of a column, 4 such groups of lanes 4 words of columns.
  const int group = static_cast<int>(threadIdx.x) % 8;
  const int word = static_cast<int>(threadIdx.x) / 8;
  std::uint32_t out[4][4];  // [column][4 rows each]
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    std::uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = tile[word_index(group * 16 + q * 4 + i, word)];
    // 4 x 4 bytes: pairs of rows interleaved, then pairs of pairs.
    const std::uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
    const std::uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    out[0][q] = __byte_perm(a, b, 0x5410);
    out[1][q] = __byte_perm(a, b, 0x7632);
    out[2][q] = __byte_perm(c, d, 0x5410);
    out[3][q] = __byte_perm(c, d, 0x7632);
  }
  const std::int64_t row = r0 + group * 16;
  const auto depth_left = static_cast<int>(min(static_cast<std::int64_t>(kChunk), p.depth - row));
  if (depth_left <= 0) return;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const std::int64_t column = c0 + word * 4 + k;
    if (column >= p.cols) return;
    std::uint8_t* to = p.column + column * p.column_stride + row;
    const uint4 bytes = make_uint4(out[k][0], out[k][1], out[k][2], out[k][3]);
    if constexpr (kAligned) {
      *reinterpret_cast<uint4*>(to) = bytes;
    } else {
      store_some(to, bytes, depth_left);
    }
  }
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

// Whether all rows that are there start at multiples of 16 bytes, and sizes are multiples of 16.
bool is_aligned_cast(const Tensor& in, const Tensor& row, const Tensor& column) {
  return in.cols() % kChunk == 0 && rows_aligned(in) && (!row.defined() || rows_aligned(row)) &&
         (!column.defined() || (rows_aligned(column) && column.cols() % kChunk == 0));
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

void transpose(const Transpose& args, Stream& stream) {
  CastPointers p = cast_pointers(args.in, Tensor{}, args.out);
  if (p.cols == 0 || p.depth == 0) return;
  launch_cast<std::uint8_t, __NV_E4M3>(p, is_aligned_cast(args.in, Tensor{}, args.out),
                                       native(stream));
  TESSERA_LAUNCHED();
}

}  // namespace tessera::cuda
