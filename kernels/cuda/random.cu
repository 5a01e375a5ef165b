// Normal numbers by global element index: the same formula as the CPU's, from engine/core/philox.h. Runs
// once per run of the program.
#include "kernels/cuda/common.cuh"
#include "kernels/ops.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) fill_normal_kernel(T* out, std::int64_t stride, FillNormal args,
                                                              RowChunks work) {
  const std::int64_t row = blockIdx.x / work.chunks;
  const std::int64_t col = (blockIdx.x - row * work.chunks) * kThreads + threadIdx.x;
  if (col >= work.cols) return;
  Compute<T> value = args.mean;
  if (args.std > 0) {
    const auto index =
        static_cast<std::uint64_t>((args.first_row + row) * args.global_cols + args.first_col + col);
    value += static_cast<Compute<T>>(args.std) * static_cast<Compute<T>>(philox_normal(args.key, index));
  }
  out[row * stride + col] = from_compute<T>(value);
}

}  // namespace

void fill_normal(const FillNormal& args, Stream& stream) {
  if (args.out.numel() == 0) return;
  const cudaStream_t s = native(stream);
  const RowChunks work(args.out.rows(), args.out.cols(), kThreads);
  visit_float(args.out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    fill_normal_kernel<T>
        <<<work.blocks(), kThreads, 0, s>>>(pointer<T>(args.out), args.out.row_stride, args, work);
  });
  TESSERA_LAUNCHED();
}

}  // namespace tessera::cuda
