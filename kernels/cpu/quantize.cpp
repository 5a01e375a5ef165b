// Largest magnitudes, FP8 casts with a transposed copy, and transposes of bytes. Bound by memory;
// tiles of 64 x 64 keep both sides of a transpose in the cache.
#include "kernels/quantize.h"

#include <atomic>

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

// One tile of kScaleBlock x kScaleBlock elements of a block-scaled cast, and its scales.
template <typename T, typename F8>
class BlockTile {
 public:
  BlockTile(const QuantizeBlocks& args, std::int64_t tile_row, std::int64_t tile_col)
      : args_(args),
        tile_row_(tile_row),
        tile_col_(tile_col),
        r0_(tile_row * kScaleBlock),
        c0_(tile_col * kScaleBlock),
        height_(std::clamp<std::int64_t>(args.in.rows() - r0_, 0, kScaleBlock)),
        width_(std::min(kScaleBlock, args.in.cols() - c0_)) {}

  void run() {
    load_values();
    if (args_.mode == ScaleMode::kBlock) {
      std::uint32_t largest = 0;
      for (std::int64_t r = 0; r < height_; ++r) largest = std::max(largest, row_largest_[r]);
      const Fp8Factors factors = factors_of(largest);
      std::fill_n(row_factor_, kScaleBlock, factors);
      std::fill_n(column_factor_, kScaleBlock, factors);
    } else {
      for (std::int64_t i = 0; i < kScaleBlock; ++i) {
        row_factor_[i] = factors_of(row_largest_[i]);
        column_factor_[i] = factors_of(column_largest_[i]);
      }
    }
    if (args_.row.defined()) write_rows();
    if (args_.column.defined()) write_columns();
  }

 private:
  static Fp8Factors factors_of(std::uint32_t largest) {
    return fp8_block_factors(std::bit_cast<float>(largest),
                             exponent_of_largest(DTypeOf<F8>::value));
  }

  void load_values() {
    for (std::int64_t r = 0; r < height_; ++r) {
      const T* in = row<T>(args_.in, r0_ + r) + c0_;
      float* out = values_ + r * kScaleBlock;
      std::uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
      for (std::int64_t c = 0; c < width_; ++c) {
        out[c] = static_cast<float>(load(in[c]));
        const std::uint32_t bits = magnitude_bits(out[c]);
        largest = bits > largest ? bits : largest;
        column_largest_[c] = bits > column_largest_[c] ? bits : column_largest_[c];
      }
      row_largest_[r] = largest;
    }
  }

  void write_rows() {
    for (std::int64_t r = 0; r < height_; ++r) {
      std::uint8_t* out = row<std::uint8_t>(args_.row, r0_ + r) + c0_;
      const float* in = values_ + r * kScaleBlock;
      const float factor = row_factor_[r].quantize;
#pragma omp simd
      for (std::int64_t c = 0; c < width_; ++c) out[c] = encode_fp8<F8>(in[c] * factor);
    }
    if (args_.mode == ScaleMode::kVector) {
      float* scale = row<float>(args_.row_scale, tile_col_) + r0_;
      for (std::int64_t r = 0; r < height_; ++r) scale[r] = row_factor_[r].dequantize;
    } else if (height_ > 0) {
      write_block_scale(args_.row_scale, tile_row_, tile_col_, scale_blocks(args_.in.cols()));
    }
  }

  void write_columns() {
    const std::int64_t depth = args_.column.cols();
    const std::int64_t padded = std::clamp<std::int64_t>(depth - r0_, 0, kScaleBlock);
    if (padded == 0) return;
    for (std::int64_t c = 0; c < width_; ++c) {
      std::uint8_t* out = row<std::uint8_t>(args_.column, c0_ + c) + r0_;
      const float factor = column_factor_[c].quantize;
      for (std::int64_t r = 0; r < height_; ++r)
        out[r] = encode_fp8<F8>(values_[r * kScaleBlock + c] * factor);
      std::fill(out + height_, out + padded, std::uint8_t{0});
    }
    if (args_.mode == ScaleMode::kVector) {
      float* scale = row<float>(args_.column_scale, tile_row_) + c0_;
      for (std::int64_t c = 0; c < width_; ++c) scale[c] = column_factor_[c].dequantize;
    } else {
      write_block_scale(args_.column_scale, tile_col_, tile_row_, scale_blocks(depth));
    }
  }

  // The tile's scale, and the zeros behind the last one of a row of scales.
  void write_block_scale(const Tensor& scale, std::int64_t i, std::int64_t j, std::int64_t count) {
    float* out = row<float>(scale, i);
    out[j] = row_factor_[0].dequantize;
    if (j == count - 1) std::fill(out + count, out + scale.cols(), 0.0f);
  }

  const QuantizeBlocks& args_;
  std::int64_t tile_row_, tile_col_, r0_, c0_, height_, width_;
  float values_[kScaleBlock * kScaleBlock];
  std::uint32_t row_largest_[kScaleBlock] = {};
  std::uint32_t column_largest_[kScaleBlock] = {};
  Fp8Factors row_factor_[kScaleBlock];
  Fp8Factors column_factor_[kScaleBlock];
};

template <typename T, typename F8>
void quantize_blocks_as(const QuantizeBlocks& args, ThreadTeam& team) {
  const std::int64_t depth = args.column.defined() ? args.column.cols() : 0;
  const std::int64_t across = scale_blocks(args.in.cols());
  const std::int64_t down = scale_blocks(std::max(args.in.rows(), depth));
  team.parallel_for(across * down, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      BlockTile<T, F8>(args, item / across, item % across).run();
    }
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

void quantize_blocks(const QuantizeBlocks& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    const DType format = args.row.defined() ? args.row.dtype : args.column.dtype;
    const bool is_wide = args.in.dtype == DType::kF32;
    if (format == DType::kF8E4M3) {
      return is_wide ? quantize_blocks_as<float, f8e4m3>(args, team)
                     : quantize_blocks_as<bf16, f8e4m3>(args, team);
    }
    return is_wide ? quantize_blocks_as<float, f8e5m2>(args, team)
                   : quantize_blocks_as<bf16, f8e5m2>(args, team);
  });
}

void cast_losses(const CastLosses& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    const std::int64_t cols = args.in.cols();
    const auto count = [&]<typename T>(TypeTag<T>) {
      team.parallel_for(args.in.rows(), row_grain(cols), [&](std::int64_t begin, std::int64_t end) {
        std::int64_t nonzero = 0;
        std::int64_t lost = 0;
        for (std::int64_t i = begin; i < end; ++i) {
          const T* in = row<T>(args.in, i);
          const auto* copy = row<std::uint8_t>(args.row, i);
          for (std::int64_t j = 0; j < cols; ++j) {
            const bool is_there = static_cast<float>(load(in[j])) != 0;
            nonzero += is_there ? 1 : 0;
            lost += is_there && (copy[j] & 0x7fu) == 0 ? 1 : 0;
          }
        }
        auto* counts = static_cast<std::int64_t*>(args.counts.data);
        std::atomic_ref(counts[0]).fetch_add(nonzero, std::memory_order_relaxed);
        std::atomic_ref(counts[1]).fetch_add(lost, std::memory_order_relaxed);
      });
    };
    args.in.dtype == DType::kF32 ? count(TypeTag<float>{}) : count(TypeTag<bf16>{});
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
