#include "kernels/swiglu.h"

#include "kernels/check.h"
#include "kernels/ops.h"

namespace tessera {

void check(const SwiGluForward& args) {
  ArgumentCheck arg("swiglu_forward");
  arg.matrix("out", args.out);
  arg.dtype("out", args.out, {DType::kBF16, DType::kF32, DType::kF64});
  arg.shape("gate_up", args.gate_up, Shape{args.out.rows(), 2 * args.out.cols()}, "out", args.out);
  arg.dtype("gate_up", args.gate_up, {args.out.dtype});
  arg.separate("out", args.out, "gate_up", args.gate_up);
  arg.amax(args.amax, args.out);
}

std::size_t workspace(const SwiGluForward&, const Capabilities&) { return 0; }

void check(const SwiGluBackward& args) {
  ArgumentCheck arg("swiglu_backward");
  arg.matrix("dout", args.dout);
  arg.dtype("dout", args.dout, {DType::kBF16, DType::kF32, DType::kF64});
  const Shape packed{args.dout.rows(), 2 * args.dout.cols()};
  arg.shape("gate_up", args.gate_up, packed, "dout", args.dout);
  arg.dtype("gate_up", args.gate_up, {args.dout.dtype});
  arg.shape("dgate_up", args.dgate_up, packed, "dout", args.dout);
  arg.dtype("dgate_up", args.dgate_up, {args.dout.dtype});
  arg.in_place_or_separate("dgate_up", args.dgate_up, "gate_up", args.gate_up);
  arg.separate("dgate_up", args.dgate_up, "dout", args.dout);
  arg.amax(args.amax, args.dgate_up);
}

std::size_t workspace(const SwiGluBackward&, const Capabilities&) { return 0; }

}  // namespace tessera
