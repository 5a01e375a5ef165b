// Shared pieces of the CUDA kernels: 16-byte accesses with conversion to the arithmetic type, block
// reductions in a fixed order, dtype dispatch and launching. Included by kernels/cuda/*.cu only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "engine/core/error.h"
#include "engine/core/tensor.h"
#include "engine/device/cuda/cuda_check.h"
#include "engine/device/cuda/cuda_context.h"
#include "engine/memory/scratch.h"

namespace tessera::cuda {

// ---- Elements -------------------------------------------------------------------------------------

template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ __forceinline__ float to_compute(float x) { return x; }
__device__ __forceinline__ double to_compute(double x) { return x; }
__device__ __forceinline__ float to_compute(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T, typename C>
__device__ __forceinline__ T from_compute(C x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(x));
  } else {
    return static_cast<T>(x);
  }
}

// Access<T, N>: N neighbouring elements moved as one value: 16 bytes when N is kVector<T>, else one.
template <typename T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <typename T, int N>
struct Access {
  static_assert(N == 1 || N * sizeof(T) == 16);
  using C = Compute<T>;
  using Raw = std::conditional_t<N == 1, T, uint4>;

  static __device__ __forceinline__ Raw load(const T* p) {
    return *reinterpret_cast<const Raw*>(p);
  }
  static __device__ __forceinline__ void store(T* p, Raw raw) { *reinterpret_cast<Raw*>(p) = raw; }

  static __device__ __forceinline__ void unpack(const Raw& raw, C (&out)[N]) {
    if constexpr (N == 1) {
      out[0] = to_compute(raw);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out[2 * i] = __uint_as_float(words[i] << 16);
        out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      }
    } else if constexpr (std::is_same_v<T, float>) {
      out[0] = __uint_as_float(raw.x);
      out[1] = __uint_as_float(raw.y);
      out[2] = __uint_as_float(raw.z);
      out[3] = __uint_as_float(raw.w);
    } else {
      out[0] = __hiloint2double(static_cast<int>(raw.y), static_cast<int>(raw.x));
      out[1] = __hiloint2double(static_cast<int>(raw.w), static_cast<int>(raw.z));
    }
  }

  static __device__ __forceinline__ Raw pack(const C (&in)[N]) {
    if constexpr (N == 1) {
      return from_compute<T>(in[0]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
        words[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
      }
      return make_uint4(words[0], words[1], words[2], words[3]);
    } else if constexpr (std::is_same_v<T, float>) {
      return make_uint4(__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]),
                        __float_as_uint(in[3]));
    } else {
      return make_uint4(__double2loint(in[0]), __double2hiint(in[0]), __double2loint(in[1]),
                        __double2hiint(in[1]));
    }
  }

  static __device__ __forceinline__ void read(const T* p, C (&out)[N]) { unpack(load(p), out); }
  static __device__ __forceinline__ void write(T* p, const C (&in)[N]) { store(p, pack(in)); }
};

// ---- Elements whose type is known at run time only (the branch is the same for all threads) -------

template <typename C>
__device__ __forceinline__ C load_any(const void* base, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kF64:
      return static_cast<C>(static_cast<const double*>(base)[i]);
    case DType::kF32:
      return static_cast<C>(static_cast<const float*>(base)[i]);
    case DType::kBF16:
      return static_cast<C>(__bfloat162float(static_cast<const __nv_bfloat16*>(base)[i]));
    case DType::kF16:
      return static_cast<C>(__half2float(static_cast<const __half*>(base)[i]));
    case DType::kF8E4M3: {
      __nv_fp8_e4m3 x;
      x.__x = static_cast<const std::uint8_t*>(base)[i];
      return static_cast<C>(static_cast<float>(x));
    }
    case DType::kF8E5M2: {
      __nv_fp8_e5m2 x;
      x.__x = static_cast<const std::uint8_t*>(base)[i];
      return static_cast<C>(static_cast<float>(x));
    }
    default:
      return C(0);
  }
}

template <typename C>
__device__ __forceinline__ void store_any(void* base, DType dtype, std::int64_t i, C value) {
  const float single = static_cast<float>(value);
  switch (dtype) {
    case DType::kF64:
      static_cast<double*>(base)[i] = static_cast<double>(value);
      return;
    case DType::kF32:
      static_cast<float*>(base)[i] = single;
      return;
    case DType::kBF16:
      static_cast<__nv_bfloat16*>(base)[i] = __float2bfloat16_rn(single);
      return;
    case DType::kF16:
      static_cast<__half*>(base)[i] = __float2half_rn(single);
      return;
    case DType::kF8E4M3:
      static_cast<std::uint8_t*>(base)[i] = __nv_cvt_float_to_fp8(single, __NV_SATFINITE, __NV_E4M3);
      return;
    case DType::kF8E5M2:
      static_cast<std::uint8_t*>(base)[i] = __nv_cvt_float_to_fp8(single, __NV_SATFINITE, __NV_E5M2);
      return;
    default:
      return;
  }
}

