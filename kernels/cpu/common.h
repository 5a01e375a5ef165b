// Shared pieces of the CPU kernels: element conversion, dtype dispatch, fixed-order sums, splitting
// over threads. Included by kernels/cpu/*.cpp only (they alone are compiled for the machine's vectors).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "engine/core/tensor.h"
#include "engine/device/cpu/cpu_stream.h"
#include "engine/memory/scratch.h"
#include "kernels/cpu/row_pieces.h"

namespace tessera::cpu {

// Arithmetic type of elements stored as T.
template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
inline Compute<T> load(T value) {
  return static_cast<Compute<T>>(value);
}

// Rounds once, to nearest even.
template <typename T, typename C>
inline T store(C value) {
  if constexpr (std::is_same_v<T, C>) {
    return value;
  } else if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(value);
  } else {
    return T(static_cast<float>(value));
  }
}

// Start of row `i` of a tensor seen as [rows, cols].
template <typename T>
inline T* row(const Tensor& t, std::int64_t i) {
  return static_cast<T*>(t.data) + i * t.row_stride;
}

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls f(TypeTag<T>{}) for the element type of a tensor that check() has restricted to fp64, fp32, bf16.
template <typename F>
void visit_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF64:
      return f(TypeTag<double>{});
    case DType::kF32:
      return f(TypeTag<float>{});
    case DType::kBF16:
      return f(TypeTag<bf16>{});
    default:
      TESSERA_FAIL(ErrorKind::kInternal, "[cpu] no kernel for {}", name_of(dtype));
  }
}

// For gradients of parameters: T itself, or fp32 beside bf16.
template <typename T, typename F>
void visit_gradient(DType dtype, F&& f) {
  if (dtype == DTypeOf<T>::value) return f(TypeTag<T>{});
  CHECK(dtype == DType::kF32, "[cpu] no kernel for a {} gradient", name_of(dtype));
  return f(TypeTag<float>{});
}

// Sum of f(i) for i in [0, n): vector lanes within chunks, chunks in double. The order depends on n alone.
// Inlined always: out of line the loop would fetch what f captured anew in every lane.
template <typename C, typename F>
[[gnu::always_inline]] inline double fixed_sum(std::int64_t n, F f) {
  constexpr std::int64_t kChunk = 1024;
  double total = 0;
  for (std::int64_t begin = 0; begin < n; begin += kChunk) {
    const std::int64_t end = std::min(n, begin + kChunk);
    C partial = 0;
#pragma omp simd reduction(+ : partial)
    for (std::int64_t i = begin; i < end; ++i) partial += f(i);
    total += static_cast<double>(partial);
  }
  return total;
}

// Runs item(i, slot) for i in [0, count): each thread takes the next free item, so uneven items
// balance; `slot` < slots numbers the scratch of the running thread. Items must not depend on each
// other's results, which keeps the outcome independent of the number of threads. There is one call of
// `item` on purpose: two inlined copies of it may be contracted to different fused multiply-adds.
template <typename F>
void for_each_item(ThreadTeam& team, std::int64_t count, int slots, F&& item) {
  std::atomic<std::int64_t> next{0};
  team.parallel_for(std::min<std::int64_t>(slots, count), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t slot = begin; slot < end; ++slot) {
      for (std::int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
           i = next.fetch_add(1, std::memory_order_relaxed)) {
        item(i, static_cast<int>(slot));
      }
    }
  });
}

// Scratch of the stream for one op; an op that needs none runs on a stream without a stack.
inline ScratchStack::Piece take_scratch(Stream& stream, std::size_t bytes) {
  if (bytes == 0) return ScratchStack::Piece(nullptr, 0, nullptr, 0);
  return stream.scratch().take(bytes);
}

// Rows per range such that a thread gets at least ~32k elements.
inline std::int64_t row_grain(std::int64_t cols) {
  return std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, cols));
}

// out[j] (+)= sum over pieces of partial[piece * stride + j], in order of the pieces.
template <typename W, typename C>
void add_pieces(const C* partial, std::int64_t pieces, std::int64_t stride, std::int64_t n,
                bool accumulate, W* out) {
  for (std::int64_t j = 0; j < n; ++j) {
    C sum = accumulate ? static_cast<C>(load(out[j])) : C(0);
    for (std::int64_t piece = 0; piece < pieces; ++piece) sum += partial[piece * stride + j];
    out[j] = store<W>(sum);
  }
}

}  // namespace tessera::cpu
