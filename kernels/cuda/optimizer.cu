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
  const bool has_targets = !(count <= 0);  // NaN is no lack of targets but a fault
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

// One element with the random bits of its place, rounded to the types it is stored as.
__device__ __forceinline__ void update_element(const AdamWArguments& a, const AdamWStep& step,
                                               const RoundingNoise& noise, float g, float& p, float& m, float& v) {
  update(a, step, g, p, m, v);
  if (a.master == nullptr && a.weight_dtype == DType::kBF16) p = round_stochastic(p, noise.weight);
  if (a.m_dtype == DType::kBF16) m = round_stochastic(m, noise.m);
  if (a.v_dtype == DType::kBF16) v = round_stochastic(v, noise.v);
}

__device__ __forceinline__ std::uint64_t global_index(const ShardSegment& segment, std::int64_t element) {
  const std::int64_t local = segment.local_begin + (element - segment.begin);
  const std::int64_t row = divide(local, segment.local_cols);
  return static_cast<std::uint64_t>(segment.global_begin + row * segment.global_cols +
                                    (local - row * segment.local_cols));
}

// 1 / (1 - beta^t) without cancellation, in shared memory behind the next barrier.
__device__ __forceinline__ void find_corrections(const AdamWArguments& a, float (&corrections)[2]) {
  if (threadIdx.x < 2) {
    const float beta = threadIdx.x == 0 ? a.beta1 : a.beta2;
    corrections[threadIdx.x] = -1.0f / expm1f(static_cast<float>(a.control->adam_step) * log1pf(beta - 1.0f));
  }
}

__device__ __forceinline__ AdamWStep shared_step(const StepControl& control, const float (&corrections)[2]) {
  AdamWStep step{};
  step.grad_scale = control.grad_scale;
  step.correction1 = corrections[0];
  step.correction2 = corrections[1];
  return step;
}

// Elements [begin, end) one by one, from the segment s on.
__device__ __noinline__ void update_one_by_one(const AdamWArguments& a, AdamWStep step, const Segments& segments,
                                               std::int64_t s, std::int64_t begin, std::int64_t end) {
  for (std::int64_t e = begin; e < end; ++e) {
    while (s < segments.count && segments.data[s].end <= e) ++s;
    if (s == segments.count) return;
    const ShardSegment& segment = segments.data[s];
    if (segment.begin > e) continue;
    const float g = load_any<float>(a.grad, a.grad_dtype, e);
    float m = load_any<float>(a.m, a.m_dtype, e);
    float v = load_any<float>(a.v, a.v_dtype, e);
    float p = a.master != nullptr ? a.master[e] : load_any<float>(a.weight, a.weight_dtype, e);
    step.rate = a.control->learning_rate * segment.lr_scale;
    step.decay = segment.weight_decay;
    const PhiloxKey key = rounding_key_of(a.control->rounding_key, segment.stream);
    update_element(a, step, rounding_noise(key, global_index(segment, e)), g, p, m, v);
    store_any<float>(a.m, a.m_dtype, e, m);
    store_any<float>(a.v, a.v_dtype, e, v);
    if (a.master != nullptr) a.master[e] = p;
    store_any<float>(a.weight, a.weight_dtype, e, p);
  }
}

// Eight neighbouring elements as they lie in memory: read before anything is known about their
// segment, unpacked when it is.
template <typename T>
struct Octet {
  using A = Access<T, kVector<T>>;
  static constexpr int kVectors = kWidth / kVector<T>;
  typename A::Raw raw[kVectors];

  __device__ __forceinline__ void load(const void* base, std::int64_t i) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) raw[k] = A::load(static_cast<const T*>(base) + i + k * kVector<T>);
  }
  __device__ __forceinline__ void unpack(float (&out)[kWidth]) const {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      float part[kVector<T>];
      A::unpack(raw[k], part);
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) out[k * kVector<T> + j] = part[j];
    }
  }
  static __device__ __forceinline__ void store(void* base, std::int64_t i, const float (&in)[kWidth]) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      float part[kVector<T>];
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) part[j] = in[k * kVector<T> + j];
      A::write(static_cast<T*>(base) + i + k * kVector<T>, part);
    }
  }
};

