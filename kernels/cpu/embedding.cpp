// Row gather, and the sum of gradient rows by token. Bound by memory.
#include "kernels/embedding.h"

#include <cstring>

#include "kernels/cpu/common.h"
#include "kernels/ops.h"

namespace tessera::cpu {
namespace {

constexpr std::int64_t kColumns = 512;  // accumulated at a time on the stack

// dweight[first..last) in steps of one token each: the positions of a token are a run of `order`.
template <typename T, typename W>
void accumulate_rows(const EmbeddingBackward& args, std::int64_t first, std::int64_t last) {
  using C = Compute<T>;
  const auto* tokens = static_cast<const std::int32_t*>(args.tokens.data);
  const auto* order = static_cast<const std::int32_t*>(args.order.data);
  const std::int64_t count = args.tokens.numel(), hidden = args.dout.cols();
  const auto by_row = [&](std::int32_t position, std::int64_t wanted) {
    return tokens[position] - args.first_row < wanted;
  };
  const std::int32_t* next = std::lower_bound(order, order + count, first, by_row);
  for (std::int64_t r = first; r < last; ++r) {
    const std::int32_t* begin = next;
    while (next != order + count && tokens[*next] - args.first_row == r) ++next;
    if (begin == next && args.accumulate) continue;
    for (std::int64_t c0 = 0; c0 < hidden; c0 += kColumns) {
      const std::int64_t cols = std::min(kColumns, hidden - c0);
      C sum[kColumns] = {};
      for (const std::int32_t* position = begin; position != next; ++position) {
        const T* in = row<T>(args.dout, *position) + c0;
#pragma omp simd
        for (std::int64_t j = 0; j < cols; ++j) sum[j] += load(in[j]);
      }
      W* out = row<W>(args.dweight, r) + c0;
      for (std::int64_t j = 0; j < cols; ++j) {
        out[j] = store<W>(args.accumulate ? static_cast<C>(load(out[j])) + sum[j] : sum[j]);
      }
    }
  }
}

}  // namespace

void embedding_forward(const EmbeddingForward& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    const auto* tokens = static_cast<const std::int32_t*>(args.tokens.data);
    const std::size_t row_bytes = static_cast<std::size_t>(args.out.cols()) * size_of(args.out.dtype);
    const auto at = [](const Tensor& t, std::int64_t i) {
      return static_cast<char*>(t.data) + i * t.row_stride * static_cast<std::int64_t>(size_of(t.dtype));
    };
    team.parallel_for(args.out.rows(), row_grain(args.out.cols()),
                      [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        const std::int64_t r = tokens[t] - args.first_row;
        if (r >= 0 && r < args.weight.rows()) {
          std::memcpy(at(args.out, t), at(args.weight, r), row_bytes);
        } else {
          std::memset(at(args.out, t), 0, row_bytes);
        }
      }
    });
  });
}

void embedding_backward(const EmbeddingBackward& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    const auto* order = static_cast<const std::int32_t*>(args.order.data);
    for (std::int64_t i = 0; i < args.order.numel(); ++i) {
      CHECK(order[i] >= 0 && order[i] < args.tokens.numel(),
            "[embedding_backward] order[{}] is {}, expected a position below {}", i, order[i],
            args.tokens.numel());
    }
    // Common tokens crowd at the front of a vocabulary: small pieces, taken as threads become free.
    constexpr std::int64_t kPiece = 64;
    const std::int64_t rows = args.dweight.rows();
    visit_float(args.dout.dtype, [&]<typename T>(TypeTag<T>) {
      visit_gradient<T>(args.dweight.dtype, [&]<typename W>(TypeTag<W>) {
        for_each_item(team, (rows + kPiece - 1) / kPiece, team.threads(), [&](std::int64_t i, int) {
          accumulate_rows<T, W>(args, i * kPiece, std::min(rows, (i + 1) * kPiece));
        });
      });
    });
  });
}

}  // namespace tessera::cpu
