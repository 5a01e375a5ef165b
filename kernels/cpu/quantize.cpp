// Largest magnitudes, FP8 casts with a transposed copy, and transposes of bytes. Bound by memory;
// tiles of 64 x 64 keep both sides of a transpose in the cache.
#include "kernels/quantize.h"

#include "kernels/cpu/common.h"
#include "kernels/cpu/fp8.h"
#include "kernels/ops.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kTile = 64;

template <typename T>
void amax_of_rows(const Amax& args, ThreadTeam& team) {
  const std::int64_t cols = args.in.cols();
  team.parallel_for(args.in.rows(), row_grain(cols), [&](std::int64_t begin, std::int64_t end) {
    std::uint32_t largest = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      largest = std::max(largest, largest_magnitude(row<T>(args.in, i), cols));
    }
    record_magnitude(static_cast<float*>(args.amax.data), largest);
  });
}

// Writes columns [c0, c0 + width) of rows [r0, r0 + height) of a matrix, given as dense rows of
// kTile bytes, as rows of its transpose.
void write_transposed(const std::uint8_t* tile, std::int64_t r0, std::int64_t height,
                      std::int64_t c0, std::int64_t width, const Tensor& out) {
  for (std::int64_t c = 0; c < width; ++c) {
    std::uint8_t* to = static_cast<std::uint8_t*>(out.data) + (c0 + c) * out.row_stride + r0;
    for (std::int64_t r = 0; r < height; ++r) to[r] = tile[r * kTile + c];
  }
}

// Calls convert(row, first column, width, bytes) for every piece of `in`'s rows, padded with rows
// of zeros to the depth of `column`, and transposes the bytes into it.
template <typename Convert>
void for_each_tile(const Tensor& in, const Tensor& column, ThreadTeam& team, Convert&& convert) {
  const std::int64_t rows = in.rows();
  const std::int64_t cols = in.cols();
  const std::int64_t depth = column.defined() ? column.cols() : rows;
  const std::int64_t across = (cols + kTile - 1) / kTile;
  const std::int64_t down = (depth + kTile - 1) / kTile;
  team.parallel_for(across * down, 4, [&](std::int64_t begin, std::int64_t end) {
    std::uint8_t tile[kTile * kTile];
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t r0 = item / across * kTile;
      const std::int64_t c0 = item % across * kTile;
      const std::int64_t width = std::min(kTile, cols - c0);
      const std::int64_t height = std::min(kTile, depth - r0);
      for (std::int64_t r = 0; r < height; ++r) {
        std::uint8_t* bytes = tile + r * kTile;
        if (r0 + r < rows) {
          convert(r0 + r, c0, width, bytes);
        } else {
          std::fill(bytes, bytes + width, std::uint8_t{0});
        }
      }
      if (column.defined()) write_transposed(tile, r0, height, c0, width, column);
    }
  });
}

template <typename T, typename F8>
void quantize_as(const Quantize& args, ThreadTeam& team) {
  const Fp8Factors factors = fp8_factors(*static_cast<const float*>(args.amax.data), F8::kMax);
  *static_cast<float*>(args.scale.data) = factors.dequantize;
  for_each_tile(args.in, args.column, team,
                [&](std::int64_t i, std::int64_t c0, std::int64_t width, std::uint8_t* bytes) {
                  const T* in = row<T>(args.in, i) + c0;
#pragma omp simd
                  for (std::int64_t j = 0; j < width; ++j) {
                    bytes[j] = encode_fp8<F8>(static_cast<float>(load(in[j])) * factors.quantize);
                  }
                  if (args.row.defined())
                    std::copy(bytes, bytes + width, row<std::uint8_t>(args.row, i) + c0);
                });
}

}  // namespace

void amax(const Amax& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    if (args.in.dtype == DType::kBF16) return amax_of_rows<bf16>(args, team);
    amax_of_rows<float>(args, team);
  });
}

void quantize(const Quantize& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    const DType format = args.row.defined() ? args.row.dtype : args.column.dtype;
    const bool is_wide = args.in.dtype == DType::kF32;
    if (format == DType::kF8E4M3) {
      return is_wide ? quantize_as<float, f8e4m3>(args, team)
                     : quantize_as<bf16, f8e4m3>(args, team);
    }
    return is_wide ? quantize_as<float, f8e5m2>(args, team) : quantize_as<bf16, f8e5m2>(args, team);
  });
}

void transpose(const Transpose& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    for_each_tile(args.in, args.out, team,
                  [&](std::int64_t i, std::int64_t c0, std::int64_t width, std::uint8_t* bytes) {
                    const std::uint8_t* in = row<std::uint8_t>(args.in, i) + c0;
                    std::copy(in, in + width, bytes);
                  });
  });
}

}  // namespace tessera::cpu
