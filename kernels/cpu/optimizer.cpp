// Gradient norm, the step's scalars, and AdamW over the segments of a flat shard. Bound by memory.
#include "kernels/optimizer.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "kernels/cpu/common.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/optimizer_plan.h"
#include "kernels/ops.h"
#include "kernels/step_control.h"

namespace tessera::cpu {
namespace {

static_assert(kFlatBlock % kMomentBlock == 0 && kMomentBlock <= kRun);

std::span<const ShardSegment> segments_of(const char* op, const Tensor& segments, std::int64_t n) {
  const std::span<const ShardSegment> all(
      static_cast<const ShardSegment*>(segments.data),
      static_cast<std::size_t>(segments.numel()) / sizeof(ShardSegment));
  std::int64_t last = 0;
  for (const ShardSegment& s : all) {
    CHECK(s.begin >= last && s.end >= s.begin && s.end <= n,
          "[{}] segment [{}, {}) does not follow {} in a shard of {} elements", op, s.begin, s.end, last, n);
    CHECK(s.local_cols >= 1, "[{}] segment [{}, {}) has {} columns", op, s.begin, s.end, s.local_cols);
    last = s.end;
  }
  return all;
}

// Calls body(segment, begin, end) for the parts of segments within [block_begin, block_end).
template <typename Body>
void for_segments_in(std::span<const ShardSegment> segments, std::int64_t block_begin,
                     std::int64_t block_end, Body&& body) {
  auto it = std::upper_bound(segments.begin(), segments.end(), block_begin,
                             [](std::int64_t at, const ShardSegment& s) { return at < s.end; });
  for (; it != segments.end() && it->begin < block_end; ++it) {
    const std::int64_t begin = std::max(block_begin, it->begin), end = std::min(block_end, it->end);
    if (begin < end) body(*it, begin, end);
  }
}

struct AdamWStep {
  float grad_scale, beta1, beta2, eps;
  float correction1, correction2;  // 1 / (1 - beta^t)
  float learning_rate;
  PhiloxKey rounding_key;
};

// Stochastically rounded bf16 copies of `values`; noise[i] holds 16 random bits.
void store_stochastic(const float* values, const std::uint32_t* noise, std::int64_t n, bf16* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = bf16::round_stochastic(values[i], noise[i]);
}

// The moments of a block of codes while it is updated. What no segment holds keeps its value.
struct MomentBlock {
  MomentBlock(const AdamW& args, std::int64_t first) : begin(first) {
    const auto scale = [&](const Tensor& t) { return row<float>(t, 0)[begin / kMomentBlock]; };
    const float m_scale = scale(args.m_scale);
    const float v_scale = scale(args.v_scale);
    for (std::int64_t i = 0; i < kMomentBlock; ++i) {
      m[i] = decode_m(row<std::uint8_t>(args.m, 0)[begin + i]) * m_scale;
      v[i] = decode_v(row<std::uint8_t>(args.v, 0)[begin + i]) * v_scale;
      m_noise[i] = v_noise[i] = kMomentNearest;
    }
  }
  void store(const AdamW& args) const {
    float largest_m = 0;
    float largest_v = 0;
    for (std::int64_t i = 0; i < kMomentBlock; ++i) {
      largest_m = std::max(largest_m, std::abs(m[i]));
      largest_v = std::max(largest_v, v[i]);
    }
    const float m_scale = moment_scale(largest_m);
    const float v_scale = moment_scale(largest_v);
    const float m_factor = inverse_moment_scale(m_scale);
    const float v_factor = inverse_moment_scale(v_scale);
    row<float>(args.m_scale, 0)[begin / kMomentBlock] = m_scale;
    row<float>(args.v_scale, 0)[begin / kMomentBlock] = v_scale;
    for (std::int64_t i = 0; i < kMomentBlock; ++i) {
      row<std::uint8_t>(args.m, 0)[begin + i] = encode_m(m[i] * m_factor, m_noise[i]);
      row<std::uint8_t>(args.v, 0)[begin + i] = encode_v(v[i] * v_factor, v_noise[i]);
    }
  }

