// c = alpha op(a) op(b) (+ c) (+ bias). Tiles of c go to threads; inside a tile OpenBLAS computes
// in fp32 (fp64), bf16 and FP8 operands are converted a panel at a time. Bound by arithmetic.
#include "kernels/gemm.h"

#include "kernels/cpu/blas.h"
#include "kernels/cpu/common.h"
#include "kernels/cpu/fp8.h"
#include "kernels/cpu/gemm_plan.h"
#include "kernels/ops.h"
#include "kernels/quantize.h"

namespace tessera::cpu {
namespace {

// Copies rows [r0, r0 + rows) x columns [c0, c0 + cols) of a bf16 or FP8 matrix to a dense panel;
// scales of vectors and blocks multiply their elements, exactly where they are powers of two.
void convert_panel(const Tensor& t, const Tensor& scale, ScaleMode mode, std::int64_t r0,
                   std::int64_t rows, std::int64_t c0, std::int64_t cols, float* panel) {
  if (t.dtype == DType::kBF16) {
    for (std::int64_t i = 0; i < rows; ++i) {
      const bf16* in = row<bf16>(t, r0 + i) + c0;
      float* out = panel + i * cols;
#pragma omp simd
      for (std::int64_t j = 0; j < cols; ++j) out[j] = load(in[j]);
    }
    return;
  }
  const float* values = t.dtype == DType::kF8E4M3 ? fp8_table<f8e4m3>() : fp8_table<f8e5m2>();
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::uint8_t* in = row<std::uint8_t>(t, r0 + i) + c0;
    float* out = panel + i * cols;
    for (std::int64_t j = 0; j < cols; ++j) out[j] = values[in[j]];
    if (mode == ScaleMode::kTensor) continue;
    for (std::int64_t j = 0; j < cols;) {
      const std::int64_t block = (c0 + j) / kScaleBlock;
      const std::int64_t end = std::min(cols, (block + 1) * kScaleBlock - c0);
      const float factor = mode == ScaleMode::kVector
                               ? row<float>(scale, block)[r0 + i]
                               : row<float>(scale, (r0 + i) / kScaleBlock)[block];
#pragma omp simd
      for (std::int64_t l = j; l < end; ++l) out[l] *= factor;
      j = end;
    }
  }
}

// What the products are multiplied with.
float factor_of(const Gemm& args) {
  if (!args.scale_a.defined() || args.has_block_scales()) return args.alpha;
  return args.alpha * *static_cast<const float*>(args.scale_a.data) *
         *static_cast<const float*>(args.scale_b.data);
}

template <typename T>
struct Tile {
  const Gemm& args;
  std::int64_t i0, rows, j0, cols;
};

// Multiplies inner indices [p0, p0 + depth) of a tile into c.
template <typename T, typename C>
void multiply(const Tile<T>& tile, std::int64_t p0, std::int64_t depth, C* a_panel, C* b_panel,
              C beta, C* c, std::int64_t ldc) {
  const Gemm& args = tile.args;
  BlasGemm<C> call;
  call.transpose_a = args.transpose_a;
  call.transpose_b = args.transpose_b;
  call.m = tile.rows;
  call.n = tile.cols;
  call.k = depth;
  call.alpha = static_cast<C>(factor_of(args));
  call.beta = beta;
  call.c = c;
  call.ldc = ldc;
  // The part of each operand as stored: rows and columns swap under transposition.
  const std::int64_t a_row = args.transpose_a ? p0 : tile.i0,
                     a_col = args.transpose_a ? tile.i0 : p0;
  const std::int64_t b_row = args.transpose_b ? tile.j0 : p0,
                     b_col = args.transpose_b ? p0 : tile.j0;
  if constexpr (std::is_same_v<T, C>) {
    call.a = row<T>(args.a, a_row) + a_col;
    call.lda = std::max<std::int64_t>(args.a.row_stride, args.a.cols());
    call.b = row<T>(args.b, b_row) + b_col;
    call.ldb = std::max<std::int64_t>(args.b.row_stride, args.b.cols());
  } else {
    call.lda = args.transpose_a ? tile.rows : depth;
    call.ldb = args.transpose_b ? depth : tile.cols;
    convert_panel(args.a, args.scale_a, args.scale_mode_a, a_row,
                  args.transpose_a ? depth : tile.rows, a_col, call.lda, a_panel);
    convert_panel(args.b, args.scale_b, args.scale_mode_b, b_row,
                  args.transpose_b ? tile.cols : depth, b_col, call.ldb, b_panel);
    call.a = a_panel;
    call.b = b_panel;
  }
  blas_gemm(call);
}

// Writes a finished tile of the compute type to c, rounding once. The bias is of type B.
template <typename B, typename D, typename T, typename C>
void finish(const Tile<T>& tile, const C* product) {
  const Gemm& args = tile.args;
  const B* bias = args.bias.defined() ? row<B>(args.bias, 0) + tile.j0 : nullptr;
  for (std::int64_t i = 0; i < tile.rows; ++i) {
    const C* in = product + i * tile.cols;
    D* out = row<D>(args.c, tile.i0 + i) + tile.j0;
    for (std::int64_t j = 0; j < tile.cols; ++j) {
      C value = in[j];
      if (args.accumulate) value += static_cast<C>(load(out[j]));
      if (bias != nullptr) value += load(bias[j]);
      out[j] = store<D>(value);
    }
  }
}

template <typename T>
void run_tile(const GemmPlan& plan, const Tile<T>& tile, char* scratch) {
  using C = Compute<T>;
  const Gemm& args = tile.args;
  C* a_panel = reinterpret_cast<C*>(scratch);
  C* b_panel = a_panel + plan.a_elements();
  C* product = b_panel + plan.b_elements();
  const bool direct = !plan.converts_result;
  C* c = direct ? row<C>(args.c, tile.i0) + tile.j0 : product;
  const std::int64_t ldc = direct ? std::max(args.c.row_stride, args.c.cols()) : tile.cols;
  C beta = direct && args.accumulate ? C(1) : C(0);
  const std::int64_t block =
      plan.converts_operands ? plan.block_k : std::max<std::int64_t>(1, plan.k);
  std::int64_t p0 = 0;
  do {  // once even for an empty inner size, which clears c
    multiply<T, C>(tile, p0, std::min(block, plan.k - p0), a_panel, b_panel, beta, c, ldc);
    beta = C(1);
    p0 += block;
  } while (p0 < plan.k);
  // FP8 products take a bias of c's type, the others of their operands'.
  constexpr bool kIsFp8 = sizeof(T) == 1;
  using B = std::conditional_t<kIsFp8, C, T>;
  if (!direct) {
    if constexpr (kIsFp8) return finish<bf16, bf16>(tile, product);
    if (args.c.dtype == DTypeOf<T>::value) return finish<T, T>(tile, product);
    return finish<T, float>(tile, product);
  }
  if (args.bias.defined()) {
    const B* bias = row<B>(args.bias, 0) + tile.j0;
    for (std::int64_t i = 0; i < tile.rows; ++i) {
      C* out = c + i * ldc;
#pragma omp simd
      for (std::int64_t j = 0; j < tile.cols; ++j) out[j] += load(bias[j]);
    }
  }
}

}  // namespace

