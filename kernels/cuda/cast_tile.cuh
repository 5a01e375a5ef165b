// A tile of an FP8 cast that writes rows and their transpose: loading, converting and storing it.
// Shared by casts with one scale and with one per 128 elements. Included by kernels/cuda/*.cu only.
#pragma once

#include "kernels/cuda/common.cuh"

namespace tessera::cuda {

// A block takes a tile of 128 x 128: 256 bytes of every bf16 row in, 128 bytes of every row and of
// every column out. A thread converts 16 neighbours of a row at a time to one 16-byte value, which
// goes out as the row copy and into shared memory; it then gathers 16 rows of 4 columns, transposes
// them in registers, and writes 16 bytes of each column.
inline constexpr int kTileThreads = 256;
inline constexpr int kTile = 128;
inline constexpr int kChunk = 16;                     // elements of a 16-byte FP8 store
inline constexpr int kChunksPerRow = kTile / kChunk;  // 8
inline constexpr int kChunksPerThread = kTile * kChunksPerRow / kTileThreads;  // 4
inline constexpr int kWordsPerRow = kTile / 4;
// Every 16 rows are moved on by 4 banks: the 8 groups of rows that a warp gathers from then cover
// all banks.
inline constexpr int kSkew = 4;
inline constexpr int kTileWords = kTile * kWordsPerRow + (kTile / 16) * kSkew;

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

  // Magnitudes of the elements as bits, word by word as they are stored: two of bf16 to a word.
  // They order like the numbers, with NaN on top.
  static constexpr int kWords = 4 * kVectors;
  static constexpr std::uint32_t kMagnitude = sizeof(T) == 2 ? 0x7fff7fffu : 0x7fffffffu;
  __device__ __forceinline__ std::uint32_t magnitude(int word) const {
    const uint4& v = raw[word / 4];
    const std::uint32_t bits = word % 4 == 0   ? v.x
                               : word % 4 == 1 ? v.y
                               : word % 4 == 2 ? v.z
                                               : v.w;
    return bits & kMagnitude;
  }
  static __device__ __forceinline__ std::uint32_t larger(std::uint32_t a, std::uint32_t b) {
    return sizeof(T) == 2 ? __vmaxu2(a, b) : max(a, b);
  }

  // The 16 elements times `factor` in the FP8 format; bytes stay as they are.
  template <__nv_fp8_interpretation_t kFormat>
  __device__ __forceinline__ uint4 convert(float factor) const {
    float factors[kChunk];
#pragma unroll
    for (int j = 0; j < kChunk; ++j) factors[j] = factor;
    return convert_each<kFormat>(factors);
  }
  // The same with a factor for each.
  template <__nv_fp8_interpretation_t kFormat>
  __device__ __forceinline__ uint4 convert_each(const float (&factors)[kChunk]) const {
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
        for (int j = 0; j < N; ++j) values[v * N + j] = some[j] * factors[v * N + j];
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

__device__ __forceinline__ void store_some(std::uint8_t* p, const uint4& value, int count) {
  const std::uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    if (j < count) p[j] = static_cast<std::uint8_t>(words[j / 4] >> (8 * (j % 4)));
  }
}

// Writes a tile of bytes transposed to columns [c0, c0 + kTile) of a [cols, depth] copy, from row
// r0 of the source on. All threads have written the tile.
template <bool kAligned>
__device__ __forceinline__ void store_columns(const std::uint32_t* tile, std::uint8_t* columns,
                                              std::int64_t stride, std::int64_t r0, std::int64_t c0,
                                              std::int64_t cols, std::int64_t depth) {
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
  const auto depth_left = static_cast<int>(min(static_cast<std::int64_t>(kChunk), depth - row));
  if (depth_left <= 0) return;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const std::int64_t column = c0 + word * 4 + k;
    if (column >= cols) return;
    std::uint8_t* to = columns + column * stride + row;
    const uint4 bytes = make_uint4(out[k][0], out[k][1], out[k][2], out[k][3]);
    if constexpr (kAligned) {
      *reinterpret_cast<uint4*>(to) = bytes;
    } else {
      store_some(to, bytes, depth_left);
    }
  }
}

// Whether all rows that are there start at multiples of 16 bytes, and sizes are multiples of 16.
inline bool is_aligned_cast(const Tensor& in, const Tensor& row, const Tensor& column) {
  return in.cols() % kChunk == 0 && rows_aligned(in) && (!row.defined() || rows_aligned(row)) &&
         (!column.defined() || (rows_aligned(column) && column.cols() % kChunk == 0));
}

}  // namespace tessera::cuda