  std::int64_t begin;
  float m[kMomentBlock], v[kMomentBlock];
  std::uint32_t m_noise[kMomentBlock], v_noise[kMomentBlock];
};

// Elements [begin, begin + n) of one segment, n <= kRun; of `block`, where moments are codes.
void update_run(const AdamW& args, const AdamWStep& step, const ShardSegment& segment,
                std::int64_t begin, std::int64_t n, MomentBlock* block) {
  float grad_buffer[kRun], m_buffer[kRun], v_buffer[kRun], p_buffer[kRun];
  const Tensor& parameter = args.master.defined() ? args.master : args.weight;
  const auto at = [begin](const Tensor& t) { return element(t, 0, begin); };
  const float* grad = read_run(at(args.grad), args.grad.dtype, n, grad_buffer);
  const std::int64_t in_block = block != nullptr ? begin - block->begin : 0;
  const float* old_m =
      block != nullptr ? block->m + in_block : read_run(at(args.m), args.m.dtype, n, m_buffer);
  const float* old_v =
      block != nullptr ? block->v + in_block : read_run(at(args.v), args.v.dtype, n, v_buffer);
  const float* old_p = read_run(at(parameter), parameter.dtype, n, p_buffer);
  float* m =
      block != nullptr ? block->m + in_block : output_run(at(args.m), args.m.dtype, m_buffer);
  float* v =
      block != nullptr ? block->v + in_block : output_run(at(args.v), args.v.dtype, v_buffer);
  float* p = output_run(at(parameter), parameter.dtype, p_buffer);
  const float rate = step.learning_rate * segment.lr_scale;
  const float decay = segment.weight_decay;
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * step.grad_scale;
    const float new_m = step.beta1 * old_m[i] + (1.0f - step.beta1) * g;
    const float new_v = step.beta2 * old_v[i] + (1.0f - step.beta2) * g * g;
    const float direction =
        (new_m * step.correction1) / (std::sqrt(new_v * step.correction2) + step.eps);
    m[i] = new_m;
    v[i] = new_v;
    p[i] = old_p[i] - rate * (decay * old_p[i] + direction);
  }
  const bool is_noisy = parameter.dtype == DType::kBF16 || args.m.dtype == DType::kBF16 ||
                        args.v.dtype == DType::kBF16 || block != nullptr;
  if (is_noisy) {
    std::uint64_t index[kRun];
    std::int64_t row_index = (segment.local_begin + begin - segment.begin) / segment.local_cols;
    std::int64_t col = (segment.local_begin + begin - segment.begin) % segment.local_cols;
    for (std::int64_t i = 0; i < n; ++i) {
      index[i] = static_cast<std::uint64_t>(segment.global_begin + row_index * segment.global_cols + col);
      if (++col == segment.local_cols) {
        col = 0;
        ++row_index;
      }
    }
    std::uint32_t weight_noise[kRun], m_noise[kRun], v_noise[kRun];
    const PhiloxKey key = rounding_key_of(step.rounding_key, segment.stream);
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) {
      const RoundingNoise noise = rounding_noise(key, index[i]);
      weight_noise[i] = noise.weight;
      m_noise[i] = noise.m;
      v_noise[i] = noise.v;
    }
    const auto round = [&](const Tensor& t, const float* values, const std::uint32_t* noise) {
      if (t.dtype == DType::kBF16) {
        store_stochastic(values, noise, n, reinterpret_cast<bf16*>(at(t)));
      }
    };
    round(parameter, p, weight_noise);
    round(args.m, m, m_noise);
    round(args.v, v, v_noise);
    if (block != nullptr) {
      std::copy_n(m_noise, n, block->m_noise + in_block);
      std::copy_n(v_noise, n, block->v_noise + in_block);
    }
  }
  if (args.master.defined()) {
    visit_float(args.weight.dtype,
                [&]<typename T>(TypeTag<T>) { store_as<float, T>(p, n, at(args.weight)); });
  }
}

}  // namespace

