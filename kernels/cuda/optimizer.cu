// Gradient norm, the step's scalars, and AdamW over the segments of a flat shard, one launch per shard.
// Bound by memory. A thread owns eight neighbouring elements; where they lie in one segment they move as
// vectors, otherwise one by one.
#include "kernels/cuda/common.cuh"
#include "kernels/cuda_workspace.h"
#include "kernels/ops.h"
#include "kernels/step_control.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 8;

struct Segments {
  const ShardSegment* data;
  std::int64_t count;
  explicit Segments(const Tensor& t)
      : data(static_cast<const ShardSegment*>(t.data)),
        count(t.numel() / static_cast<std::int64_t>(sizeof(ShardSegment))) {}

  // Index of the first segment that ends after `element`; count when there is none.
  __device__ __forceinline__ std::int64_t find(std::int64_t element) const {
    std::int64_t low = 0;
    std::int64_t high = count;
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      if (data[middle].end <= element) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

__device__ __forceinline__ double square(float x) {
  const double wide = static_cast<double>(x);
  return wide * wide;
}

// Block b adds elements [b * per_part, (b + 1) * per_part): the cut and the order depend on n alone.
__global__ void __launch_bounds__(kThreads)
    square_parts_kernel(const void* grad, DType dtype, std::int64_t n, bool is_aligned, Segments segments,
                        std::int64_t per_part, double* partial) {
  __shared__ double shared[32];
  const std::int64_t begin = blockIdx.x * per_part;
  const std::int64_t end = min(n, begin + per_part);
  double sum = 0;
  std::int64_t s = segments.find(begin + static_cast<std::int64_t>(threadIdx.x) * kWidth);
#pragma unroll 2
  for (std::int64_t i = begin + static_cast<std::int64_t>(threadIdx.x) * kWidth; i < end;
       i += kThreads * kWidth) {
    while (s < segments.count && segments.data[s].end <= i) ++s;
    if (s == segments.count) break;
    const ShardSegment& segment = segments.data[s];
    if (is_aligned && segment.begin <= i && i + kWidth <= min(segment.end, end)) {
      if (segment.count_in_norm == 0) continue;
      float g[kWidth];
      load_any8(grad, dtype, i, g);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += square(g[j]);
      continue;
    }
    std::int64_t at = s;
    for (std::int64_t e = i; e < min(end, i + kWidth); ++e) {
      while (at < segments.count && segments.data[at].end <= e) ++at;
      if (at == segments.count) break;
      if (segments.data[at].begin > e || segments.data[at].count_in_norm == 0) continue;
      sum += square(load_any<float>(grad, dtype, e));
    }
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(1024) add_squares_kernel(const double* partial, std::int64_t parts, double* sum) {
  __shared__ double shared[32];
  double total = 0;
  for (std::int64_t p = threadIdx.x; p < parts; p += blockDim.x) total += partial[p];
  total = block_sum(total, shared);
  if (threadIdx.x == 0) *sum += total;
}

__global__ void step_control_finish_kernel(StepControl* control, const double* sum, const double* denominator) {
  const double squares = *sum;
  const double count = *denominator;
  const bool has_targets = count > 0;
  const double norm = has_targets ? sqrt(squares) / count : 0.0;
  const bool finite = isfinite(squares) && isfinite(norm) && isfinite(count);
  double clip = 1.0;
  if (control->max_grad_norm > 0) clip = fmin(1.0, static_cast<double>(control->max_grad_norm) / (norm + 1e-6));
  control->sum_of_squares = squares;
  control->denominator = count;
  control->has_targets = has_targets ? 1 : 0;
  control->is_finite = finite ? 1 : 0;
  control->grad_norm = static_cast<float>(norm);
  control->grad_scale = has_targets && finite ? static_cast<float>(clip / count) : 0.0f;
  if (has_targets && finite) control->adam_step += 1;
}

struct AdamWArguments {
  void* weight;
  float* master;  // null: the weight itself is updated
  const void* grad;
  void* m;
  void* v;
  DType weight_dtype, grad_dtype, m_dtype, v_dtype;
  const StepControl* control;
  std::int64_t n;
  float beta1, beta2, eps;
  bool is_aligned;
};

struct AdamWStep {
  float grad_scale, correction1, correction2, rate, decay;
};

// bf16 by stochastic rounding with 16 random bits, as bf16::round_stochastic of engine/core/numeric.h.
__device__ __forceinline__ float round_stochastic(float value, std::uint32_t noise) {
  const std::uint32_t u = __float_as_uint(value);
  // Infinity and NaN keep their class.
  if ((u & 0x7f800000u) == 0x7f800000u) return __bfloat162float(__float2bfloat16_rn(value));
  return __uint_as_float((u + (noise & 0xffffu)) & 0xffff0000u);
}

__device__ __forceinline__ void update(const AdamWArguments& a, const AdamWStep& step, float g, float& p, float& m,
                                       float& v) {
  g *= step.grad_scale;
  m = a.beta1 * m + (1.0f - a.beta1) * g;
  v = a.beta2 * v + (1.0f - a.beta2) * g * g;
  // Approximate root and division (2 units in the last place): the exact ones would make this kernel
  // bound by arithmetic.
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(v * step.correction2));
  const float direction = __fdividef(m * step.correction1, root + a.eps);
  p -= step.rate * (step.decay * p + direction);
}

__device__ __forceinline__ std::uint64_t global_index(const ShardSegment& segment, std::int64_t element) {
  const std::int64_t local = segment.local_begin + (element - segment.begin);
  const std::int64_t row = divide(local, segment.local_cols);
  return static_cast<std::uint64_t>(segment.global_begin + row * segment.global_cols +
                                    (local - row * segment.local_cols));
}

// kNoisy: some stored value is bf16 and rounded stochastically.
template <bool kNoisy>
__device__ __forceinline__ void round_values(const AdamWArguments& a, const RoundingNoise& noise, float& p, float& m,
                                             float& v) {
  if constexpr (kNoisy) {
    if (a.master == nullptr && a.weight_dtype == DType::kBF16) p = round_stochastic(p, noise.weight);
    if (a.m_dtype == DType::kBF16) m = round_stochastic(m, noise.m);
    if (a.v_dtype == DType::kBF16) v = round_stochastic(v, noise.v);
  }
}

// The vectors of a thread are asked for before anything is known about its segment: they need not wait
// for the search.
template <bool kNoisy>
__global__ void __launch_bounds__(kThreads, 2) adamw_kernel(AdamWArguments a, Segments segments) {
  __shared__ float corrections[2];
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  const StepControl& control = *a.control;
  if (control.is_finite == 0 || control.has_targets == 0) return;
  const bool is_whole = a.is_aligned && i + kWidth <= a.n;
  float g[kWidth], p[kWidth], m[kWidth], v[kWidth];
  if (is_whole) {
    load_any8(a.grad, a.grad_dtype, i, g);
    load_any8(a.m, a.m_dtype, i, m);
    load_any8(a.v, a.v_dtype, i, v);
    if (a.master != nullptr) {
      load_any8(a.master, DType::kF32, i, p);
    } else {
      load_any8(a.weight, a.weight_dtype, i, p);
    }
  }
  if (threadIdx.x < 2) {
    // 1 / (1 - beta^t) without cancellation.
    const float beta = threadIdx.x == 0 ? a.beta1 : a.beta2;
    corrections[threadIdx.x] = -1.0f / expm1f(static_cast<float>(control.adam_step) * log1pf(beta - 1.0f));
  }
  __syncthreads();
  if (i >= a.n) return;
  std::int64_t s = segments.find(i);
  if (s == segments.count) return;
  AdamWStep step;
  step.grad_scale = control.grad_scale;
  step.correction1 = corrections[0];
  step.correction2 = corrections[1];
  if (is_whole && segments.data[s].begin <= i && i + kWidth <= segments.data[s].end) {
    const ShardSegment& segment = segments.data[s];
    step.rate = control.learning_rate * segment.lr_scale;
    step.decay = segment.weight_decay;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) update(a, step, g[j], p[j], m[j], v[j]);
    if constexpr (kNoisy) {
      const PhiloxKey key = rounding_key_of(control.rounding_key, segment.stream);
      const std::int64_t local = segment.local_begin + (i - segment.begin);
      std::int64_t row = divide(local, segment.local_cols);
      std::int64_t col = local - row * segment.local_cols;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const auto index = static_cast<std::uint64_t>(segment.global_begin + row * segment.global_cols + col);
        const RoundingNoise noise = rounding_noise(key, index);
        round_values<kNoisy>(a, noise, p[j], m[j], v[j]);
        if (++col == segment.local_cols) {
          col = 0;
          ++row;
        }
      }
    }
    store_any8(a.m, a.m_dtype, i, m);
    store_any8(a.v, a.v_dtype, i, v);
    if (a.master != nullptr) store_any8(a.master, DType::kF32, i, p);
    store_any8(a.weight, a.weight_dtype, i, p);
    return;
  }
  const std::int64_t end = min(a.n, i + kWidth);
  for (std::int64_t e = i; e < end; ++e) {
    while (s < segments.count && segments.data[s].end <= e) ++s;
    if (s == segments.count) return;
    const ShardSegment& segment = segments.data[s];
    if (segment.begin > e) continue;
    const float grad = load_any<float>(a.grad, a.grad_dtype, e);
    float m1 = load_any<float>(a.m, a.m_dtype, e);
    float v1 = load_any<float>(a.v, a.v_dtype, e);
    float p1 = a.master != nullptr ? a.master[e] : load_any<float>(a.weight, a.weight_dtype, e);
    step.rate = control.learning_rate * segment.lr_scale;
    step.decay = segment.weight_decay;
    update(a, step, grad, p1, m1, v1);
    if constexpr (kNoisy) {
      const PhiloxKey key = rounding_key_of(control.rounding_key, segment.stream);
      round_values<kNoisy>(a, rounding_noise(key, global_index(segment, e)), p1, m1, v1);
    }
    store_any<float>(a.m, a.m_dtype, e, m1);
    store_any<float>(a.v, a.v_dtype, e, v1);
    if (a.master != nullptr) a.master[e] = p1;
    store_any<float>(a.weight, a.weight_dtype, e, p1);
  }
}

}  // namespace

