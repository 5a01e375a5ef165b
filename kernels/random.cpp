#include "kernels/random.h"

#include "kernels/check.h"
#include "kernels/ops.h"

namespace tessera {

void check(const FillNormal& args) {
  ArgumentCheck arg("fill_normal");
  arg.defined("out", args.out);
  arg.require(args.out.shape.rank <= 2, "out has more than two dims, expected [rows, cols] or [n]");
  arg.dtype("out", args.out, {DType::kBF16, DType::kF32, DType::kF64});
  CHECK(args.first_row >= 0 && args.first_col >= 0 &&
            args.first_col + args.out.cols() <= args.global_cols,
        "[fill_normal] out {} at ({}, {}) does not fit {} global columns", to_string(args.out.shape),
        args.first_row, args.first_col, args.global_cols);
  arg.require(args.std >= 0, "std is negative");
}

std::size_t workspace(const FillNormal&, const Capabilities&) { return 0; }

}  // namespace tessera
