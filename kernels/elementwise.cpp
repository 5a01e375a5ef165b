#include "kernels/elementwise.h"

#include "kernels/check.h"
#include "kernels/cpu/row_pieces.h"
#include "kernels/cuda_workspace.h"
#include "kernels/ops.h"

namespace tessera {
namespace {

void check_floating(const ArgumentCheck& arg, std::string_view name, const Tensor& t) {
  arg.dtype(name, t, {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3,
                      DType::kF8E5M2});
}

}  // namespace

void check(const Add& args) {
  ArgumentCheck arg("add");
  arg.defined("a", args.a);
  arg.shape("b", args.b, args.a.shape, "a", args.a);
  arg.shape("out", args.out, args.a.shape, "a", args.a);
  check_floating(arg, "a", args.a);
  check_floating(arg, "b", args.b);
  check_floating(arg, "out", args.out);
  arg.in_place_or_separate("out", args.out, "a", args.a);
  arg.in_place_or_separate("out", args.out, "b", args.b);
}

std::size_t workspace(const Add&, const Capabilities&) { return 0; }

void check(const Scale& args) {
  ArgumentCheck arg("scale");
  arg.defined("in", args.in);
  arg.shape("out", args.out, args.in.shape, "in", args.in);
  check_floating(arg, "in", args.in);
  check_floating(arg, "out", args.out);
  arg.in_place_or_separate("out", args.out, "in", args.in);
}

std::size_t workspace(const Scale&, const Capabilities&) { return 0; }

void check(const ColumnSum& args) {
  ArgumentCheck arg("column_sum");
  arg.matrix("in", args.in);
  arg.dtype("in", args.in, {DType::kBF16, DType::kF32, DType::kF64});
  arg.shape("out", args.out, Shape{args.in.cols()}, "in", args.in);
  arg.dtype("out", args.out, {args.in.dtype, DType::kF32});
  arg.separate("out", args.out, "in", args.in);
}

std::size_t workspace(const ColumnSum& args, const Capabilities& target) {
  if (target.target == DeviceKind::kCuda) return cuda::device_scratch(args, target);
  return static_cast<std::size_t>(cpu::RowPieces::of(args.in.rows()).count * args.in.cols()) *
         size_of(compute_dtype(args.in.dtype));
}

void check(const SumParts& args) {
  ArgumentCheck arg("sum_parts");
  CHECK(args.count >= 1, "[sum_parts] count is {}, expected at least 1", args.count);
  arg.defined("out", args.out);
  arg.defined("in", args.in);
  CHECK(args.in.numel() == args.count * args.out.numel(),
        "[sum_parts] in is {}, expected {} parts of the {} elements of out", to_string(args.in.shape),
        args.count, args.out.numel());
  check_floating(arg, "out", args.out);
  arg.dtype("in", args.in, {args.out.dtype});
  arg.dense("in", args.in);
  arg.dense("out", args.out);
  // Each element is read from every part before it is written, so out may be one of the parts.
  const auto offset = static_cast<const char*>(args.out.data) - static_cast<const char*>(args.in.data);
  const bool is_part = args.out.data != nullptr && offset >= 0 && args.out.bytes() > 0 &&
                       static_cast<std::size_t>(offset) < args.in.bytes() &&
                       static_cast<std::size_t>(offset) % args.out.bytes() == 0;
  if (!is_part) arg.separate("out", args.out, "in", args.in);
}

std::size_t workspace(const SumParts&, const Capabilities&) { return 0; }

}  // namespace tessera
