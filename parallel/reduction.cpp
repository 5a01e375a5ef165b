#include "parallel/reduction.h"

#include <algorithm>
#include <cstring>

#include "engine/core/numeric.h"

namespace tessera {
namespace {

// Accumulators of one block stay in the first-level cache.
constexpr std::int64_t kBlock = 1024;
constexpr std::int64_t kCacheLine = 64;

template <typename Acc>
struct Sum {
  static Acc combine(Acc a, Acc b) { return a + b; }
};
// Integers wrap as every backend's do; signed overflow would be undefined.
template <>
struct Sum<std::int64_t> {
  static std::int64_t combine(std::int64_t a, std::int64_t b) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  }
};
template <>
struct Sum<std::int32_t> {
  static std::int32_t combine(std::int32_t a, std::int32_t b) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b));
  }
};
template <typename Acc>
struct Max {
  // A NaN on either side wins: a lost NaN would pass for a good step.
  static Acc combine(Acc a, Acc b) { return a > b || a != a ? a : b; }
};

template <typename T, typename Acc, template <typename> typename Op>
void reduce_typed(std::span<const void* const> inputs, std::span<void* const> outputs,
                  std::int64_t count) {
  Acc acc[kBlock];
  T rounded[kBlock];
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t n = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(inputs[0]) + begin;
    for (std::int64_t i = 0; i < n; ++i) acc[i] = static_cast<Acc>(first[i]);
    for (std::size_t r = 1; r < inputs.size(); ++r) {
      const T* next = static_cast<const T*>(inputs[r]) + begin;
      for (std::int64_t i = 0; i < n; ++i) {
        acc[i] = Op<Acc>::combine(acc[i], static_cast<Acc>(next[i]));
      }
    }
    for (std::int64_t i = 0; i < n; ++i) rounded[i] = static_cast<T>(acc[i]);
    for (void* output : outputs) {
      std::memcpy(static_cast<T*>(output) + begin, rounded,
                  static_cast<std::size_t>(n) * sizeof(T));
    }
  }
}

template <typename T, typename Acc>
void reduce_dtype(ReduceOp op, std::span<const void* const> inputs, std::span<void* const> outputs,
                  std::int64_t count) {
  if (op == ReduceOp::kSum) {
    reduce_typed<T, Acc, Sum>(inputs, outputs, count);
  } else {
    reduce_typed<T, Acc, Max>(inputs, outputs, count);
  }
}

}  // namespace

void reduce_in_rank_order(DType dtype, ReduceOp op, std::span<const void* const> inputs,
                          std::span<void* const> outputs, std::int64_t count) {
  if (count <= 0) return;
  switch (dtype) {
    case DType::kF64:
      return reduce_dtype<double, double>(op, inputs, outputs, count);
    case DType::kF32:
      return reduce_dtype<float, float>(op, inputs, outputs, count);
    case DType::kBF16:
      return reduce_dtype<bf16, float>(op, inputs, outputs, count);
    case DType::kI64:
      return reduce_dtype<std::int64_t, std::int64_t>(op, inputs, outputs, count);
    case DType::kI32:
      return reduce_dtype<std::int32_t, std::int32_t>(op, inputs, outputs, count);
    default:
      TESSERA_FAIL(ErrorKind::kInternal, "[reduce] cannot reduce {}", name_of(dtype));
  }
}

ElementRange slice_of(std::int64_t count, std::size_t element_bytes, int part, int parts) {
  const std::int64_t unit =
      std::max<std::int64_t>(1, kCacheLine / static_cast<std::int64_t>(element_bytes));
  const std::int64_t units = (count + unit - 1) / unit;
  ElementRange range;
  range.begin = std::min(count, units * part / parts * unit);
  range.end = std::min(count, units * (part + 1) / parts * unit);
  return range;
}

}  // namespace tessera
