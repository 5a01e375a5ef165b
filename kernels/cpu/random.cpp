// Normal numbers by global element index. Bound by arithmetic; runs once per run of the program.
#include "kernels/random.h"

#include "kernels/cpu/common.h"
#include "kernels/ops.h"

namespace tessera::cpu {

void fill_normal(const FillNormal& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    visit_float(args.out.dtype, [&]<typename T>(TypeTag<T>) {
      using C = Compute<T>;
      const std::int64_t cols = args.out.cols();
      // Elements, not rows: a long vector is one row.
      team.parallel_for(args.out.numel(), 4096, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t e = begin; e < end; ++e) {
          const std::int64_t i = e / cols, j = e % cols;
          C value = args.mean;
          if (args.std > 0) {
            const auto index = static_cast<std::uint64_t>((args.first_row + i) * args.global_cols +
                                                          args.first_col + j);
            value += static_cast<C>(args.std) * static_cast<C>(philox_normal(args.key, index));
          }
          row<T>(args.out, i)[j] = store<T>(value);
        }
      });
    });
  });
}

}  // namespace tessera::cpu
