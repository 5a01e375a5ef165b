// Maps over rows with conversion between dtypes, column sums, sums of parts. Bound by memory.
#include "kernels/elementwise.h"

#include "kernels/cpu/common.h"
#include "kernels/cpu/convert.h"
#include "kernels/ops.h"

namespace tessera::cpu {
namespace {

// Calls body(row, first column, count) for runs that cover [rows, cols] of `shape`, over the team. A
// dense tensor is treated as one long row, so narrow tensors do not make short runs.
template <typename Body>
void for_each_run(ThreadTeam& team, std::int64_t rows, std::int64_t cols, bool all_dense, Body&& body) {
  if (all_dense) {
    cols *= rows;
    rows = 1;
  }
  const std::int64_t runs_per_row = (cols + kRun - 1) / kRun;
  team.parallel_for(rows * runs_per_row, 32, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t run = begin; run < end; ++run) {
      const std::int64_t col = run % runs_per_row * kRun;
      body(run / runs_per_row, col, std::min(kRun, cols - col));
    }
  });
}

template <typename C>
void add_as(const Add& args, ThreadTeam& team) {
  const bool dense = args.a.is_dense() && args.b.is_dense() && args.out.is_dense();
  for_each_run(team, args.out.rows(), args.out.cols(), dense,
               [&](std::int64_t i, std::int64_t col, std::int64_t n) {
    C a_buffer[kRun], b_buffer[kRun], out_buffer[kRun];
    const C* a = read_run(element(args.a, i, col), args.a.dtype, n, a_buffer);
    const C* b = read_run(element(args.b, i, col), args.b.dtype, n, b_buffer);
    char* target = element(args.out, i, col);
    C* out = output_run(target, args.out.dtype, out_buffer);
#pragma omp simd
    for (std::int64_t j = 0; j < n; ++j) out[j] = a[j] + b[j];
    write_run(out, target, args.out.dtype, n);
  });
}

template <typename C>
void scale_as(const Scale& args, ThreadTeam& team) {
  const auto factor = static_cast<C>(args.factor);
  for_each_run(team, args.out.rows(), args.out.cols(), args.in.is_dense() && args.out.is_dense(),
               [&](std::int64_t i, std::int64_t col, std::int64_t n) {
    C in_buffer[kRun], out_buffer[kRun];
    const C* in = read_run(element(args.in, i, col), args.in.dtype, n, in_buffer);
    char* target = element(args.out, i, col);
    C* out = output_run(target, args.out.dtype, out_buffer);
#pragma omp simd
    for (std::int64_t j = 0; j < n; ++j) out[j] = factor * in[j];
    write_run(out, target, args.out.dtype, n);
  });
}

template <typename C>
void sum_parts_as(const SumParts& args, ThreadTeam& team) {
  const std::int64_t n = args.out.numel();
  for_each_run(team, 1, n, true, [&](std::int64_t, std::int64_t col, std::int64_t count) {
    C sum[kRun], buffer[kRun];
    for (std::int64_t part = 0; part < args.count; ++part) {
      const C* in = read_run(element(args.in, 0, part * n + col), args.in.dtype, count, buffer);
      if (part == 0) {
        std::copy(in, in + count, sum);
      } else if (args.maximum) {
        // A NaN of any part stays.
#pragma omp simd
        for (std::int64_t j = 0; j < count; ++j) {
          sum[j] = (in[j] > sum[j] || in[j] != in[j]) ? in[j] : sum[j];
        }
      } else {
#pragma omp simd
        for (std::int64_t j = 0; j < count; ++j) sum[j] += in[j];
      }
    }
    visit_any_float(args.out.dtype, [&]<typename T>(TypeTag<T>) {
      store_as<C, T>(sum, count, element(args.out, 0, col));
    });
  });
}

// fp64 as soon as one operand is.
template <typename F>
void visit_compute(std::initializer_list<DType> dtypes, F&& f) {
  for (const DType dtype : dtypes) {
    if (dtype == DType::kF64) return f(TypeTag<double>{});
  }
  f(TypeTag<float>{});
}

}  // namespace

void add(const Add& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    visit_compute({args.a.dtype, args.b.dtype, args.out.dtype},
                  [&]<typename C>(TypeTag<C>) { add_as<C>(args, team); });
  });
}

void scale(const Scale& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    visit_compute({args.in.dtype, args.out.dtype},
                  [&]<typename C>(TypeTag<C>) { scale_as<C>(args, team); });
  });
}

void sum_parts(const SumParts& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  cpu.enqueue([args, &team = cpu.team()] {
    visit_compute({args.out.dtype}, [&]<typename C>(TypeTag<C>) { sum_parts_as<C>(args, team); });
  });
}

void column_sum(const ColumnSum& args, Stream& stream) {
  CpuStream& cpu = as_cpu(stream);
  const auto scratch = take_scratch(stream, workspace(args, stream.context().capabilities()));
  cpu.enqueue([args, memory = scratch.data(), &team = cpu.team()] {
    visit_float(args.in.dtype, [&]<typename T>(TypeTag<T>) {
      using C = Compute<T>;
      const std::int64_t n = args.in.cols();
      const RowPieces pieces = RowPieces::of(args.in.rows());
      C* partial = static_cast<C*>(memory);
      for_each_item(team, pieces.count, team.threads(), [&](std::int64_t piece, int) {
        C* sum = partial + piece * n;
        std::fill(sum, sum + n, C(0));
        for (std::int64_t i = pieces.begin(piece); i < pieces.end(piece); ++i) {
          const T* in = row<T>(args.in, i);
#pragma omp simd
          for (std::int64_t j = 0; j < n; ++j) sum[j] += load(in[j]);
        }
      });
      visit_gradient<T>(args.out.dtype, [&]<typename W>(TypeTag<W>) {
        add_pieces<W>(partial, pieces.count, n, n, args.accumulate, row<W>(args.out, 0));
      });
    });
  });
}

}  // namespace tessera::cpu