// Eight elements from an index that is a multiple of eight; `base` is aligned to 16 bytes.
template <typename C>
__device__ __forceinline__ void load_any8(const void* base, DType dtype, std::int64_t i, C (&out)[8]) {
  if (dtype == DType::kBF16) {
    float values[8];
    Access<__nv_bfloat16, 8>::read(static_cast<const __nv_bfloat16*>(base) + i, values);
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] = static_cast<C>(values[j]);
  } else if (dtype == DType::kF32) {
    const float4* p = reinterpret_cast<const float4*>(static_cast<const float*>(base) + i);
    const float4 a = p[0];
    const float4 b = p[1];
    out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
    out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
  } else if (dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2) {
    const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const std::uint8_t*>(base) + i);
    const __nv_fp8_interpretation_t kind = dtype == DType::kF8E4M3 ? __NV_E4M3 : __NV_E5M2;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const std::uint32_t word = j < 4 ? raw.x : raw.y;
      const auto bits = static_cast<__nv_fp8_storage_t>(word >> (8 * (j & 3)));
      out[j] = static_cast<C>(__half2float(__half(__nv_cvt_fp8_to_halfraw(bits, kind))));
    }
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] = load_any<C>(base, dtype, i + j);
  }
}

template <typename C>
__device__ __forceinline__ void store_any8(void* base, DType dtype, std::int64_t i, const C (&in)[8]) {
  if (dtype == DType::kBF16) {
    float values[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = static_cast<float>(in[j]);
    Access<__nv_bfloat16, 8>::write(static_cast<__nv_bfloat16*>(base) + i, values);
  } else if (dtype == DType::kF32) {
    float4* p = reinterpret_cast<float4*>(static_cast<float*>(base) + i);
    p[0] = make_float4(in[0], in[1], in[2], in[3]);
    p[1] = make_float4(in[4], in[5], in[6], in[7]);
  } else if (dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2) {
    const __nv_fp8_interpretation_t kind = dtype == DType::kF8E4M3 ? __NV_E4M3 : __NV_E5M2;
    std::uint32_t words[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float2 pair = make_float2(static_cast<float>(in[j]), static_cast<float>(in[j + 1]));
      const std::uint32_t bits = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, kind);
      words[j / 4] |= bits << (8 * (j & 3));
    }
    *reinterpret_cast<uint2*>(static_cast<std::uint8_t*>(base) + i) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) store_any<C>(base, dtype, i + j, in[j]);
  }
}

// a / b for a >= 0, b > 0, in 32 bits where they fit (64-bit division is a long software routine).
__device__ __forceinline__ std::int64_t divide(std::int64_t a, std::int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
  return a / b;
}

template <typename C>
__device__ __forceinline__ C minus_infinity() {
  if constexpr (sizeof(C) == 8) {
    return __longlong_as_double(static_cast<long long>(0xfff0000000000000ull));
  } else {
    return __uint_as_float(0xff800000u);
  }
}

// ---- Reductions in a fixed order ------------------------------------------------------------------

template <typename C>
__device__ __forceinline__ C warp_sum(C value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

template <typename C>
__device__ __forceinline__ C warp_max(C value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value = max(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// Sum over the block, returned to every thread. `shared` holds 32 values; calls that follow each other
// without a barrier in between must alternate between two such arrays.
template <typename C>
__device__ __forceinline__ C block_sum(C value, C* shared) {
  value = warp_sum(value);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  const int warps = (blockDim.x + 31) / 32;
  return warp_sum(lane < warps ? shared[lane] : C(0));
}

// ---- Host side ------------------------------------------------------------------------------------

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls f(TypeTag<T>{}) for fp64, fp32 and bf16, the dtypes that check() lets through.
template <typename F>
void visit_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF64:
      return f(TypeTag<double>{});
    case DType::kF32:
      return f(TypeTag<float>{});
    case DType::kBF16:
      return f(TypeTag<__nv_bfloat16>{});
    default:
      TESSERA_FAIL(ErrorKind::kInternal, "[cuda] no kernel for {}", name_of(dtype));
  }
}

template <typename T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.data);
}

// Whether every row of the tensor starts at a multiple of 16 bytes.
inline bool rows_aligned(const Tensor& t) {
  return reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 &&
         (t.rows() <= 1 || (static_cast<std::size_t>(t.row_stride) * size_of(t.dtype)) % 16 == 0);
}
inline bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

inline unsigned grid_size(std::int64_t blocks) {
  CHECK(blocks <= 0x7fffffff, "[cuda] a grid of {} blocks is above 2^31 - 1", blocks);
  return static_cast<unsigned>(blocks);
}

// Rows of `cols` units of work cut into chunks: block b does chunk b % chunks of row b / chunks.
struct RowChunks {
  std::int64_t rows;
  std::int64_t cols;
  unsigned chunks;  // 32 bits: a 64-bit division costs as much as the rest of a small kernel
  RowChunks(std::int64_t rows, std::int64_t cols, std::int64_t per_block)
      : rows(rows), cols(cols), chunks(grid_size(ceil_div(cols, per_block))) {}
  unsigned blocks() const { return grid_size(rows * chunks); }
};

inline int sm_count(Stream& stream) { return stream.context().capabilities().sm_count; }

#define TESSERA_LAUNCHED() CUDA_CHECK(cudaGetLastError())

}  // namespace tessera::cuda
