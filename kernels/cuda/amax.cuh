// Recording the largest magnitude of what a kernel stores. Magnitudes are compared as their bits,
// which order like the numbers with NaN on top; a maximum does not depend on the order of threads,
// so the record is reproducible without one.
#pragma once

#include "kernels/cuda/common.cuh"

namespace tessera::cuda {

// A thread's running maximum over stored values of T, as bits of fp32.
template <typename T>
struct LargestMagnitude {
  std::uint32_t bits = 0;

  // One stored value or vector of them (Access<T, N>::Raw).
  __device__ __forceinline__ void add(T value) {
    if constexpr (sizeof(T) == 2) {
      bits = max(bits, static_cast<std::uint32_t>(*reinterpret_cast<const std::uint16_t*>(&value)) &
                           0x7fffu);
    } else {
      bits = max(bits, __float_as_uint(static_cast<float>(value)) & 0x7fffffffu);
    }
  }
  __device__ __forceinline__ void add(const uint4& raw) {
    if constexpr (sizeof(T) == 2) {
      // Two values per word; halves of the running maximum stay apart until the end.
      bits = __vmaxu2(bits, raw.x & 0x7fff7fffu);
      bits = __vmaxu2(bits, raw.y & 0x7fff7fffu);
      bits = __vmaxu2(bits, raw.z & 0x7fff7fffu);
      bits = __vmaxu2(bits, raw.w & 0x7fff7fffu);
    } else {
      bits = max(max(bits, raw.x & 0x7fffffffu),
                 max(raw.y & 0x7fffffffu, max(raw.z & 0x7fffffffu, raw.w & 0x7fffffffu)));
    }
  }

  // Every thread of the warp calls this once. The record is read first: once it is large, few warps
  // have anything to add, and atomics to one address are slow.
  __device__ __forceinline__ void record(float* amax) {
    std::uint32_t largest = bits;
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 ||
                  sizeof(T) == 8);  // fp64: never recorded, see check()
    if constexpr (sizeof(T) == 2) largest = max(largest & 0xffffu, largest >> 16) << 16;
    largest = __reduce_max_sync(0xffffffffu, largest);
    auto* record = reinterpret_cast<unsigned*>(amax);
    if (threadIdx.x % 32 == 0 && largest > __ldcg(record)) atomicMax(record, largest);
  }
};

inline float* amax_pointer(const Tensor& amax) {
  return amax.defined() ? static_cast<float*>(amax.data) : nullptr;
}

}  // namespace tessera::cuda
