// out = s * rstd * weight with s = x + delta; rows are independent. Bound by memory.
#include "kernels/rmsnorm.h"

#include <cmath>

#include "kernels/cpu/common.h"
#include "kernels/cpu/fp8.h"
#include "kernels/ops.h"

namespace tessera::cpu {
namespace {

template <typename T>
void forward_row(const RmsNormForward& args, std::int64_t t) {
  using C = Compute<T>;
  const std::int64_t hidden = args.x.cols();
  const T* s = row<T>(args.x, t);
  if (args.delta.defined()) {
    const T* x = s;
    const T* delta = row<T>(args.delta, t);
    T* sum = row<T>(args.sum, t);
#pragma omp simd
    for (std::int64_t j = 0; j < hidden; ++j) sum[j] = store<T>(load(x[j]) + load(delta[j]));
    s = sum;
  }
  const double squares =
      fixed_sum<C>(hidden, [s](std::int64_t j) { return load(s[j]) * load(s[j]); });
  const C rstd = static_cast<C>(1.0 / std::sqrt(squares / static_cast<double>(hidden) + args.eps));
  const T* weight = row<T>(args.weight, 0);
  T* out = row<T>(args.out, t);
#pragma omp simd
  for (std::int64_t j = 0; j < hidden; ++j) out[j] = store<T>(load(s[j]) * rstd * load(weight[j]));
  if (args.rstd.defined()) static_cast<C*>(args.rstd.data)[t] = rstd;
}

// dx of one row; adds the row's share to dweight where given.
template <typename T>
void backward_row(const RmsNormBackward& args, std::int64_t t, Compute<T>* dweight) {
  using C = Compute<T>;
  const std::int64_t hidden = args.dout.cols();
  const T* dout = row<T>(args.dout, t);
  const T* s = row<T>(args.s, t);
  const T* weight = row<T>(args.weight, 0);
  const C rstd = static_cast<const C*>(args.rstd.data)[t];
  const double dot = fixed_sum<C>(
      hidden, [=](std::int64_t j) { return load(dout[j]) * load(weight[j]) * load(s[j]); });
  // d(rstd)/ds turns into a multiple of s itself.
  const C along = static_cast<C>(dot / static_cast<double>(hidden)) * rstd * rstd;
  if (dweight != nullptr) {
#pragma omp simd
    for (std::int64_t j = 0; j < hidden; ++j) dweight[j] += load(dout[j]) * load(s[j]) * rstd;
  }
  T* dx = row<T>(args.dx, t);
  if (args.dsum.defined()) {
    const T* dsum = row<T>(args.dsum, t);
#pragma omp simd
    for (std::int64_t j = 0; j < hidden; ++j) {
      dx[j] =
          store<T>(load(dsum[j]) + rstd * (load(dout[j]) * load(weight[j]) - load(s[j]) * along));
    }
  } else {
#pragma omp simd
    for (std::int64_t j = 0; j < hidden; ++j) {
      dx[j] = store<T>(rstd * (load(dout[j]) * load(weight[j]) - load(s[j]) * along));
    }
  }
}

}  // namespace

void rmsnorm_forward(const RmsNormForward& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    visit_float(args.x.dtype, [&]<typename T>(TypeTag<T>) {
      team.parallel_for(args.x.rows(), row_grain(args.x.cols()),
                        [&](std::int64_t begin, std::int64_t end) {
                          for (std::int64_t t = begin; t < end; ++t) forward_row<T>(args, t);
                          record_rows<T>(args.out, begin, end, args.amax);
                        });
    });
  });
}

void rmsnorm_backward(const RmsNormBackward& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  const auto scratch = take_scratch(stream, workspace(args, stream.context().capabilities()));
  cpu.enqueue([args, memory = scratch.data(), &team = cpu.team()] {
    visit_float(args.dout.dtype, [&]<typename T>(TypeTag<T>) {
      using C = Compute<T>;
      const std::int64_t hidden = args.dout.cols();
      const RowPieces pieces = RowPieces::of(args.dout.rows());
      C* partial = args.dweight.defined() ? static_cast<C*>(memory) : nullptr;
      for_each_item(team, pieces.count, team.threads(), [&](std::int64_t piece, int) {
        C* dweight = partial != nullptr ? partial + piece * hidden : nullptr;
        if (dweight != nullptr) std::fill(dweight, dweight + hidden, C(0));
        for (std::int64_t t = pieces.begin(piece); t < pieces.end(piece); ++t) {
          backward_row<T>(args, t, dweight);
        }
        record_rows<T>(args.dx, pieces.begin(piece), pieces.end(piece), args.amax);
      });
      if (partial == nullptr) return;
      visit_gradient<T>(args.dweight.dtype, [&]<typename W>(TypeTag<W>) {
        add_pieces<W>(partial, pieces.count, hidden, hidden, args.accumulate_dweight,
                      row<W>(args.dweight, 0));
      });
    });
  });
}

}  // namespace tessera::cpu
