// out[i] = in[0][i] + in[1][i] + ... (or their maximum), to several places. Bound by memory; a thread per
// element and no vectors, because the pieces that ranks cut may start anywhere.
#include "parallel/cuda/reduce_parts.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <type_traits>

#include "engine/device/cuda/cuda_check.h"
#include "engine/device/cuda/cuda_context.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

struct Parts {
  const void* inputs[kMaxReducedParts];
  void* outputs[kMaxReducedParts];
  int num_inputs;
  int num_outputs;
};

template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, float, T>;

template <typename A>
__device__ __forceinline__ A combine(A a, A b, bool is_max) {
  if (!is_max) return a + b;
  if constexpr (std::is_floating_point_v<A>) {
    return isnan(a) || a > b ? a : b;
  } else {
    return a > b ? a : b;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) reduce_parts_kernel(Parts parts, bool is_max, std::int64_t count) {
  using A = Accumulator<T>;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += stride) {
    A sum = static_cast<A>(static_cast<const T*>(parts.inputs[0])[i]);
    for (int p = 1; p < parts.num_inputs; ++p) {
      sum = combine(sum, static_cast<A>(static_cast<const T*>(parts.inputs[p])[i]), is_max);
    }
    const T result = static_cast<T>(sum);
    for (int p = 0; p < parts.num_outputs; ++p) static_cast<T*>(parts.outputs[p])[i] = result;
  }
}

}  // namespace

void reduce_parts(DType dtype, ReduceOp op, std::span<const void* const> inputs, std::span<void* const> outputs,
                  std::int64_t count, Stream& stream) {
  if (count == 0) return;
  CHECK(!inputs.empty() && inputs.size() <= kMaxReducedParts && outputs.size() <= kMaxReducedParts,
        "[reduce_parts] {} inputs and {} outputs, at most {} are supported", inputs.size(), outputs.size(),
        kMaxReducedParts);
  Parts parts{};
  std::copy(inputs.begin(), inputs.end(), parts.inputs);
  std::copy(outputs.begin(), outputs.end(), parts.outputs);
  parts.num_inputs = static_cast<int>(inputs.size());
  parts.num_outputs = static_cast<int>(outputs.size());
  const cudaStream_t s = native(stream);
  const std::int64_t wanted = (count + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(
      std::min<std::int64_t>(wanted, 8 * std::max(1, stream.context().capabilities().sm_count)));
  const auto launch = [&](auto kernel) {
    kernel<<<blocks, kThreads, 0, s>>>(parts, op == ReduceOp::kMax, count);
    CUDA_CHECK(cudaGetLastError());
  };
  switch (dtype) {
    case DType::kF64:
      return launch(reduce_parts_kernel<double>);
    case DType::kF32:
      return launch(reduce_parts_kernel<float>);
    case DType::kBF16:
      return launch(reduce_parts_kernel<__nv_bfloat16>);
    case DType::kI64:
      return launch(reduce_parts_kernel<std::int64_t>);
    case DType::kI32:
      return launch(reduce_parts_kernel<std::int32_t>);
    default:
      TESSERA_FAIL(ErrorKind::kInternal, "[reduce_parts] cannot reduce {}", name_of(dtype));
  }
}

}  // namespace tessera::cuda
