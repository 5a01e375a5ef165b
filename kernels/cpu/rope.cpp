// Rotation of q and k heads (after their optional RMS norm); v is copied. Rows are independent.
// Bound by memory.
#include "kernels/rope.h"

#include <cmath>
#include <cstring>

#include "kernels/cpu/common.h"
#include "kernels/ops.h"

namespace tessera::cpu {
namespace {

// Position of row t; outside the tables is an error of the caller, found before memory is read.
std::int64_t position_of(const char* op, const Tensor& positions, const Tensor& cos, std::int64_t t) {
  const std::int64_t position = static_cast<const std::int32_t*>(positions.data)[t];
  CHECK(position >= 0 && position < cos.rows(), "[{}] positions[{}] is {}, expected below {}", op, t,
        position, cos.rows());
  return position;
}

// (first, second) -> (first cos - second sin, second cos + first sin), with sin negated for the inverse.
template <typename T, typename O, typename C>
void rotate(const T* in, O* out, const C* cos, const C* sin, C direction, std::int64_t half,
            std::int64_t head_dim) {
#pragma omp simd
  for (std::int64_t i = 0; i < half; ++i) {
    const C first = load(in[i]), second = load(in[half + i]);
    const C c = cos[i], s = sin[i] * direction;
    out[i] = store<O>(first * c - second * s);
    out[half + i] = store<O>(second * c + first * s);
  }
  if (static_cast<const void*>(in) != static_cast<const void*>(out)) {
    for (std::int64_t i = 2 * half; i < head_dim; ++i) out[i] = store<O>(load(in[i]));
  }
}

// The same with the head's RMS norm in front; nothing is rounded in between.
template <typename T, typename C>
C normalise_and_rotate(const T* in, const T* weight, float eps, T* out, const C* cos, const C* sin,
                       std::int64_t half, std::int64_t head_dim) {
  const double squares =
      fixed_sum<C>(head_dim, [in](std::int64_t j) { return load(in[j]) * load(in[j]); });
  const C rstd = static_cast<C>(1.0 / std::sqrt(squares / static_cast<double>(head_dim) + eps));
#pragma omp simd
  for (std::int64_t i = 0; i < half; ++i) {
    const C first = load(in[i]) * rstd * load(weight[i]);
    const C second = load(in[half + i]) * rstd * load(weight[half + i]);
    out[i] = store<T>(first * cos[i] - second * sin[i]);
    out[half + i] = store<T>(second * cos[i] + first * sin[i]);
  }
  for (std::int64_t i = 2 * half; i < head_dim; ++i) {
    out[i] = store<T>(load(in[i]) * rstd * load(weight[i]));
  }
  return rstd;
}

template <typename T>
void forward_row(const QkvRopeForward& args, std::int64_t t) {
  using C = Compute<T>;
  const QkvLayout& layout = args.layout;
  const std::int64_t head_dim = layout.head_dim, half = args.cos.cols();
  const std::int64_t position = position_of("qkv_rope_forward", args.positions, args.cos, t);
  const C* cos = row<C>(args.cos, position);
  const C* sin = row<C>(args.sin, position);
  const T* in = row<T>(args.in, t);
  T* out = row<T>(args.out, t);
  const std::int64_t heads = layout.heads_q + layout.heads_kv;
  for (std::int64_t h = 0; h < heads; ++h) {
    const T* x = in + h * head_dim;
    T* y = out + h * head_dim;
    if (args.q_norm.defined()) {
      const T* weight = row<T>(h < layout.heads_q ? args.q_norm : args.k_norm, 0);
      const C rstd = normalise_and_rotate(x, weight, args.eps, y, cos, sin, half, head_dim);
      if (args.rstd.defined()) static_cast<C*>(args.rstd.data)[t * heads + h] = rstd;
    } else {
      rotate(x, y, cos, sin, C(1), half, head_dim);
    }
  }
  if (args.in.data != args.out.data) {
    const std::int64_t v = heads * head_dim;
    std::memcpy(out + v, in + v, static_cast<std::size_t>(layout.kv_cols()) * sizeof(T));
  }
}

template <typename C>
struct NormGradients {
  C* dq_norm;  // [head_dim]
  C* dk_norm;
  C* rotated;  // [head_dim]: the gradient of the normalised head
};

template <typename T>
void backward_row(const QkvRopeBackward& args, std::int64_t t, const NormGradients<Compute<T>>& grads) {
  using C = Compute<T>;
  const QkvLayout& layout = args.layout;
  const std::int64_t head_dim = layout.head_dim, half = args.cos.cols();
  const std::int64_t position = position_of("qkv_rope_backward", args.positions, args.cos, t);
  const C* cos = row<C>(args.cos, position);
  const C* sin = row<C>(args.sin, position);
  T* d = row<T>(args.d, t);
  const std::int64_t heads = layout.heads_q + layout.heads_kv;
  for (std::int64_t h = 0; h < heads; ++h) {
    T* dy = d + h * head_dim;
    if (!args.q_norm.defined()) {
      rotate(dy, dy, cos, sin, C(-1), half, head_dim);
      continue;
    }
    const bool is_query = h < layout.heads_q;
    const T* x = row<T>(args.in, t) + h * head_dim;
    const T* weight = row<T>(is_query ? args.q_norm : args.k_norm, 0);
    C* dweight = is_query ? grads.dq_norm : grads.dk_norm;
    C* dn = grads.rotated;
    const C rstd = static_cast<const C*>(args.rstd.data)[t * heads + h];
    rotate(dy, dn, cos, sin, C(-1), half, head_dim);
    const double dot = fixed_sum<C>(head_dim, [=](std::int64_t j) {
      return dn[j] * load(weight[j]) * load(x[j]);
    });
    const C along = static_cast<C>(dot / static_cast<double>(head_dim)) * rstd * rstd;
#pragma omp simd
    for (std::int64_t j = 0; j < head_dim; ++j) {
      dweight[j] += dn[j] * load(x[j]) * rstd;
      dy[j] = store<T>(rstd * (dn[j] * load(weight[j]) - load(x[j]) * along));
    }
  }
}

}  // namespace

void qkv_rope_forward(const QkvRopeForward& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    visit_float(args.in.dtype, [&]<typename T>(TypeTag<T>) {
      team.parallel_for(args.in.rows(), row_grain(args.in.cols()),
                        [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) forward_row<T>(args, t);
      });
    });
  });
}