void sum_of_squares(const SumOfSquares& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  const auto scratch = take_scratch(stream, workspace(args, stream.context().capabilities()));
  cpu.enqueue([args, memory = scratch.data(), &team = cpu.team()] {
    const std::int64_t n = args.grad.numel(), blocks = flat_blocks(n);
    const auto segments = segments_of("sum_of_squares", args.segments, n);
    double* partial = static_cast<double*>(memory);
    visit_float(args.grad.dtype, [&]<typename T>(TypeTag<T>) {
      const T* grad = row<T>(args.grad, 0);
      for_each_item(team, blocks, team.threads(), [&](std::int64_t block, int) {
        partial[block] = 0;
        for_segments_in(segments, block * kFlatBlock, std::min(n, (block + 1) * kFlatBlock),
                        [&](const ShardSegment& segment, std::int64_t begin, std::int64_t end) {
          if (segment.count_in_norm == 0) return;
          partial[block] += fixed_sum<double>(end - begin, [g = grad + begin](std::int64_t i) {
            return static_cast<double>(load(g[i])) * static_cast<double>(load(g[i]));
          });
        });
      });
    });
    double total = 0;
    for (std::int64_t block = 0; block < blocks; ++block) total += partial[block];
    *static_cast<double*>(args.sum.data) += total;
  });
}

void step_control_finish(const StepControlFinish& args, Stream& stream) {
  as_cpu(stream).enqueue([args] {
    auto& control = *static_cast<StepControl*>(args.control.data);
    control.sum_of_squares = *static_cast<const double*>(args.sum.data);
    control.denominator = *static_cast<const double*>(args.denominator.data);
    control.has_targets = control.denominator <= 0 ? 0 : 1;  // NaN is no lack of targets but a fault
    const double norm =
        control.has_targets ? std::sqrt(control.sum_of_squares) / control.denominator : 0.0;
    control.is_finite = std::isfinite(control.sum_of_squares) && std::isfinite(norm) &&
                                std::isfinite(control.denominator)
                            ? 1
                            : 0;
    control.grad_norm = static_cast<float>(norm);
    double clip = 1.0;
    if (control.max_grad_norm > 0) clip = std::min(1.0, control.max_grad_norm / (norm + 1e-6));
    control.grad_scale =
        control.has_targets && control.is_finite ? static_cast<float>(clip / control.denominator) : 0.0f;
    if (control.has_targets && control.is_finite) ++control.adam_step;
  });
}

void adamw(const AdamW& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    const auto& control = *static_cast<const StepControl*>(args.control.data);
    if (control.is_finite == 0 || control.has_targets == 0) return;
    const std::int64_t n = args.grad.numel();
    const auto segments = segments_of("adamw", args.segments, n);
    const auto t = static_cast<double>(control.adam_step);
    AdamWStep step{};
    step.grad_scale = control.grad_scale;
    step.beta1 = args.beta1;
    step.beta2 = args.beta2;
    step.eps = args.eps;
    step.correction1 = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(args.beta1), t)));
    step.correction2 = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(args.beta2), t)));
    step.learning_rate = control.learning_rate;
    step.rounding_key = control.rounding_key;
    for_each_item(team, flat_blocks(n), team.threads(), [&](std::int64_t block, int) {
      const std::int64_t last = std::min(n, (block + 1) * kFlatBlock);
      if (args.m.dtype == DType::kU8) {
        for (std::int64_t first = block * kFlatBlock; first < last; first += kMomentBlock) {
          MomentBlock moments(args, first);
          for_segments_in(segments, first, first + kMomentBlock,
                          [&](const ShardSegment& segment, std::int64_t begin, std::int64_t end) {
            update_run(args, step, segment, begin, end - begin, &moments);
          });
          moments.store(args);
        }
        return;
      }
      for_segments_in(segments, block * kFlatBlock, last,
                      [&](const ShardSegment& segment, std::int64_t begin, std::int64_t end) {
        for (std::int64_t at = begin; at < end; at += kRun) {
          update_run(args, step, segment, at, std::min(kRun, end - at), nullptr);
        }
      });
    });
  });
}

}  // namespace tessera::cpu