// W, G, M: weights, gradients and both moments; kHasMaster: fp32 masters are updated and the weights
// are their copies. Philox blocks serve pairs of elements: drawing the random bits is most of the
// arithmetic.
template <typename W, typename G, typename M, bool kHasMaster>
__global__ void __launch_bounds__(kThreads, 3) adamw_kernel(AdamWArguments a, Segments segments) {
  using P = std::conditional_t<kHasMaster, float, W>;
  constexpr bool kNoisyWeight = std::is_same_v<P, __nv_bfloat16>;
  constexpr bool kNoisyMoments = std::is_same_v<M, __nv_bfloat16>;
  __shared__ float corrections[2];
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  const StepControl& control = *a.control;
  if (control.is_finite == 0 || control.has_targets == 0) return;
  void* parameter = kHasMaster ? static_cast<void*>(a.master) : a.weight;
  const bool is_whole = i + kWidth <= a.n;
  Octet<P> old_p;
  Octet<G> old_g;
  Octet<M> old_m, old_v;
  if (is_whole) {
    old_g.load(a.grad, i);
    old_m.load(a.m, i);
    old_v.load(a.v, i);
    old_p.load(parameter, i);
  }
  find_corrections(a, corrections);
  __syncthreads();
  if (i >= a.n) return;
  const std::int64_t s = segments.find(i);
  if (s == segments.count) return;
  const ShardSegment& segment = segments.data[s];
  AdamWStep step = shared_step(control, corrections);
  if (!is_whole || segment.begin > i || i + kWidth > segment.end) {
    update_one_by_one(a, step, segments, s, i, min(a.n, i + kWidth));
    return;
  }
  step.rate = control.learning_rate * segment.lr_scale;
  step.decay = segment.weight_decay;
  float g[kWidth], p[kWidth], m[kWidth], v[kWidth];
  old_g.unpack(g);
  old_m.unpack(m);
  old_v.unpack(v);
  old_p.unpack(p);
  if constexpr (kNoisyWeight || kNoisyMoments) {
    const PhiloxKey key = rounding_key_of(control.rounding_key, segment.stream);
    const auto round = [&](int j, const RoundingNoise& noise) {
      update(a, step, g[j], p[j], m[j], v[j]);
      if constexpr (kNoisyWeight) p[j] = round_stochastic(p[j], noise.weight);
      if constexpr (kNoisyMoments) {
        m[j] = round_stochastic(m[j], noise.m);
        v[j] = round_stochastic(v[j], noise.v);
      }
    };
    const std::int64_t local = segment.local_begin + (i - segment.begin);
    const std::int64_t row = divide(local, segment.local_cols);
    std::int64_t left = (row + 1) * segment.local_cols - local;
    auto index = static_cast<std::uint64_t>(segment.global_begin + row * segment.global_cols +
                                            (segment.local_cols - left));
    const bool is_paired = (index | left | segment.local_cols | segment.global_cols) % 2 == 0;
    if (is_paired) {
#pragma unroll
      for (int j = 0; j < kWidth; j += 2) {
        const PhiloxBlock block = philox(key, index / 2);
        round(j, rounding_noise_of(block, 0));
        round(j + 1, rounding_noise_of(block, 1));
        index += 2;
        if ((left -= 2) == 0) {
          left = segment.local_cols;
          index += segment.global_cols - segment.local_cols;
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) round(j, rounding_noise(key, global_index(segment, i + j)));
    }
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) update(a, step, g[j], p[j], m[j], v[j]);
  }
  Octet<M>::store(a.m, i, m);
  Octet<M>::store(a.v, i, v);
  if constexpr (kHasMaster) Octet<float>::store(a.master, i, p);
  Octet<W>::store(a.weight, i, p);
}

// Any mix of types and any alignment.
__global__ void __launch_bounds__(kThreads) adamw_any_kernel(AdamWArguments a, Segments segments) {
  __shared__ float corrections[2];
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (a.control->is_finite == 0 || a.control->has_targets == 0) return;
  find_corrections(a, corrections);
  __syncthreads();
  if (i >= a.n) return;
  update_one_by_one(a, shared_step(*a.control, corrections), segments, segments.find(i), i, min(a.n, i + kWidth));
}

// Eight codes of a thread as they lie in memory.
struct alignas(8) Codes {
  std::uint8_t at[kWidth];
};
static_assert(32 * kWidth == kMomentBlock, "a warp owns a block of moments");

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