void gemm(const Gemm& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  const GemmPlan plan = GemmPlan::of(args, cpu.team().threads());
  if (plan.count() == 0) return;
  const auto scratch = take_scratch(stream, plan.bytes());
  cpu.enqueue([args, plan, memory = scratch.data(), &team = cpu.team()] {
    announce_rows_read(args.a);
    announce_rows_read(args.b);
    if (args.accumulate) announce_rows_read(args.c);
    announce_rows_write(args.c);
    const auto run = [&]<typename T>(TypeTag<T>) {
      for_each_item(team, plan.count(), plan.slots, [&](std::int64_t item, int slot) {
        // Consecutive tiles share their columns of b.
        const std::int64_t i0 = item % plan.tiles_m() * plan.tile_m;
        const std::int64_t j0 = item / plan.tiles_m() * plan.tile_n;
        const Tile<T> tile{args, i0, std::min(plan.tile_m, plan.m - i0), j0,
                           std::min(plan.tile_n, plan.n - j0)};
        run_tile(plan, tile, static_cast<char*>(memory) + plan.slot_bytes() * slot);
      });
    };
    // Of an FP8 format the type tells the width alone: panels look at the operand.
    if (is_fp8(args.a.dtype)) return run(TypeTag<f8e4m3>{});
    visit_float(args.a.dtype, run);
  });
}

}  // namespace tessera::cpu
