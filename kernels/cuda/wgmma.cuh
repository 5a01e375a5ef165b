// Hopper's warpgroup products (wgmma, PTX ISA 9.7.15) for bf16 operands, and the barriers that feed
// them. A warpgroup is four consecutive warps that start at a multiple of four.
//
// Operands in shared memory are panels of 64 columns: a row takes 128 bytes, its 16-byte chunk c
// lies at place c ^ (row % 8), and a panel starts at a multiple of 1,024 bytes (the 128-byte
// swizzle). One panel serves as either kind of operand: with the summed index along its columns
// (K-major) or along its rows (MN-major).
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/cuda/async_copy.cuh"

namespace tessera::cuda {

// The instructions exist in code for sm_90a alone; code for other GPUs traps where they would be.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TESSERA_HAS_WGMMA 1
#else
#define TESSERA_HAS_WGMMA 0
#endif

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 128;

// Byte offset of the 16-byte chunk `chunk` of row `row` in a panel.
__device__ __forceinline__ int panel_offset(int row, int chunk) {
  return row * kPanelRowBytes + ((chunk ^ (row % 8)) << 4);
}

// Describes an operand that starts `address` bytes into shared memory. Groups of eight rows lie
// 1,024 bytes apart; `panel_bytes`, the distance of panels, matters to an MN-major operand of more
// than 64 columns alone.
__device__ __forceinline__ std::uint64_t panel_descriptor(std::uint32_t address, std::uint32_t panel_bytes) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kGroupStride = std::uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kGroupStride | (static_cast<std::uint64_t>(panel_bytes >> 4) << 16) |
         ((address & 0x3ffffu) >> 4);
}

#if TESSERA_HAS_WGMMA

// Orders accesses to registers before the next products that use them.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending groups of products are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Registers of an accumulator, eight at a time, under a constraint: "+f" where a product adds to
// them, "=f" where it sets them. A product that sets must not name their old values: the compiler
// would wait for all products under way before anything else is computed in these registers.
#define TESSERA_D8(c, d, i) \
  c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define TESSERA_D32(c, d, i) \
  TESSERA_D8(c, d, i), TESSERA_D8(c, d, i + 8), TESSERA_D8(c, d, i + 16), TESSERA_D8(c, d, i + 24)
#define TESSERA_D64(c, d) TESSERA_D32(c, d, 0), TESSERA_D32(c, d, 32)
#define TESSERA_R32                                                                             \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TESSERA_R64                                                                                   \
  TESSERA_R32                                                                                         \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
  "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TESSERA_WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 "

// d[64, N] = a[64, 16] b[N, 16]^T, added to d where kAdds; both K-major in shared memory, N = 2 *
// the number of registers.
template <bool kAdds>
__device__ __forceinline__ void wgmma_shared(float (&d)[32], std::uint64_t a, std::uint64_t b) {
  if constexpr (kAdds) {
    asm volatile(TESSERA_WGMMA(64) TESSERA_R32 "}, %32, %33, 1, 1, 1, 0, 0;"
                 : TESSERA_D32("+f", d, 0)
                 : "l"(a), "l"(b));
  } else {
    asm volatile(TESSERA_WGMMA(64) TESSERA_R32 "}, %32, %33, 0, 1, 1, 0, 0;"
                 : TESSERA_D32("=f", d, 0)
                 : "l"(a), "l"(b));
  }
}
template <bool kAdds>
__device__ __forceinline__ void wgmma_shared(float (&d)[64], std::uint64_t a, std::uint64_t b) {
  if constexpr (kAdds) {
    asm volatile(TESSERA_WGMMA(128) TESSERA_R64 "}, %64, %65, 1, 1, 1, 0, 0;" : TESSERA_D64("+f", d) : "l"(a), "l"(b));
  } else {
    asm volatile(TESSERA_WGMMA(128) TESSERA_R64 "}, %64, %65, 0, 1, 1, 0, 0;" : TESSERA_D64("=f", d) : "l"(a), "l"(b));
  }
}

// d[64, N] += a[64, 16] b[16, N]: a in registers, b MN-major in shared memory.
__device__ __forceinline__ void wgmma_registers(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b) {
  asm volatile(TESSERA_WGMMA(64) TESSERA_R32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
               : TESSERA_D32("+f", d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_registers(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b) {
  asm volatile(TESSERA_WGMMA(128) TESSERA_R64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : TESSERA_D64("+f", d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef TESSERA_D8
#undef TESSERA_D32
#undef TESSERA_D64
#undef TESSERA_R32
#undef TESSERA_R64
#undef TESSERA_WGMMA

// Registers per thread, moved between the warpgroups of a block.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#endif  // TESSERA_HAS_WGMMA

// Writes of this thread to shared memory become visible to products that are issued behind the next
// barrier.
__device__ __forceinline__ void fence_shared_for_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier in shared memory that `count` arrivals complete; it then starts its next phase.
__device__ __forceinline__ void barrier_init(std::uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}
__device__ __forceinline__ void barrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Waits for the end of the phase with this parity (0 for the first).
__device__ __forceinline__ void barrier_wait(std::uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni end;\n"
      "bra.uni again;\n"
      "end:\n}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// A barrier of `kThreads` threads of the block; numbers 1 to 15.
template <int kThreads>
__device__ __forceinline__ void sync_threads(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}

}  // namespace tessera::cuda