void sum_of_squares(const SumOfSquares& args, Stream& stream) {
  const std::int64_t n = args.grad.numel();
  if (n == 0) return;
  const Capabilities& target = stream.context().capabilities();
  const auto scratch = stream.scratch().take(device_scratch(args, target));
  const cudaStream_t s = native(stream);
  const std::int64_t parts = square_parts(n);
  // Multiples of a block's stride keep the vectors of a part aligned.
  const std::int64_t per_part = ceil_div(ceil_div(n, parts), kThreads * kWidth) * (kThreads * kWidth);
  const std::int64_t blocks = ceil_div(n, per_part);
  square_parts_kernel<<<grid_size(blocks), kThreads, 0, s>>>(args.grad.data, args.grad.dtype, n,
                                                             is_aligned(args.grad.data), Segments(args.segments),
                                                             per_part, static_cast<double*>(scratch.data()));
  TESSERA_LAUNCHED();
  add_squares_kernel<<<1, 1024, 0, s>>>(static_cast<const double*>(scratch.data()), blocks,
                                        pointer<double>(args.sum));
  TESSERA_LAUNCHED();
}

void step_control_finish(const StepControlFinish& args, Stream& stream) {
  const cudaStream_t s = native(stream);
  step_control_finish_kernel<<<1, 1, 0, s>>>(static_cast<StepControl*>(args.control.data), pointer<double>(args.sum),
                                             pointer<double>(args.denominator));
  TESSERA_LAUNCHED();
}

