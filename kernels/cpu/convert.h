// Runs of elements of any floating dtype to and from fp32 or fp64: for kernels that mix dtypes.
// Included by kernels/cpu/*.cpp only.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/cpu/common.h"

namespace tessera::cpu {

// Elements handled at a time by kernels that convert: a few buffers of them stay in the L1 cache.
inline constexpr std::int64_t kRun = 1024;

inline char* element(const Tensor& t, std::int64_t row_index, std::int64_t col) {
  return static_cast<char*>(t.data) +
         (row_index * t.row_stride + col) * static_cast<std::int64_t>(size_of(t.dtype));
}

// fp64 to fp32 by rounding to odd: a later rounding to a narrower format is then as if done from fp64.
inline float to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || !std::isfinite(nearest)) return nearest;
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  const bool rounded_away = std::abs(static_cast<double>(nearest)) > std::abs(value);
  return std::bit_cast<float>((bits - (rounded_away ? 1u : 0u)) | 1u);
}

template <typename C, typename T>
void load_as(const void* data, std::int64_t n, C* out) {
  const T* in = static_cast<const T*>(data);
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<C>(load(in[i]));
}

template <typename C, typename T>
void store_as(const C* in, std::int64_t n, void* data) {
  T* out = static_cast<T*>(data);
  if constexpr (std::is_same_v<C, double> && !std::is_arithmetic_v<T>) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = T(to_odd(in[i]));
  } else {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) out[i] = store<T>(in[i]);
  }
}

// Calls f(TypeTag<T>{}) for any floating dtype.
template <typename F>
void visit_any_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF16:
      return f(TypeTag<f16>{});
    case DType::kF8E4M3:
      return f(TypeTag<f8e4m3>{});
    case DType::kF8E5M2:
      return f(TypeTag<f8e5m2>{});
    default:
      return visit_float(dtype, f);
  }
}

// n <= kRun elements of `dtype` at `data` as C: the memory itself, or converted into `buffer`.
template <typename C>
const C* read_run(const void* data, DType dtype, std::int64_t n, C* buffer) {
  if (dtype == DTypeOf<C>::value) return static_cast<const C*>(data);
  visit_any_float(dtype, [&]<typename T>(TypeTag<T>) { load_as<C, T>(data, n, buffer); });
  return buffer;
}

// Where to compute n <= kRun elements that will be stored as `dtype` at `data`; write_run() finishes.
template <typename C>
C* output_run(void* data, DType dtype, C* buffer) {
  return dtype == DTypeOf<C>::value ? static_cast<C*>(data) : buffer;
}
template <typename C>
void write_run(const C* values, void* data, DType dtype, std::int64_t n) {
  if (values == data) return;
  visit_any_float(dtype, [&]<typename T>(TypeTag<T>) { store_as<C, T>(values, n, data); });
}

}  // namespace tessera::cpu
