// out = gate * sigmoid(gate) * up, element by element. Bound by memory.
#include "kernels/swiglu.h"

#include "kernels/cpu/common.h"
#include "kernels/cpu/fp8.h"
#include "kernels/cpu/vector_math.h"
#include "kernels/ops.h"

namespace tessera::cpu {
namespace {

template <typename T>
void forward_row(const SwiGluForward& args, std::int64_t t) {
  using C = Compute<T>;
  const std::int64_t ffn = args.out.cols();
  const T* gate = row<T>(args.gate_up, t);
  const T* up = gate + ffn;
  T* out = row<T>(args.out, t);
#pragma omp simd
  for (std::int64_t j = 0; j < ffn; ++j) {
    const C g = load(gate[j]);
    out[j] = store<T>(g * sigmoid(g) * load(up[j]));
  }
}

template <typename T>
void backward_row(const SwiGluBackward& args, std::int64_t t) {
  using C = Compute<T>;
  const std::int64_t ffn = args.dout.cols();
  const T* dout = row<T>(args.dout, t);
  const T* gate = row<T>(args.gate_up, t);
  const T* up = gate + ffn;
  T* dgate = row<T>(args.dgate_up, t);
  T* dup = dgate + ffn;
#pragma omp simd
  for (std::int64_t j = 0; j < ffn; ++j) {
    const C g = load(gate[j]), u = load(up[j]), d = load(dout[j]);
    const C s = sigmoid(g);
    dgate[j] = store<T>(d * u * s * (C(1) + g * (C(1) - s)));
    dup[j] = store<T>(d * g * s);
  }
}

}  // namespace

void swiglu_forward(const SwiGluForward& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    visit_float(args.out.dtype, [&]<typename T>(TypeTag<T>) {
      team.parallel_for(args.out.rows(), row_grain(4 * args.out.cols()),
                        [&](std::int64_t begin, std::int64_t end) {
                          for (std::int64_t t = begin; t < end; ++t) forward_row<T>(args, t);
                          record_rows<T>(args.out, begin, end, args.amax);
                        });
    });
  });
}

void swiglu_backward(const SwiGluBackward& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    visit_float(args.dout.dtype, [&]<typename T>(TypeTag<T>) {
      team.parallel_for(args.dout.rows(), row_grain(4 * args.dout.cols()),
                        [&](std::int64_t begin, std::int64_t end) {
                          for (std::int64_t t = begin; t < end; ++t) backward_row<T>(args, t);
                          record_rows<T>(args.dgate_up, begin, end, args.amax);
                        });
    });
  });
}

}  // namespace tessera::cpu