// With 8-bit moments: a warp decodes a block, updates it and encodes it under its new scale. n is a
// multiple of the block, so that all threads of a warp are within it or none.
__global__ void __launch_bounds__(kThreads, 2)
    adamw_codes_kernel(AdamWArguments a, float* m_scales, float* v_scales, Segments segments) {
  __shared__ float corrections[2];
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  const StepControl& control = *a.control;
  if (control.is_finite == 0 || control.has_targets == 0) return;
  find_corrections(a, corrections);
  __syncthreads();
  if (i >= a.n) return;
  Codes* m_codes = reinterpret_cast<Codes*>(static_cast<std::uint8_t*>(a.m) + i);
  Codes* v_codes = reinterpret_cast<Codes*>(static_cast<std::uint8_t*>(a.v) + i);
  const std::int64_t block = i / kMomentBlock;
  float g[kWidth], p[kWidth], m[kWidth], v[kWidth];
  std::uint32_t m_noise[kWidth], v_noise[kWidth];
  {
    const Codes old_m = *m_codes, old_v = *v_codes;
    const float m_scale = m_scales[block], v_scale = v_scales[block];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      m[j] = decode_m(old_m.at[j]) * m_scale;
      v[j] = decode_v(old_v.at[j]) * v_scale;
      m_noise[j] = v_noise[j] = kMomentNearest;
    }
  }
  const void* parameter = a.master != nullptr ? a.master : a.weight;
  const DType parameter_dtype = a.master != nullptr ? DType::kF32 : a.weight_dtype;
  if (a.is_aligned) {
    load_any8(a.grad, a.grad_dtype, i, g);
    load_any8(parameter, parameter_dtype, i, p);
  } else {
    for (int j = 0; j < kWidth; ++j) {
      g[j] = load_any<float>(a.grad, a.grad_dtype, i + j);
      p[j] = load_any<float>(parameter, parameter_dtype, i + j);
    }
  }
  AdamWStep step = shared_step(control, corrections);
  std::int64_t s = segments.find(i);
  bool is_updated[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const std::int64_t e = i + j;
    while (s < segments.count && segments.data[s].end <= e) ++s;
    is_updated[j] = s < segments.count && segments.data[s].begin <= e;
    if (!is_updated[j]) continue;
    const ShardSegment& segment = segments.data[s];
    step.rate = control.learning_rate * segment.lr_scale;
    step.decay = segment.weight_decay;
    update(a, step, g[j], p[j], m[j], v[j]);
    const PhiloxKey key = rounding_key_of(control.rounding_key, segment.stream);
    const RoundingNoise noise = rounding_noise(key, global_index(segment, e));
    m_noise[j] = noise.m;
    v_noise[j] = noise.v;
    if (parameter_dtype == DType::kBF16) p[j] = round_stochastic(p[j], noise.weight);
  }
  float largest_m = 0, largest_v = 0;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    largest_m = fmaxf(largest_m, fabsf(m[j]));
    largest_v = fmaxf(largest_v, v[j]);
  }
  const float m_scale = moment_scale(warp_max(largest_m));
  const float v_scale = moment_scale(warp_max(largest_v));
  const float m_factor = inverse_moment_scale(m_scale), v_factor = inverse_moment_scale(v_scale);
  Codes new_m, new_v;
  bool is_whole = a.is_aligned;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    new_m.at[j] = encode_m(m[j] * m_factor, m_noise[j]);
    new_v.at[j] = encode_v(v[j] * v_factor, v_noise[j]);
    is_whole = is_whole && is_updated[j];
  }
  *m_codes = new_m;
  *v_codes = new_v;
  if (threadIdx.x % 32 == 0) {
    m_scales[block] = m_scale;
    v_scales[block] = v_scale;
  }
  if (is_whole) {
    if (a.master != nullptr) store_any8(a.master, DType::kF32, i, p);
    store_any8(a.weight, a.weight_dtype, i, p);
    return;
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (!is_updated[j]) continue;
    if (a.master != nullptr) a.master[i + j] = p[j];
    store_any<float>(a.weight, a.weight_dtype, i + j, p[j]);
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
  CHECK(a.m_dtype != DType::kU8 || a.is_aligned || (reinterpret_cast<std::uintptr_t>(a.m) % 8 == 0 &&
                                                    reinterpret_cast<std::uintptr_t>(a.v) % 8 == 0),
        "[adamw] codes do not start at multiples of 8 bytes");
  const Segments segments(args.segments);
  const unsigned grid = grid_size(ceil_div(n, kThreads * kWidth));
  if (a.m_dtype == DType::kU8) {
    adamw_codes_kernel<<<grid, kThreads, 0, s>>>(a, pointer<float>(args.m_scale), pointer<float>(args.v_scale),
                                                 segments);
    TESSERA_LAUNCHED();
    return;
  }
  const auto is_half = [](DType dtype) { return dtype == DType::kBF16; };
  const bool is_typed = a.is_aligned && a.m_dtype == a.v_dtype && (a.master == nullptr || is_half(a.weight_dtype));
  if (!is_typed) {
    adamw_any_kernel<<<grid, kThreads, 0, s>>>(a, segments);
    TESSERA_LAUNCHED();
    return;
  }
  const auto choose = [](bool half, auto&& next) {
    half ? next(TypeTag<__nv_bfloat16>{}) : next(TypeTag<float>{});
  };
  choose(is_half(a.weight_dtype), [&]<typename W>(TypeTag<W>) {
    choose(is_half(a.grad_dtype), [&]<typename G>(TypeTag<G>) {
      choose(is_half(a.m_dtype), [&]<typename M>(TypeTag<M>) {
        if constexpr (std::is_same_v<W, __nv_bfloat16>) {
          if (a.master != nullptr) {
            adamw_kernel<W, G, M, true><<<grid, kThreads, 0, s>>>(a, segments);
            return;
          }
        }
        adamw_kernel<W, G, M, false><<<grid, kThreads, 0, s>>>(a, segments);
      });
    });
  });
  TESSERA_LAUNCHED();
}

}  // namespace tessera::cuda