void adamw(const AdamW& args, Stream& stream) {
  const std::int64_t n = args.grad.numel();
  if (n == 0 || args.segments.numel() == 0) return;
  const cudaStream_t s = native(stream);
  AdamWArguments a{};
  a.weight = args.weight.data;
  a.master = args.master.defined() ? pointer<float>(args.master) : nullptr;
  a.grad = args.grad.data;
  a.m = args.m.data;
  a.v = args.v.data;
  a.weight_dtype = args.weight.dtype;
  a.grad_dtype = args.grad.dtype;
  a.m_dtype = args.m.dtype;
  a.v_dtype = args.v.dtype;
  a.control = static_cast<const StepControl*>(args.control.data);
  a.n = n;
  a.beta1 = args.beta1;
  a.beta2 = args.beta2;
  a.eps = args.eps;
  a.is_aligned = is_aligned(a.weight) && is_aligned(a.master) && is_aligned(a.grad) && is_aligned(a.m) &&
                 is_aligned(a.v);
  const bool noisy = a.m_dtype == DType::kBF16 || a.v_dtype == DType::kBF16 ||
                     (a.master == nullptr && a.weight_dtype == DType::kBF16);
  const unsigned grid = grid_size(ceil_div(n, kThreads * kWidth));
  if (noisy) {
    adamw_kernel<true><<<grid, kThreads, 0, s>>>(a, Segments(args.segments));
  } else {
    adamw_kernel<false><<<grid, kThreads, 0, s>>>(a, Segments(args.segments));
  }
  TESSERA_LAUNCHED();
}

}  // namespace tessera::cuda