void qkv_rope_backward(const QkvRopeBackward& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  const auto scratch = take_scratch(stream, workspace(args, stream.context().capabilities()));
  cpu.enqueue([args, memory = scratch.data(), &team = cpu.team()] {
    visit_float(args.d.dtype, [&]<typename T>(TypeTag<T>) {
      using C = Compute<T>;
      const std::int64_t head_dim = args.layout.head_dim;
      const RowPieces pieces = RowPieces::of(args.d.rows());
      // [pieces, 2 * head_dim] sums of dq_norm | dk_norm, then [pieces, head_dim] rotated heads.
      C* partial = static_cast<C*>(memory);
      for_each_item(team, pieces.count, team.threads(), [&](std::int64_t piece, int) {
        NormGradients<C> grads{};
        if (partial != nullptr) {
          grads.dq_norm = partial + piece * 2 * head_dim;
          grads.dk_norm = grads.dq_norm + head_dim;
          grads.rotated = partial + (pieces.count * 2 + piece) * head_dim;
          std::fill(grads.dq_norm, grads.dq_norm + 2 * head_dim, C(0));
        }
        for (std::int64_t t = pieces.begin(piece); t < pieces.end(piece); ++t) {
          backward_row<T>(args, t, grads);
        }
      });
      if (!args.dq_norm.defined()) return;
      visit_gradient<T>(args.dq_norm.dtype, [&]<typename W>(TypeTag<W>) {
        add_pieces<W>(partial, pieces.count, 2 * head_dim, head_dim, args.accumulate_dq_norm,
                      row<W>(args.dq_norm, 0));
        add_pieces<W>(partial + head_dim, pieces.count, 2 * head_dim, head_dim,
                      args.accumulate_dk_norm, row<W>(args.dk_norm, 0));
      });
    });
  });
}

}  // namespace tessera::cpu
