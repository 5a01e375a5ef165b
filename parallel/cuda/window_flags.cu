// raise: a fence and a store that the whole system sees. await: one thread that looks every few
// hundred nanoseconds. Both are bound by the latency of the link.
#include "parallel/cuda/window_flags.h"

#include "engine/device/cuda/cuda_check.h"

namespace tessera::cuda {
namespace {

constexpr unsigned kNapNanoseconds = 200;

__device__ __forceinline__ std::uint64_t load_acquire(const std::uint64_t* at) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

__device__ __forceinline__ std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Only this rank writes the word, so a load and a store do.
__global__ void raise_kernel(std::uint64_t* flag, std::uint64_t value) {
  __threadfence_system();
  if (load_acquire(flag) < value) store_release(flag, value);
}

// The first failure of a window stays.
__device__ void fail(const WindowWait& wait, WindowFailure::Code code, std::uint64_t current) {
  WindowFailure* failure = wait.failure;
  if (atomicCAS_system(&failure->code, static_cast<std::uint32_t>(WindowFailure::kNone),
                       static_cast<std::uint32_t>(WindowFailure::kBeingWritten)) !=
      WindowFailure::kNone) {
    return;
  }
  failure->flag = wait.flag;
  failure->wanted = wait.value;
  failure->current = current;
  __threadfence_system();
  atomicExch_system(&failure->code, static_cast<std::uint32_t>(code));
}

__global__ void await_kernel(WindowWait wait) {
  const std::uint64_t start = nanoseconds();
  for (;;) {
    std::uint64_t current = 0;
    for (int writer = 0; writer < wait.writers; ++writer) {
      const std::uint64_t value = load_acquire(wait.flags + writer * wait.stride);
      if (value > current) current = value;
    }
    if (current >= wait.value) return;
    if (load_acquire(&wait.header->is_poisoned) != 0) {
      return fail(wait, WindowFailure::kPoisoned, current);
    }
    if (nanoseconds() - start > wait.limit_nanoseconds) {
      return fail(wait, WindowFailure::kLate, current);
    }
    __nanosleep(kNapNanoseconds);
  }
}

}  // namespace

void raise_window_flag(std::uint64_t* flag, std::uint64_t value, cudaStream_t stream) {
  raise_kernel<<<1, 1, 0, stream>>>(flag, value);
  CUDA_CHECK(cudaGetLastError());
}

void await_window_flag(const WindowWait& wait, cudaStream_t stream) {
  await_kernel<<<1, 1, 0, stream>>>(wait);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace tessera::cuda
